"""Measure how far forecasts of GPU memory are off: compare every cell of the committed reports that ended well with the forecast
of its recipe.

    python -m benchmarks.memory            print the summary
    python -m benchmarks.memory --write    write it to docs/results/forecast/report.md, and its summary and an example to docs/memory.md

A third of the cells, those whose id has a digest divisible by three, were held out while the constants were chosen
(analysis/memory/measured_constants.py).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from analysis.memory.forecast import forecast
from analysis.memory.measured_constants import MEASURED, MIB
from launch.common.atomic_files import read_json
from launch.contract.outcomes import RESULTS_INTACT
from launch.contract.spec import RunSpec
from orchestrator.cli.main import main as main_of_orchestrator
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS, PAGE, REPORT = DOCS / "results", DOCS / "memory.md", DOCS / "results" / "forecast" / "report.md"
EXAMPLE = "plan gpt_oss_120b --explain memory transformer_engine.attn.mended"
MISS = 0.05
LEAN_LLAMA = "sequence_length=8192, global_batch_size=2, optimizer_precision=lean"
EXPLAINED = {
    ("failure_gallery", "eager, kind=input_freed"): "The injected fault holds 64 MiB, which no recipe implies.",
    ("local_inputs", "full_iteration"): "After the capture the allocator holds 1.2 GiB more than before. The cause is unknown.",
    **{
        ("llama3_8l", f"{cell}, engine=torch_native, recompute=full"): "As the cell of report memory with 2,048 tokens."
        for cell in ("eager", "full_iteration.optimizer")
    },
    ("memory", "eager, sequence_length=2048, global_batch_size=8"): "The build frees the first copies of the weights. The tensors "
    "of the loss are larger, so these blocks stay unused.",
    ("memory", f"eager, {LEAN_LLAMA}, recompute=full"): "As the cell with 2,048 tokens.",
    ("memory", f"full_iteration, {LEAN_LLAMA}, recompute=full"): "As the cell with 2,048 tokens.",
    ("memory", f"full_iteration, engine=megatron, {LEAN_LLAMA}, recompute=selective, recompute_modules=[mlp]"): "At the capture, "
    "5 GiB of blocks stay outside of the pool in addition to the state. The cause is unknown.",
    ("memory", "full_iteration, engine=megatron, preset=gpt_oss_20b, num_layers=4, moe_expert_capacity_factor=1.25, "
     "moe_pad_expert_input_to_capacity=true, sequence_length=2048, global_batch_size=4, optimizer_precision=lean"):
    "As the other lean cell of Megatron-Core, with 8 GiB.",
    ("packed_sequences", "full_iteration, moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=true"): "The pool holds "
    "more. Gradients may have split the 4 GiB workspace of packed attention, so that the next layer's took new memory.",
    ("two_nodes", "torch.attn.moe_router"): "0.1 GiB is missing in the eager step already, 0.2 GiB in what the capture adds. The "
    "cause is unknown; next to a state of 1.2 GiB it weighs more than elsewhere.",
    ("qwen3_8l_megatron_parallel", "transformer_engine.attn, ep=4"): "Dropless experts of several ranks: each routing leaves blocks "
    "of other sizes, and with graphs more than the one constant for them says.",
    ("qwen3_8l_megatron_parallel", "transformer_engine.attn.moe_router.moe_preprocess, ep=4"): "As the cell with attn alone.",
}  # fmt: skip
HEAD = """# Forecast of GPU memory, against what GPUs held

`python -m benchmarks.memory --write` wrote this page. Each row is a cell of a committed report that ended well. Allocated is torch's
peak of allocated bytes, device is the peak of the allocator's reservation and of what is outside of it, both of the fullest rank and
before phase probe. Both in MiB. The forecast knows the recipe alone ([memory.md](../../memory.md)).

A third of the cells was held out while the constants were chosen: those whose id has a digest divisible by three. Formulas came from
the code and from the other cells. Held-out cells share models, layouts and eager steps with these, so their error says
little of other models, GPUs and layouts: all runs are of H200s, on at most four GPUs.
"""


@dataclass(frozen=True)
class Compared:
    """The bytes of a cell's fullest rank, as (measured, forecast)."""

    report: str
    label: str
    held_out: bool
    has_fault: bool
    allocated: tuple[int, int]
    device: tuple[int, int]

    @property
    def errors(self) -> tuple[float, float]:
        """The relative error of each forecast: forecast / measured - 1."""
        return self.allocated[1] / self.allocated[0] - 1, self.device[1] / self.device[0] - 1


@dataclass(frozen=True)
class RanOut:
    """A cell that ran out of memory without an injected fault. Bytes: what it needed at least by forecast, and the GPU's."""

    report: str
    label: str
    needed: int
    total: int


def compare_all() -> tuple[list[Compared], list[RanOut], int]:
    """Return the cells that can be compared, those that ran out of memory, and how many other GPU cells did not end well."""
    found: list[Compared] = []
    ran_out: list[RanOut] = []
    others = 0
    for file in sorted(RESULTS.glob("*/report.json")):
        report = read_json(file)
        cells = [cell for cell in report["cells"] if cell["memory"] and cell["memory"]["kind"] == "device"]
        specs = _specs(report) if cells else {}
        # A user's program has no forecast, since its model is unknown.
        cells = [cell for cell in cells if specs[_label_now(cell)].engine != "command"]
        whole = [cell for cell in cells if cell["outcome"] in RESULTS_INTACT]
        less = [
            RanOut(
                file.parent.name,
                cell["label"],
                max(rank.needed for rank in forecast(spec)),
                cell["memory"]["device_total"],
            )
            for cell in cells
            if cell["outcome"] == "CUDA_OOM" and not (spec := specs[_label_now(cell)]).fault.is_set
        ]
        ran_out += less
        others += len(cells) - len(whole) - len(less)
        found += [_compare(file.parent.name, cell, specs[_label_now(cell)]) for cell in whole]
    return found, ran_out, others


