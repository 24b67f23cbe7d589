"""How much faster graphed cells are, how sure that is, and who holds them up."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.limits.throttling import CAPPED_APART, SLOWED
from analysis.pairing.pair import PairResult
from analysis.records.provenance import differing_fields
from analysis.report.sections.tables import cell_text, table
from analysis.speed.speedup import BAND, MINIMUM_STEPS, Speed
from analysis.speed.steady_window import FENCE, NOTICEABLE, RARE
from analysis.statistics.confidence_interval import ALPHA
from analysis.sweep.cell_results import CellResult
from analysis.sweep.host_contention import HostContention
from launch.common.text import count

HOW = (
    "A pair's speed-up is the ratio of the mean steps of its steady window; in brackets is its interval over the pairs, by "
    "Student's t on logarithms. All cells that have a word count as one family: the chance that any of them is wrongly FASTER "
    f"or SLOWER is {ALPHA:.0%}, and intervals are as wide as that takes. NEUTRAL: the interval lies within "
    f"{BAND:.0%} of 1; FASTER and SLOWER: it clears 1; anything "
    f"else, and fewer than two pairs or {MINIMUM_STEPS} steady steps, is INCONCLUSIVE. The window "
    "holds the steps measured in both runs, without those that settle. Steps further from their run's median than "
    f"{FENCE:g} robust standard deviations and {NOTICEABLE:.0%} are outliers and left out on both sides, unless they are "
    f"more than {RARE:.0%} of a run or one side's alone: then it is how the run behaves, and all counts. "
    "Nor may they change the word: it has to hold with them, too."
)
HOW_GPU = (
    "Operations are the model's, forward and backward, as Megatron counts them: 6 for each weight that a token meets (of "
    "experts the top-k and the shared one), and attention under a causal mask. A capture has paid off after as many steps "
    "as its cost takes, settling among it, over the gain a step."
)
HOW_THROTTLED = (
    "GPUs are throttled for the share of the measured time for which the driver lowered their clocks, on the rank and in the "
    "run with most of it; hardware slowdowns are only seen where the window begins and ends. Where GPUs were slowed down by "
    f"anything but a power cap for more than {SLOWED:.0%} of that time, or one side was capped for longer by more than "
    f"{CAPPED_APART:.0%} of it, steps could have been shorter by as much: the interval is as much wider, and a word that does not "
    "hold for all of it is taken away."
)


def speeds(shown: Sequence[CellResult], neighbours: HostContention | None) -> list[str]:
    """The graphed cells that have a speed, and who ran beside them."""
    timed = [(result, result.speed.speedup) for result in shown if result.speed.speedup]
    remarks = _remarks(shown)
    if not timed:
        return ["## Speed", *remarks] if remarks else []
    on_gpu = any(result.on_gpu for result, _ in timed)
    header = ["cell", "speed-up", "verdict", "steady steps", "capture pays off after"]
    absolute = (
        ["step time, eager / graphed", "throttled, eager / graphed", "tokens/s a GPU", "model TFLOP/s a GPU"]
        if on_gpu
        else []
    )
    rows = [[*_row(result, speed), *(_absolute(result, speed) if on_gpu else [])] for result, speed in timed]
    how = [HOW, *([HOW_GPU, HOW_THROTTLED] if on_gpu else []), *([_beside(neighbours)] if neighbours else [])]
    return ["## Speed", table([*header, *absolute], rows), *_unlike([result for result, _ in timed]), *how, *remarks]


def _unlike(timed: Sequence[CellResult]) -> list[str]:
    """Cells whose figure is a mean over repeats of several machines, or of several versions of the software."""
    cells: dict[tuple[str, ...], list[CellResult]] = {}
    for result in timed:
        if apart := differing_fields([pair.attempts[0].environment for pair in _timed(result)]):
            cells.setdefault(apart, []).append(result)
    return [
        f"**Repeats are not of one machine or software**: {cell_text('; '.join(apart))}. The two runs of a pair share them, and "
        f"the figures above are means over unlike pairs. Pair by pair: {'; '.join(map(_pair_by_pair, found))}."
        for apart, found in cells.items()
    ]


def _timed(result: CellResult) -> list[PairResult]:
    """The pairs of which its speed is a mean."""
    return [pair for pair in result.pairs if pair.speed.ratio is not None]


def _pair_by_pair(result: CellResult) -> str:
    pairs = [pair.speed for pair in _timed(result)]
    said = ", ".join(f"{speed.ratio:.2f}x" for speed in pairs)
    times = f" (graphed {', '.join(f'{speed.graphed_ms:.2f}' for speed in pairs)} ms)" if result.on_gpu else ""
    return f"`{result.cell.label}` {said}{times}"


def _beside(neighbours: HostContention) -> str:
    return (
        "Runs of other bundles of this sweep were under way on the same host (that of rank 0) for "
        f"{neighbours.eager:.0%} of the eager runs' time and {neighbours.graphed:.0%} of the graphed runs'. Where a step waits for the host, they slow each other down."
    )


def _row(result: CellResult, speed: Speed) -> list[str]:
    passes = result.verdict is not None and result.verdict.passes
    return [
        f"`{result.cell.label}`" + ("" if passes or result.verdict is None else f" (**{result.verdict.word}**)"),
        speed.summary,
        speed.word if passes else "-",
        _steps(speed),
        _pays_off(speed),
    ]


def _steps(speed: Speed) -> str:
    left = [count("outlier", speed.left_out)] if speed.left_out else []
    left += [f"{speed.settling} settling"] if speed.settling else []
    return f"{speed.steps} ({', '.join(left)})" if left else str(speed.steps)


def _pays_off(speed: Speed) -> str:
    if speed.word == "SLOWER":
        return "never"
    if speed.word != "FASTER" or speed.break_even_steps is None:
        return "-"
    return count("step", speed.break_even_steps)


def _absolute(result: CellResult, speed: Speed) -> list[str]:
    ranks = result.spec.parallelism.world_size
    if not result.on_gpu:
        return ["-"] * 4
    tokens = speed.eager_tokens_per_second / ranks, speed.graphed_tokens_per_second / ranks
    return [
        f"{speed.eager_ms:.2f} / {speed.graphed_ms:.2f} ms",
        _throttled(result),
        f"{tokens[0]:,.0f} / {tokens[1]:,.0f}",
        f"{speed.eager_tflops:.4g} / {speed.graphed_tflops:.4g}",
    ]


def _throttled(result: CellResult) -> str:
    throttling = result.speed.throttling
    if throttling is None or throttling.eager is None:
        return "not known"
    return f"{throttling.eager.summary} / {throttling.own.summary}"


def _untimed(result: CellResult) -> str:
    """Why a cell that passes has no speed; empty where it has one, or does not pass."""
    if result.speed.speedup or not (result.verdict and result.verdict.passes):
        return ""
    return next((pair.speed.reason for pair in result.pairs if pair.speed.reason), "")


def _remarks(shown: Sequence[CellResult]) -> list[str]:
    lines = []
    for result in shown:
        who = f"- `{result.cell.label}`"
        if untimed := _untimed(result):
            lines.append(f"{who}: no speed, since {untimed}.")
        speedup, throttling, found = result.speed.speedup, result.speed.throttling, result.speed.straggler
        if speedup and speedup.reason and result.verdict and result.verdict.passes:
            lines.append(f"{who}: INCONCLUSIVE, since {speedup.reason}.")
        if speedup and speedup.off_counts:
            lines.append(f"{who}: no step is left out as an outlier, since {speedup.off_counts}.")
        if throttling and throttling.own.slowed and not speedup:
            lines.append(f"{who}: its GPUs were slowed down by {throttling.own.slowed}.")
        if found:
            does = "its GPU computes" if found.what == "computing" else "its host takes"
            lines.append(
                f"{who}: rank {found.rank} holds the others up: {does} {found.milliseconds:.2f} ms a step, and "
                f"{found.others_ms:.2f} ms is the median of the others of its pipeline stage. GPU throttled: {found.throttled}."
            )
    return ["\n".join(lines)] if lines else []
