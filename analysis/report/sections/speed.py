"""The speed-ups of graphed cells with their confidence, and the ranks or runs that slow them down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.limits.throttling import CAPPED_APART, SLOWED
from analysis.records.provenance import differing_fields
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import cell_text, how_to_read, table
from analysis.speed.confidence_interval import ALPHA
from analysis.speed.doubts import describe_clock, describe_eager_only_steps, describe_outliers
from analysis.speed.speed_verdict import BAND, MINIMUM_STEPS
from analysis.speed.speedup import Speed
from analysis.speed.steady_window import FENCE, NOTICEABLE, RARE
from analysis.sweep.cell_results import CellResult, PairResult
from analysis.sweep.host_contention import HostContention, neighbours_of
from launch.common.grouped import grouped
from launch.common.text import count

HEADER = ("cell", "speed-up", "verdict", "steady steps", "captured", "break-even step")
GPU_HEADER = ("step time, eager / graphed", "throttled, eager / graphed", "tokens/s/GPU", "model TFLOP/s/GPU")
NOTES = (
    "Speed-up: eager step time over graphed step time. A pair's times are the means of its steady window. The cell has the "
    "geometric mean of its pairs. Brackets show its interval, by Student's t on logarithms. It has a minimum width where few "
    "pairs may agree by chance (docs/speed.md).",
    f"NEUTRAL: the interval lies within {BAND:.0%} of 1. FASTER or SLOWER: it extends beyond that and excludes 1. INCONCLUSIVE: "
    f"all other cases. A cell with fewer than two pairs or {MINIMUM_STEPS} steady steps is INCONCLUSIVE too. A cell whose losses do "
    "not pass has no verdict, whatever its interval.",
    "All cells with a verdict are judged together, as one family of tests. The intervals are so wide that the chance of any "
    f"wrong FASTER or SLOWER among them is {ALPHA:.0%}.",
    "A verdict must also survive five checks: outliers, drift between repeats, the order of runs, changes within the window, and "
    "steps that are long in eager runs alone.",
    "Steady steps: the number of steps in the window, which has the steps that both runs measured, without settling steps. A "
    "slow phase that fills the whole window does not show. Longer runs show it.",
    f"Outliers: steps further from their run's median than {FENCE:g} robust standard deviations and {NOTICEABLE:.0%}. Both "
    f"sides leave them out, unless outliers are more than {RARE:.0%} of a run, or one side has significantly more of them. "
    "Then all steps count.",
    "Captured: the largest number of graphs and the longest capture of all ranks and repeats. With torch_compile the time "
    "includes the compilation.",
)
NOTE_AUTO = (
    "Repeats: with `repeats: auto`, a bundle is judged several times as its repeats end. These looks share the 5%, so the "
    "intervals hold no matter when the bundle stops."
)
NOTES_GPU = (
    "Model TFLOP/s: operations of the forward and backward pass, counted as Megatron does. Each weight that a token uses counts "
    "6 (of the experts: the top-k and the shared one), and attention counts under a causal mask.",
    "Break-even step: the cost of the capture and of settling, divided by the gain per step.",
    "Throttled: the share of the measured time in which the driver lowered a GPU's clocks. The table shows the rank and the run "
    "with the largest share. Hardware slowdowns are seen only at the start and the end of the window.",
    f"Throttling widens an interval in two cases: something other than a power cap slowed GPUs for more than {SLOWED:.0%} of "
    f"that time, or a power cap held one side longer than the other, by more than {CAPPED_APART:.0%}. Steps could have been "
    "shorter by that share, so the interval is wider by it. Of a cap's share, only what the lowest clock under it lacks counts, if "
    "it was read often enough. A verdict that does not hold for the wider interval becomes INCONCLUSIVE.",
)


def render(report: ReportData) -> list[str]:
    timed = [(result, result.speed.speedup) for result in report.shown if result.speed.speedup]
    remarks = _remarks(report.shown)
    if not timed:
        return ["## Speed", *remarks] if remarks else []
    on_gpu = any(result.on_gpu for result, _ in timed)
    rows = [[*_row(result, speed), *(_gpu_row(result, speed) if on_gpu else [])] for result, speed in timed]
    neighbours = neighbours_of(report.sweep.results)
    return [
        "## Speed",
        table([*HEADER, *(GPU_HEADER if on_gpu else [])], rows),
        *_unlike_repeats([result for result, _ in timed]),
        *how_to_read(*NOTES, *([NOTE_AUTO] if report.sweep.plan.looks else []), *(NOTES_GPU if on_gpu else [])),
        *([_contention(neighbours)] if neighbours else []),
        *remarks,
    ]


def _row(result: CellResult, speed: Speed) -> list[str]:
    return [
        result.name_with_verdict,
        speed.summary,
        speed.verdict if result.passes else "-",
        _steps(speed),
        _captured(result),
        _break_even(speed),
    ]


def _steps(speed: Speed) -> str:
    left_out = [count("outlier", speed.outliers)] if speed.outliers else []
    left_out += [f"{speed.settling} settling"] if speed.settling else []
    return f"{speed.steps} ({', '.join(left_out)})" if left_out else str(speed.steps)


def _captured(result: CellResult) -> str:
    cost = result.graphs.capture_cost
    if cost is None or not cost.graphs:
        return "-"
    if not result.on_gpu:
        return f"{count('compiled function', cost.graphs)} per rank"
    return f"{count('graph', cost.graphs)} per rank in {cost.seconds:.2f} s"


def _break_even(speed: Speed) -> str:
    if speed.verdict == "SLOWER":
        return "never"
    return f"{speed.break_even_step:,}" if speed.verdict == "FASTER" and speed.break_even_step is not None else "-"


def _gpu_row(result: CellResult, speed: Speed) -> list[str]:
    if not result.on_gpu:
        return ["-"] * len(GPU_HEADER)
    ranks, throttling = result.spec.parallelism.world_size, result.speed.throttling
    return [
        f"{speed.eager_ms:.2f} / {speed.graphed_ms:.2f} ms",
        f"{throttling.eager.summary} / {throttling.own.summary}" if throttling and throttling.eager else "not known",
        f"{speed.eager_tokens_per_second / ranks:,.0f} / {speed.graphed_tokens_per_second / ranks:,.0f}"
        if speed.eager_tokens_per_second
        else "-",
        f"{speed.eager_tflops:.4g} / {speed.graphed_tflops:.4g}" if speed.eager_tflops else "-",
    ]


def _unlike_repeats(timed: Sequence[CellResult]) -> list[str]:
    """Name the cells whose figures are means over several machines or several versions of the software."""
    cells = grouped(
        (differing_fields([pair.attempts[0].environment for pair in _timed_pairs(result)]), result) for result in timed
    )
    return [
        f"**Repeats differ in machine or software**: {cell_text('; '.join(differing))}. The two runs of each pair agree. "
        f"But the figures above are means over pairs that differ. Pair by pair: {'; '.join(map(_pair_by_pair, results))}."
        for differing, results in cells.items()
        if differing
    ]


def _timed_pairs(result: CellResult) -> list[PairResult]:
    return [pair for pair in result.pairs if pair.speed.ratio is not None]


def _pair_by_pair(result: CellResult) -> str:
    pairs = [pair.speed for pair in _timed_pairs(result)]
    ratios = ", ".join(f"{speed.ratio:.2f}x" for speed in pairs)
    times = f" (graphed {', '.join(f'{speed.graphed_ms:.2f}' for speed in pairs)} ms)" if result.on_gpu else ""
    return f"{result.name} {ratios}{times}"


def _contention(neighbours: HostContention) -> str:
    return (
        "Other bundles of this sweep ran on rank 0's host during "
        f"{neighbours.eager:.0%} of the eager runs' time and {neighbours.graphed:.0%} of the graphed runs' time. "
        "Such runs slow each other down if their steps wait for the host."
    )


def _remarks(shown: Sequence[CellResult]) -> list[str]:
    """Return a list of remarks on cells, each once, with the names of its cells."""
    names = grouped((remark, result.name) for result in shown for remark in _remarks_on(result))
    return ["\n".join(f"- {', '.join(cells)}: {remark}" for remark, cells in names.items())] if names else []


def _remarks_on(result: CellResult) -> Iterator[str]:
    speed = result.speed.speedup
    untimed = next((pair.speed.reason for pair in result.pairs if pair.speed.reason), "")
    if result.passes and not speed and untimed:
        yield f"no speed-up, because {untimed}."
    if speed and speed.reason:
        if result.passes:
            yield f"INCONCLUSIVE, because {speed.reason}."
        elif result.verdict and result.verdict.verdict == "INCONCLUSIVE":
            yield f"if its losses passed, its speed-up would be INCONCLUSIVE, because {speed.reason}."
    timed = [pair.speed for pair in _timed_pairs(result)]
    if speed and speed.verdict == "FASTER":
        said = (describe_eager_only_steps(timed, BAND), describe_clock(timed), describe_outliers(timed))
        yield from (f"{text}." for text in said if text)
    if speed and speed.outliers_kept:
        yield f"outliers stay in, because {speed.outliers_kept}."
    throttling, straggler = result.speed.throttling, result.speed.straggler
    if throttling and throttling.own.slowed and not speed:
        yield f"GPUs were slowed down by {throttling.own.slowed}."
    if straggler:
        what = "its GPU computes for" if straggler.what == "computing" else "its host takes"
        yield (
            f"rank {straggler.rank} slows the others down: {what} {straggler.milliseconds:.2f} ms per step. The "
            f"median of the other ranks of its pipeline stage is {straggler.others_ms:.2f} ms. GPU throttled: {straggler.throttled}."
        )
