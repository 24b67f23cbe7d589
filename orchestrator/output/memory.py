"""Print the forecast of a cell's GPU memory, term by term."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analysis.memory.forecast import RankForecast, fullest_rank
from analysis.memory.term import Held, Term, total
from launch.common.text import align, size
from launch.contract.plan import Cell, Plan
from orchestrator.targets.slurm_cluster import Cluster, Target

GROUPS: dict[Held, str] = {
    "allocated": "tensors, which torch counts as allocated",
    "pool": "in graph pools beside them",
    "cached": "in blocks that torch's allocator keeps, and gives back before memory runs out",
    "outside": "outside of the allocator",
}
RELIABILITY = "How far forecasts were off: docs/results/forecast/report.md"


def forecast_cells(plan: Plan) -> dict[str, RankForecast]:
    """Return the fullest rank of each cell on GPUs, by the cell's id. Leave out cells that cannot work anywhere."""
    specs = {cell.cell_id: cell.run_spec for cell in plan.cells if cell.state != "rejected"}
    return {cell_id: rank for cell_id, spec in specs.items() if (rank := fullest_rank(spec))}


def too_large(cell: Cell, rank: RankForecast, target: Target) -> str:
    """Return that ``cell`` may run out of memory.

    Return "" if it fits, if running out is expected, or if a GPU's memory is unknown.
    """
    gib = target.profile.gpu_memory_gib if isinstance(target, Cluster) else None
    if gib is None or rank.needed <= gib * 2**30 or cell.expect.outcome == "CUDA_OOM":
        return ""
    return f"may run out of memory: it needs at least {size(rank.needed)}, and gpu_memory_gib of the profile is {gib:g}"


def warn_of_memory(plan: Plan, target: Target) -> None:
    """Warn of cells that will run and may run out of memory.

    Do not reject them, because no forecast has been tested near a GPU's limit.
    """
    ranks = forecast_cells(plan)
    cells = [cell for cell in plan.cells if cell.state == "run" and cell.cell_id in ranks]
    for cell in cells:
        if reason := too_large(cell, ranks[cell.cell_id], target):
            fix = f"plan --explain memory CELL prints the terms. {RELIABILITY}"
            sys.stderr.write(f"{cell.label} {reason}\n    {fix}\n")


def print_memory(label: str, ranks: Sequence[RankForecast]) -> None:
    """Print the terms of the fullest rank in its fullest phase, then its other phases and the other ranks."""
    rank = max(ranks, key=lambda rank: rank.peak)
    place = f"a rank of pipeline stage {rank.stage + 1} of {len(ranks)}" if len(ranks) > 1 else "a rank"
    print(f"{label}: {size(rank.peak)} of GPU memory on {place}, in phase {rank.fullest_phase}")
    terms = rank.phases[rank.fullest_phase]
    lines = iter(align([_row(term) for term in terms]))
    printed = dict(zip(map(id, terms), lines, strict=True))
    for held, heading in GROUPS.items():
        if group := [term for term in terms if term.held == held]:
            print(f"\n{heading}: {size(total(group))}", *(f"  {printed[id(term)]}" for term in group), sep="\n")
    print(f"\nleast memory that it needs: {size(rank.needed)}")
    rows = [["phase", "allocated", "GPU memory"]]
    rows += [[phase, size(rank.allocated(phase)), size(rank.device(phase))] for phase in rank.phases]
    print("", *align(rows), sep="\n")
    if len(ranks) > 1:
        print("\nby pipeline stage:", ", ".join(size(each.peak) for each in ranks))
    if rank.worst_imbalance:
        print(f"\nif every token of its group chose experts of this rank: {size(rank.worst_imbalance)} more")
    print(f"\n{RELIABILITY}")


def _row(term: Term) -> list[str]:
    return [term.name, f"{size(term.bytes):>10}", term.formula, f"[{term.source}]"]
