"""How far each graphed cell is from the upper bound of its speed-up."""

from __future__ import annotations

from analysis.limits.speedup_bound import NEAR, EagerStep, GraphedStep, ProbedStep, SpeedupBound, classify_bound
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import how_to_read, table
from analysis.speed.speed_verdict import BAND
from analysis.sweep.cell_results import CellResult

HEADER = (
    "cell", "eager step", "GPU busy (computing)", "launch-bound (not computing)", "host",
    "upper bound", "kernels per step, eager / graphed", "graph launches per step", "graphed step",
    "graphed step / least time", "attained", "bottleneck",
)  # fmt: skip
NOTES = (
    "Upper bound: the eager step time divided by the time for which the GPU is busy in that step. Graphs save host time and no "
    "GPU time, so a step with the same kernels cannot be shorter than that least time. Cells with other kernels have none.",
    "GPU busy, computing and host: measured on the eager baseline over a few steps after the timed ones. With several ranks, "
    "busy is the figure of the least busy rank. Computing and host are the figures of the slowest rank.",
    "Host: the time in which the host enqueues a step. It has no figure if the host waits for the GPU within a step.",
    "(Computing): the figure in brackets, without kernels that communicate. Such kernels also wait for other ranks, whose hosts "
    "become faster with graphs. If they take much of a rank's busy time, the figure in brackets is the least time, and bounds the "
    "speed-up. A real step also takes time to transfer data and to wait for other ranks.",
    "Launch-bound: the share of the eager step in which a GPU is idle. It has no figure if kernels waited longer in the trace "
    "than in the timed steps.",
    "Attained: the share of the time beyond the least time that graphs saved. It has a figure if that time was more than "
    f"{BAND:.0%} of the eager step. It exceeds 100% if kernels run faster in a graph than in the trace.",
    f"Bottleneck: a step within {NEAR:.0%} of the time that the GPU needs is GPU-bound. If ranks communicate, the bottleneck "
    "comes from the graphed run's own trace.",
)


def render(report: ReportData) -> list[str]:
    """Render the graphed cells on GPUs. A cell that failed as expected has no bound."""
    rows = [_row(result, result.speed.bound) for result in report.shown if result.speed.bound and result.verdict]
    return ["## Distance from the upper bound", table(HEADER, rows), *how_to_read(*NOTES)] if rows else []


def _row(result: CellResult, bound: SpeedupBound) -> list[str]:
    return [
        result.name_with_verdict,
        *_eager(bound.eager),
        "-" if bound.upper_bound is None else f"{bound.upper_bound:.2f}x",
        f"{_kernels(bound.eager)} / {_kernels(bound.graphed)}",
        *_graphed(bound),
        f"INDETERMINATE: {bound.reason}" if bound.reason else _bottleneck(bound.eager, bound.graphed),
    ]


def _kernels(step: ProbedStep | None) -> str:
    return "-" if step is None else f"{step.kernels:.0f}"


def _eager(step: EagerStep | None) -> list[str]:
    if step is None:
        return ["-"] * 4
    return [
        f"{step.step_ms:.2f} ms",
        _both(f"{step.busy_ms:.2f} ms", f"{step.computing_ms:.2f} ms"),
        _both(_share(step.launch_bound), _share(step.not_computing)),
        "-" if step.host_ms is None else f"{step.host_ms:.2f} ms",
    ]


def _both(with_communication: str, without: str) -> str:
    return with_communication if without == with_communication else f"{with_communication} ({without})"


def _graphed(bound: SpeedupBound) -> list[str]:
    if bound.graphed is None or bound.eager is None:
        return ["-"] * 4
    step = [f"{bound.graphed.graph_launches:g}", f"{bound.graphed.step_ms:.2f} ms"]
    if bound.times_bound is None:
        return [*step, "-", "-"]
    return [*step, f"{bound.times_bound:.2f}x", _share(bound.attained)]


def _share(share: float | None) -> str:
    return "none" if share is None or share <= 0 else f"{share:.0%}"


def _bottleneck(eager: EagerStep | None, graphed: GraphedStep | None) -> str:
    """Return the bottleneck in words, with the figures behind it."""
    if eager is None or graphed is None:
        return "-"
    host = "the host waits for the GPU within a step, so its own time is unknown"
    if graphed.host_ms is not None and graphed.host_ms <= graphed.step_ms:
        host = f"the host takes {graphed.host_ms:.2f} of {graphed.step_ms:.2f} ms"
    elif graphed.host_ms is not None:  # Tracing slows the host down.
        host = f"the host takes {graphed.host_ms:.2f} ms in a traced step (a timed step takes {graphed.step_ms:.2f} ms)"
    bound = classify_bound(eager, graphed)
    if bound == "device":
        return "GPU-bound"
    if bound == "other kernels":
        kernels = f"{graphed.kernels:.0f} kernels and the eager baseline {eager.kernels:.0f}"
        return f"unknown: the cell runs {kernels}, so the baseline's busy time does not bound it"
    if bound == "communication":
        return (
            f"communication: in the trace of a step, each GPU is busy for at least {graphed.busy_ms:.2f} ms and computes for "
            f"at most {graphed.computing_ms:.2f} ms. In the rest, ranks transfer data or wait for each other"
        )
    if bound == "host":
        return f"host-bound: {host} to enqueue code outside the graphs, or to wait for the GPU"
    if bound == "host in part":
        return f"host-bound in part: {host}"
    idle = graphed.step_ms - (graphed.busy_ms if eager.communicates else eager.busy_ms)
    link = "and" if graphed.host_ms is None else "although"
    gpu = "a GPU" if eager.communicates else "the GPU"
    return f"gaps between kernels: {gpu} is idle for {idle:.2f} ms, {link} {host}"
