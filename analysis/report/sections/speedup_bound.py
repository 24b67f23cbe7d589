"""What CUDA graphs gave and what they cost: how far each graphed cell is from the limit, and its captures."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.limits.speedup_bound import NEAR, EagerStep, GraphedStep, SpeedupBound, classify_bound
from analysis.report.sections.tables import table
from analysis.speed.speedup import BAND
from analysis.sweep.cell_results import CellResult
from launch.common.text import size

LIMIT_HEADER = (
    "cell", "eager step", "device busy (computing)", "launch-bound (not computing)", "host",
    "largest speed-up (computing)", "kernels a step, eager / graphed", "graph launches a step", "graphed step",
    "times busy (computing)", "attained (computing)", "what bounds it",
)  # fmt: skip
LIMIT_HOW = (
    "Graphs save what the host costs and nothing of what the device does: with the same kernels, a step cannot be "
    "shorter than the device is busy in it. Busy, computing and the host's time to enqueue a step are the eager twin's, from a "
    "few steps after the timed ones: of several ranks, busy is of the one that is busy for least, computing and host are of the "
    "slowest. The host has no time where it waits for the device in a step. In brackets is the figure without kernels that "
    "communicate. These also wait for other ranks, whose hosts graphs make faster: where they are a good part of a rank's busy "
    "time, the figure in brackets alone is a limit, and a step is longer by what it takes to pass data and to wait for what "
    "others compute. "
    "Launch-bound is the share of the eager step in which a device was idle; it is none where kernels waited longer when "
    "traced than when timed. What bounds ranks that communicate is told by the graphed run's own trace. Attained is "
    f"the share of that idle time that graphs saved, where it was more than {BAND:.0%} of the step, and above 100% where "
    f"kernels run faster in a graph than when traced. A step within {NEAR:.0%} of what the device needs is bound by it."
)
CAPTURE_HEADER = ("cell", "graphs", "capture", "graph pool", "graph launches a step")
CAPTURE_HOW = (
    "The most of ranks and repeats; with torch_compile the capture holds the compilation. The graph pool is what the "
    "allocator holds for graphs at the end of phase measure."
)


def limits(ran: Sequence[CellResult]) -> list[str]:
    """The graphed cells on GPUs; those that failed as they were to have no limit to speak of."""
    rows = [_limit_row(result, result.speed.bound) for result in ran if result.speed.bound and result.verdict]
    return ["## How far from the limit", table(LIMIT_HEADER, rows), LIMIT_HOW] if rows else []


def _limit_row(result: CellResult, limit: SpeedupBound) -> list[str]:
    passes = result.verdict is not None and result.verdict.passes
    word = "" if passes or result.verdict is None else f" (**{result.verdict.word}**)"
    return [
        f"`{result.cell.label}`{word}",
        *_eager(limit.eager),
        f"{_kernels(limit.eager)} / {_kernels(limit.graphed)}",
        *_graphed(limit),
        f"INDETERMINATE: {limit.reason}" if limit.reason else _bound(limit.eager, limit.graphed),
    ]


def _kernels(step: EagerStep | GraphedStep | None) -> str:
    return "-" if step is None else f"{step.kernels:.0f}"


def _eager(step: EagerStep | None) -> list[str]:
    if step is None:
        return ["-"] * 5
    return [
        f"{step.step_ms:.2f} ms",
        _both(f"{step.busy_ms:.2f} ms", f"{step.computing_ms:.2f} ms"),
        _both(_share(step.launch_bound), _share(step.not_computing)),
        "-" if step.host_ms is None else f"{step.host_ms:.2f} ms",
        _both(_times(step.largest_speedup), f"{step.largest_speedup_computing:.2f}x"),
    ]


def _both(with_communication: str, without: str) -> str:
    return with_communication if without == with_communication else f"{with_communication} ({without})"


def _graphed(limit: SpeedupBound) -> list[str]:
    if limit.eager is None or limit.graphed is None or limit.times_computing is None:
        return ["-"] * 4
    attained = "-" if limit.eager.communicates else _share(limit.attained)
    return [
        f"{limit.graphed.graph_launches:g}",
        f"{limit.graphed.step_ms:.2f} ms",
        _both("-" if limit.times_busy is None else f"{limit.times_busy:.3f}", f"{limit.times_computing:.3f}"),
        _both(attained, _share(limit.attained_computing)),
    ]


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"


def _share(share: float | None) -> str:
    return "none" if share is None or share <= 0 else f"{share:.0%}"


def _bound(eager: EagerStep | None, graphed: GraphedStep | None) -> str:
    """In words, with the figures that say so."""
    if eager is None or graphed is None:
        return "-"
    host = "the host waits for the device in it, so that its own time is not known"
    if graphed.host_ms is not None:
        host = f"the host takes {graphed.host_ms:.2f} of {graphed.step_ms:.2f} ms"
    bound = classify_bound(eager, graphed)
    if bound == "device":
        return "device-bound"
    if bound == "other kernels":
        counts = f"{graphed.kernels:.0f} kernels, not {eager.kernels:.0f}"
        return f"not told: it runs {counts} as the eager twin, whose busy time is no limit to it"
    if bound == "communication":
        return (
            f"communication: traced, each device is busy for at least {graphed.busy_ms:.2f} ms of a step and computes for at "
            f"most {graphed.computing_ms:.2f} ms; else ranks pass data, or wait for what others compute"
        )
    if bound == "host":
        return f"host-bound: {host} to enqueue what is not captured, or to wait for the device"
    if bound == "host in part":
        return f"host-bound in part: {host}"
    idle = graphed.step_ms - (graphed.busy_ms if eager.communicates else eager.busy_ms)
    but = "and" if graphed.host_ms is None else "though"
    who = "a device" if eager.communicates else "the device"
    return f"gaps between kernels: {who} is idle for {idle:.2f} ms, {but} {host}"


def captures(ran: Sequence[CellResult]) -> list[str]:
    """The graphed cells on GPUs that captured."""
    rows = [_capture_row(result) for result in ran if result.speed.bound and result.graphs.capture_cost]
    return ["## Captures", table(CAPTURE_HEADER, rows), CAPTURE_HOW] if rows else []


def _capture_row(result: CellResult) -> list[str]:
    memory, captured, bound = result.memory, result.graphs.capture_cost, result.speed.bound
    measure = memory.of("measure") if memory else None
    return [
        f"`{result.cell.label}`",
        str(captured.graphs) if captured else "-",
        f"{captured.seconds:.2f} s" if captured else "-",
        "-" if measure is None or measure.graph_pool is None else size(measure.graph_pool),
        f"{bound.graphed.graph_launches:g}" if bound and bound.graphed else "-",
    ]
