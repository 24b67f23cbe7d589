"""The fastest cells of each task."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import cell_text, how_to_read, table
from analysis.speed.speed_verdict import BAND
from analysis.sweep.ranking import ALLOCATION_ALLOWANCE, Order, Ranked, Ranking, rank
from launch.common.text import count, listed, size

MAXIMUM_TASKS = 6
MAXIMUM_CELLS = 20
ORDERS: Mapping[Order, str] = {
    "best": "",
    "slower": "",
    "equal": f" (within {BAND:.0%} of {{}})",
    "undecided": " (may be as fast as {})",
}
NOTES = (
    "The table ranks completed eager cells and passing graphed cells of one task, fastest first.",
    "Step time: a run has the mean of its steady window, and a cell the geometric mean of its runs. Brackets show the fastest "
    "and the slowest run. Section Speed shows a different time only if a run has no pair, or if one run of a pair has outliers that "
    "the other lacks.",
    "The ratio of two rows is not a speed-up. Only eager and graphed runs of one workload share an allocation.",
    f"Within {BAND:.0%}: the cell is as fast as the first. May be as fast: the order is undecided, and more runs may decide "
    "it. Cells of one workload are compared by their pairs. Other cells are ordered only if both have two runs, and all runs of "
    f"one are faster than all runs of the other by more than {ALLOCATION_ALLOWANCE:.0%}. Allocations may differ by that much.",
    "Pareto front: no other cell beats this cell in step time, memory per rank and number of ranks together.",
)


def render(report: ReportData) -> list[str]:
    rankings = rank(report.sweep.results)
    names = {result.cell.label: result.name for result in report.ran}
    blocks = [block for ranking in rankings[:MAXIMUM_TASKS] for block in _ranking(ranking, names)]
    if len(rankings) > MAXIMUM_TASKS:
        blocks.append(f"report.json lists {count('more task', len(rankings) - MAXIMUM_TASKS)}.")
    return ["## Ranking", *blocks, *how_to_read(*NOTES)] if blocks else []


def _ranking(ranking: Ranking, names: Mapping[str, str]) -> list[str]:
    on_gpu = ranking.device == "cuda"
    header = ["place", "name", "cell", *(["GPUs", "step time", "tokens/s/GPU", "model TFLOP/s/GPU"] if on_gpu else
              ["ranks", "step time, first = 1"]), "memory per rank", "Pareto front", "runs"]  # fmt: skip
    rows = [_row(place, cell, ranking, names) for place, cell in enumerate(ranking.cells[:MAXIMUM_CELLS], 1)]
    blocks = [f"### {ranking.name} (task {ranking.task_id})", _best(ranking, names), table(header, rows)]
    if len(ranking.cells) > MAXIMUM_CELLS:
        blocks.append(f"report.json lists {count('slower cell', len(ranking.cells) - MAXIMUM_CELLS)}.")
    if ranking.not_ranked:
        not_ranked = [f"{names[label]} ({reason})" for label, reason in ranking.not_ranked]
        blocks.append(f"Not ranked: {listed(not_ranked, MAXIMUM_CELLS)}.")
    if ranking.machines:
        blocks.append(f"**The ranked runs differ in machine or software**: {cell_text('; '.join(ranking.machines))}.")
    return blocks


def _best(ranking: Ranking, names: Mapping[str, str]) -> str:
    best, on_gpu = ranking.best, ranking.device == "cuda"
    text = f"Fastest: {names[best.label]}"
    if on_gpu:
        nodes = f" on {best.nodes} nodes" if best.nodes > 1 else ""
        text += f", {best.step.milliseconds:.2f} ms per step on {count('GPU', best.ranks)}{nodes}"
    if ranking.not_slower:
        text += f", {ranking.not_slower}"
    if ranking.most_of_a_rank is not best:
        text += f". Most tokens/s/{'GPU' if on_gpu else 'rank'}: {names[ranking.most_of_a_rank.label]}"
    return f"{text}. The runs used {count('allocation', ranking.allocations)}."


def _row(place: int, cell: Ranked, ranking: Ranking, names: Mapping[str, str]) -> list[str]:
    order = ORDERS[cell.against_best].format(names[ranking.best.label])
    row = [f"{place}{order}", names[cell.label], f"`{cell.label}`"]
    if ranking.device == "cuda":
        row += [
            f"{cell.ranks} on {cell.nodes} nodes" if cell.nodes > 1 else str(cell.ranks),
            _time(cell, 1.0, " ms"),
            f"{cell.tokens_per_second_per_rank:,.0f}" if cell.tokens_per_second_per_rank else "-",
            f"{cell.tflops:.4g}" if cell.tflops else "-",
        ]
    else:
        row += [str(cell.ranks), _time(cell, ranking.best.step.milliseconds, "")]
    peak = "-" if cell.memory_per_rank is None else size(cell.memory_per_rank)
    return [*row, peak, "yes" if cell.on_pareto_front else "-", str(cell.step.runs)]


def _time(cell: Ranked, unit: float, suffix: str) -> str:
    step = cell.step
    spread = f" ({step.low / unit:.2f} to {step.high / unit:.2f})" if step.runs > 1 else ""
    return f"{step.milliseconds / unit:.2f}{suffix}{spread}"
