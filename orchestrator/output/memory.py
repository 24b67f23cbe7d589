"""Print the forecast of a cell's GPU memory, term by term."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.memory.calibration import CalibrationResult
from analysis.memory.forecast import RankForecast
from analysis.memory.measured_constants import MEASURED
from analysis.memory.term import Held, Term, mib, total
from launch.common.text import align, count, size
from launch.contract.plan import Plan
from orchestrator.plan.memory_check import MemoryCheck

GROUPS: dict[Held, str] = {
    "allocated": "tensors, which torch counts as allocated",
    "pool": "in graph pools, in addition",
    "cached": "in blocks that torch's allocator keeps, and gives back before memory runs out",
    "outside": "outside of the allocator",
}
UNKNOWN_ERROR = "It assumes that memory grows linearly with this flag. How far that is off is unknown"
UNCERTAIN = "At most one model was measured with {}. How far the forecast is off for others is unknown"
RELIABILITY = "docs/results/forecast/report.md shows how far forecasts were off"


def warn_of_memory(plan: Plan, memory: MemoryCheck) -> None:
    """Warn of cells that will run, and that may lack memory for training or for their step checks."""
    for cell in plan.cells:
        if warning := memory.warning(cell):
            fix = f"plan --explain memory CELL prints the terms. {RELIABILITY}"
            sys.stderr.write(f"{cell.label} {warning}\n    {fix}\n")


def print_memory(label: str, ranks: Sequence[RankForecast]) -> None:
    """Print the terms of the fullest rank in its fullest phase, then its other phases and the other ranks."""
    rank = max(ranks, key=lambda rank: rank.peak)
    place = f"a rank of pipeline stage {rank.stage + 1} of {len(ranks)}" if len(ranks) > 1 else "a rank"
    print(
        f"{label}: {size(rank.peak)} of GPU memory on {place}, in phase {rank.fullest_phase}"
        + f", {rank.remark}" * bool(rank.remark)
    )
    terms = rank.phases[rank.fullest_phase]
    lines = iter(align([_row(term) for term in terms]))
    printed = dict(zip(map(id, terms), lines, strict=True))
    for held, heading in GROUPS.items():
        if group := [term for term in terms if term.held == held]:
            print(f"\n{heading}: {size(total(group))}", *(f"  {printed[id(term)]}" for term in group), sep="\n")
    with_checks = f"; with step checks: {size(rank.checked)}" if rank.checked else ""
    print(f"\nleast memory that it needs: {size(rank.needed)}{with_checks}")
    rows = [["phase", "allocated", "GPU memory"]]
    rows += [[phase, size(rank.allocated(phase)), size(rank.device(phase))] for phase in rank.phases]
    print("", *align(rows), sep="\n")
    if len(ranks) > 1:
        print("\nby pipeline stage:", ", ".join(size(each.peak) for each in ranks))
    if rank.worst_imbalance:
        print(f"\nif every token of its group chose experts of this rank: {size(rank.worst_imbalance)} more")
    uncertain = UNCERTAIN.format(" and ".join(rank.uncertain)) if rank.uncertain else RELIABILITY
    print(f"\n{UNKNOWN_ERROR if rank.basis else uncertain}")


def print_calibration(result: CalibrationResult, file: Path) -> None:
    """Print the constants with the runs behind each, the errors before and after, and where they are."""
    rows = [["constant", "built in", "site", "runs"]]
    for name, learned in result.site.constants.items():
        built_in = getattr(MEASURED, name)
        rows.append([built_in.name, _value(built_in.value), _value(learned.value), str(learned.runs)])
    print(*align(rows), sep="\n")
    rows = [[f"error of {count('cell', result.cells)}", "median", "worst"]]
    for when, (median, worst) in (("before", result.before), ("after", result.after)):
        rows.append([when, f"{median:.1%}", f"{worst:+.1%}"])
    print("", *align(rows), sep="\n")
    if result.is_better:
        print(
            "\nThe error after calibration is measured on the same cells; other cells may be off by more. plan reads the "
            f"constants in {file}"
        )
    else:
        print("\nNo file is written: the built-in constants are as accurate")


def _value(value: float) -> str:
    return f"{mib(value):.0f} MiB" if value > 1 else f"{value:.3g}"


def _row(term: Term) -> list[str]:
    return [term.name, f"{size(term.bytes):>10}", term.formula, f"[{term.source}]"]