def _label_now(cell: Mapping[str, Any]) -> str:
    """Return the label of a reported cell as a plan spells it now. Earlier reports have ``=True`` for ``=true``."""
    return re.sub(r"=(True|False)\b", lambda found: found[0].lower(), cell["label"])


def _specs(report: Mapping[str, Any]) -> dict[str, RunSpec]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{report['sweep']}.yaml"
        file.write_text(report["recipe"])
        return {cell.label: cell.spec for cell in expand(load(file, []), "cuda")}


def _compare(report: str, cell: Mapping[str, Any], spec: RunSpec) -> Compared:
    phases = [phase for phase in cell["memory"]["phases"] if phase["phase"] not in ("probe", "teardown")]
    ranks = forecast(spec)
    held_out = int(hashlib.sha256(cell["cell_id"].encode()).hexdigest(), 16) % 3 == 0
    return Compared(
        report, cell["label"], held_out, spec.fault.is_set,
        (max(phase["peak_allocated"] for phase in phases), max(rank.peak_allocated for rank in ranks)),
        (max(phase["peak"] for phase in phases), max(rank.peak for rank in ranks)),
    )  # fmt: skip


def documents() -> dict[Path, str]:
    """Return the report, and the page that explains an example, with the current figures."""
    cells, ran_out, others = compare_all()
    summary = "\n".join(_summary(cells))
    rest = f"{others} other cells on GPUs did not end well (injected faults), and their peaks are unknown."
    blocks = ([HEAD, summary], [rest], _out_of_memory(ran_out), _misses(cells), _constants(), _rows(cells))
    report = "\n\n".join("\n".join(lines) for lines in blocks)
    page = _fill(PAGE.read_text(), "errors of benchmarks/memory.py", summary)
    return {REPORT: f"{report}\n", PAGE: _fill(page, EXAMPLE, f"```text\n{_example()}```")}


def _fill(text: str, name: str, block: str) -> str:
    before, mark, after = text.partition(f"<!-- {name} -->\n")
    return f"{before}{mark}{block}\n<!-- end -->{after.partition('<!-- end -->')[2]}"


def _example() -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main_of_orchestrator(EXAMPLE.split())
    return printed.getvalue()


def _summary(cells: Sequence[Compared]) -> Iterator[str]:
    parts = {
        "held out": [cell for cell in cells if cell.held_out],
        "held out, no injected fault": [cell for cell in cells if cell.held_out and not cell.has_fault],
        "fitted": [cell for cell in cells if not cell.held_out],
    }
    yield "| cells | number | allocated: median, worst | device: median, worst |\n| --- | --- | --- | --- |"
    for name, part in parts.items():
        yield f"| {name} | {len(part)} | {_spread(part, 0)} | {_spread(part, 1)} |"


def _spread(cells: Sequence[Compared], figure: int) -> str:
    errors = [cell.errors[figure] for cell in cells]
    return f"{median(map(abs, errors)):.1%}, {max(errors, key=abs):+.1%}"


def _out_of_memory(cells: Sequence[RanOut]) -> Iterator[str]:
    yield f"{len(cells) or 'No'} cells ran out of memory by themselves{':' if cells else '.'}"
    for cell in cells:
        sizes = f"{cell.needed / MIB:,.0f} MiB of {cell.total / MIB:,.0f}"
        yield f"- {cell.report}, `{cell.label}`: needs at least {sizes} by forecast, {cell.needed / cell.total - 1:+.1%}"


def _misses(cells: Sequence[Compared]) -> Iterator[str]:
    yield f"## Cells that are off by more than {MISS:.0%}\n"
    for cell in cells:
        if max(map(abs, cell.errors)) > MISS:
            allocated, device = cell.errors
            why = EXPLAINED[cell.report, cell.label]
            yield f"- {cell.report}, `{cell.label}`: allocated {allocated:+.1%}, device {device:+.1%}. {why}"


def _constants() -> Iterator[str]:
    yield "## Constants\n\n| constant | engine | value | measured in |\n| --- | --- | --- | --- |"
    for each in vars(MEASURED).values():
        value = f"{each.value / MIB:.0f} MiB" if each.value > MIB else f"{each.value:g}"
        yield f"| {each.name} | {each.engine} | {value} | {each.measured} |"


def _rows(cells: Sequence[Compared]) -> Iterator[str]:
    yield "## Cells\n\n| report | cell | part | allocated | forecast | error | device | forecast | error |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for cell in cells:
        figures = [
            f"{measured / MIB:,.0f} | {forecast / MIB:,.0f} | {error:+.1%}"
            for (measured, forecast), error in zip((cell.allocated, cell.device), cell.errors, strict=True)
        ]
        part = "held out" if cell.held_out else "fitted"
        yield f"| {cell.report} | {cell.label} | {part} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    for file, text in documents().items() if parser.parse_args().write else ():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    print(*_summary(compare_all()[0]), sep="\n")


if __name__ == "__main__":
    main()
