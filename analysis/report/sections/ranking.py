"""Which cell of each task to take."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.report.sections.tables import cell_text, table
from analysis.sweep.ranking import ALLOCATION_ALLOWANCE, Ranked, Ranking
from launch.common.text import count, size

MAXIMUM_TASKS = 6
MAXIMUM_CELLS = 20
HOW = (
    "Cells of one task compute the same. Ranked are eager cells that ended well and graphed cells that pass, by absolute step "
    "time: the median over runs of the mean of their steady window, with the least and the most. Only eager and graphed runs "
    "of one workload share an allocation, so that no ratio between rows is a paired speed-up. Cells of one workload are told "
    "apart by their pairs, others where all runs of one, of two or more each, are faster than all of the other by more than "
    f"{ALLOCATION_ALLOWANCE:.0%}, an allowance for what allocations differ by. What is not told apart from the first may be as "
    "fast, or only have too few runs to show that it is not. On the Pareto front is what no other cell beats in step time, "
    "peak memory a rank and number of ranks together."
)


def rankings(found: Sequence[Ranking]) -> list[str]:
    if not found:
        return []
    blocks = ["## Ranking", HOW]
    for ranking in found[:MAXIMUM_TASKS]:
        blocks += _ranking(ranking)
    if len(found) > MAXIMUM_TASKS:
        blocks.append(f"{len(found) - MAXIMUM_TASKS} more tasks are in report.json.")
    return blocks


def _ranking(ranking: Ranking) -> list[str]:
    on_gpu = ranking.device == "cuda"
    header = ["place", "cell", "differs in", *(["GPUs", "step time", "tokens/s a GPU", "model TFLOP/s a GPU"] if on_gpu else
              ["ranks", "step time, first = 1"]), "peak memory a rank", "Pareto front", "runs"]  # fmt: skip
    shown = ranking.cells[:MAXIMUM_CELLS]
    rows = [_row(place, cell, ranking) for place, cell in enumerate(shown, 1)]
    more = [f"{len(ranking.cells) - MAXIMUM_CELLS} slower ones are in report.json."] * (
        len(ranking.cells) > MAXIMUM_CELLS
    )
    return [
        f"### {ranking.name} (task {ranking.task_id})",
        _best(ranking),
        table(header, rows),
        *more,
        *_apart(ranking),
    ]


def _best(ranking: Ranking) -> str:
    best, on_gpu = ranking.best, ranking.device == "cuda"
    time = f", {best.step.milliseconds:.2f} ms a step on {_machine(best)}" if on_gpu else ""
    unsure = [cell for cell in ranking.cells[1:] if not cell.told_apart]
    said = f"Fastest: `{best.label}`{time}"
    if unsure:
        said += f", not told apart from {count('other', len(unsure))}"
    if ranking.most_of_a_rank is not best:
        said += f". Most tokens a second and {'GPU' if on_gpu else 'rank'}: `{ranking.most_of_a_rank.label}`"
    return f"{said}. From runs in {count('allocation', ranking.allocations)}."


def _machine(cell: Ranked) -> str:
    gpus = count("GPU", cell.ranks)
    return f"{gpus} of {cell.nodes} nodes" if cell.nodes > 1 else gpus


def _row(place: int, cell: Ranked, ranking: Ranking) -> list[str]:
    unsure = place > 1 and not cell.told_apart
    row = [f"{place}{' (not told apart)' if unsure else ''}", f"`{cell.label}`", ", ".join(cell.sets_apart)]
    if ranking.device == "cuda":
        row += [
            f"{cell.ranks} on {cell.nodes} nodes" if cell.nodes > 1 else str(cell.ranks),
            _time(cell, 1.0, " ms"),
            f"{cell.tokens_per_second_per_rank:,.0f}",
            f"{cell.tflops:.4g}",
        ]
    else:
        row += [str(cell.ranks), _time(cell, ranking.best.step.milliseconds, "")]
    peak = "-" if cell.peak is None else size(cell.peak)
    return [*row, peak, "yes" if cell.on_front else "-", str(cell.step.runs)]


def _time(cell: Ranked, unit: float, suffix: str) -> str:
    step = cell.step
    spread = f" ({step.low / unit:.2f}-{step.high / unit:.2f})" if step.runs > 1 else ""
    return f"{step.milliseconds / unit:.2f}{suffix}{spread}"


def _apart(ranking: Ranking) -> list[str]:
    blocks = []
    if ranking.left_out:
        named = [f"`{label}` ({why})" for label, why in ranking.left_out[:MAXIMUM_CELLS]]
        rest = len(ranking.left_out) - MAXIMUM_CELLS
        blocks.append(f"Not ranked: {', '.join(named)}{f' and {rest} more' if rest > 0 else ''}.")
    if ranking.machines:
        blocks.append(
            f"**The runs ranked are not of one machine or software**: {cell_text('; '.join(ranking.machines))}."
        )
    return blocks
