"""The upper bound of a graphed cell's speed-up, from the eager baseline's kernels.

Graphs remove the host's cost and leave the device's work. With T the baseline's step and B the time its device is busy, the
upper bound is T / B. Kernels that communicate are busy while they wait for other ranks, whose hosts may be late; graphs remove
that wait, so B is not a bound then. C, the time without these kernels, is a bound: a step takes at least C, plus the time for
passing data and waiting for other ranks' computation. With several ranks, B is that of the least busy one, whose device is idle
while the others wait for it.

A graphed step's duration comes from its timed steps, since tracing disturbs replay. All other times are milliseconds per step of
the slowest rank. Steps are timed on rank 0, as for the speed-up (analysis/speed/speedup.py). Over repeats, times are geometric
means, so that a ratio of two is the mean of the pairs' ratios even if machines differ; counts are medians.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.pairing.pair import Pair
from analysis.records.run import Attempt
from analysis.speed.ratios import geometric_mean
from analysis.speed.speed_verdict import BAND
from analysis.speed.steady_window import is_plausible
from analysis.speed.step_time import is_sound, steady_ms
from launch.contract.records.probe import Probe

Bound = Literal["device", "communication", "host", "host in part", "gaps", "other kernels"]
NEAR = 0.05
"""A step that exceeds the busy time by at most this share is bound by the device. Kernel counts that differ by at most this
share count as equal."""
QUICKER_IN_A_GRAPH = 0.2
"""The share by which a graphed step may be shorter than its baseline's computing time. The same kernels take less time in a
graph: 10% less in a Megatron-Core pipeline on four H200s (docs/results/qwen3_8l_megatron_parallel), 7% on one."""
HOST_SHARE, HOST_PART = 0.9, 0.5
"""The host bounds a step if its time is at least the first share of the step, and bounds it in part above the second share."""


@dataclass(frozen=True)
class ProbedStep:
    """A timed step with the figures of its own probe. Times are positive. ``kernels``, a count, includes those in graphs.

    ``busy_ms`` is that of the least busy rank. ``host_ms`` is None if the host waits for the device within a step.
    """

    step_ms: float
    busy_ms: float
    computing_ms: float
    host_ms: float | None
    kernels: float


@dataclass(frozen=True)
class EagerStep(ProbedStep):
    """A step of the eager baseline. ``communicates``: communication takes more than ``NEAR`` of a rank's busy time."""

    communicates: bool = False

    @property
    def launch_bound(self) -> float:
        """The share of the step in which a device is idle. It is negative if kernels waited longer when traced."""
        return 1 - self.busy_ms / self.step_ms

    @property
    def not_computing(self) -> float:
        """The share of the step in which the device is idle or communicates."""
        return 1 - self.computing_ms / self.step_ms

    @property
    def bound_ms(self) -> float:
        """B, or C if kernels wait for other ranks. No graph of the baseline's kernels takes less time."""
        return self.computing_ms if self.communicates else self.busy_ms

    @property
    def largest_speedup(self) -> float:
        return self.step_ms / self.bound_ms

    @property
    def doubt(self) -> str:
        """Why the step cannot be as short as timed, or an empty text."""
        return _too_short("the eager step", self.step_ms, "its own probe", self.computing_ms)


@dataclass(frozen=True)
class GraphedStep(ProbedStep):
    """A step of a graphed cell. Tracing may disturb its probe, so ``busy_ms`` and ``computing_ms`` only check the step time."""

    graph_launches: float


@dataclass(frozen=True)
class SpeedupBound:
    """A graphed cell and its upper bound.

    ``reason`` says why a side is missing, or is empty. ``doubt`` says why the graphed step cannot be as short as timed, and
    ``eager_doubt`` the same of the baseline.
    """

    eager: EagerStep | None = None
    graphed: GraphedStep | None = None
    reason: str = ""
    doubt: str = ""
    eager_doubt: str = ""

    @property
    def times_bound(self) -> float | None:
        """The graphed step divided by the baseline's ``bound_ms``. None if the cell runs other kernels."""
        return self.graphed.step_ms / self.eager.bound_ms if self.upper_bound and self.eager and self.graphed else None

    @property
    def attained(self) -> float | None:
        """The attained share of the possible gain. None if no gain is possible, or if the cell runs other kernels."""
        if self.upper_bound is None or self.eager is None or self.graphed is None:
            return None
        if self.eager.bound_ms >= self.eager.step_ms * (1 - BAND):
            return None
        return (self.eager.step_ms - self.graphed.step_ms) / (self.eager.step_ms - self.eager.bound_ms)

    @property
    def bound(self) -> Bound | None:
        """What bounds the graphed step."""
        return classify_bound(self.eager, self.graphed) if self.eager and self.graphed else None

    @property
    def upper_bound(self) -> float | None:
        """The largest speed-up that graphs of the baseline's kernels can reach. None if unknown, or if the cell runs others."""
        return self.eager.largest_speedup if self.eager and self.bound != "other kernels" else None


def classify_bound(eager: EagerStep, graphed: GraphedStep) -> Bound:
    """Return what bounds a graphed step: the baseline's time that it equals.

    If it runs different kernels than the baseline (Inductor's), those times do not apply. A host that waits for the device
    within a step is not a bound of its own.
    """
    if _other_kernels(graphed, eager):
        return "other kernels"
    if eager.communicates:
        return _bound_of_ranks(graphed)
    if graphed.step_ms <= eager.busy_ms * (1 + NEAR):
        return "device"
    return _bound_of_launches(graphed)


def _bound_of_ranks(graphed: GraphedStep) -> Bound:
    """Return what bounds a step of ranks that wait for each other, from the graphed run's own trace.

    Communication bounds it (data, or the slowest rank) if no device is idle while others wait for its host, or if hosts are fast and
    waiting exceeds idle time. The baseline's trace does not apply: its hosts are slower, and its kernels may take longer.
    """
    if graphed.step_ms <= graphed.computing_ms * (1 + NEAR):
        return "device"
    if graphed.host_ms is not None and graphed.host_ms >= HOST_SHARE * graphed.step_ms:
        return "host"
    bound = _bound_of_launches(graphed)
    idle, waiting = graphed.step_ms - graphed.busy_ms, graphed.busy_ms - graphed.computing_ms
    hosts_are_fast = bound == "gaps" and graphed.host_ms is not None
    return "communication" if idle <= NEAR * graphed.step_ms or (hosts_are_fast and waiting > idle) else bound


def _bound_of_launches(graphed: GraphedStep) -> Bound:
    if graphed.host_ms is None:
        return "gaps"
    if graphed.host_ms >= HOST_SHARE * graphed.step_ms:
        return "host"
    return "host in part" if graphed.host_ms > HOST_PART * graphed.step_ms else "gaps"


def cell_limit(pairs: Sequence[Pair], ranks: int, baseline_slowed: str) -> SpeedupBound:
    """Return the upper bound of a graphed cell on ``ranks`` GPUs, from its pairs with a speed-up, else from their eager runs.

    ``baseline_slowed`` says what slowed the baseline's GPUs down; such a baseline gives no bound.
    """
    timed = [pair for pair in pairs if pair.speed.ratio is not None]
    step_ms = geometric_mean([pair.speed.eager_ms for pair in timed]) if timed else None
    attempts = [pair.eager.attempt for pair in timed or pairs if pair.eager and pair.eager.attempt]
    eager = _timed_eager(attempts, ranks, step_ms)
    too_short = "" if isinstance(eager, str) else eager.doubt
    untimed = next((pair.speed.reason for pair in pairs if pair.speed.reason), "it has no pair")
    graphed = graphed_step(timed, ranks) if timed else untimed
    known = None if isinstance(eager, str) or too_short or baseline_slowed else eager
    if isinstance(graphed, GraphedStep) and (doubt := doubt_of(graphed, known)):
        return SpeedupBound(known, reason=doubt, doubt=doubt, eager_doubt=too_short)
    if isinstance(eager, str) or too_short:
        return SpeedupBound(reason=too_short or str(eager), eager_doubt=too_short)
    if baseline_slowed:
        return SpeedupBound(reason=f"the GPUs of its eager baseline were slowed down by {baseline_slowed}")
    return SpeedupBound(eager, reason=graphed) if isinstance(graphed, str) else SpeedupBound(eager, graphed)


def eager_doubt(attempts: Sequence[Attempt], ranks: int) -> str:
    """Return why an eager cell's steps cannot be as short as timed, or an empty text."""
    timed = [(attempt, time) for attempt in attempts if is_sound(attempt) and (time := steady_ms(attempt)) is not None]
    found = _timed_eager([attempt for attempt, _ in timed], ranks, _mean([time for _, time in timed])) if timed else ""
    return "" if isinstance(found, str) else found.doubt


def doubt_of(graphed: GraphedStep, eager: EagerStep | None) -> str:
    """Return why a graphed step cannot be as short as timed, or an empty text.

    A step takes at least as long as its kernels: those of its own probe, and those of the baseline if their numbers agree. A much
    shorter step was timed wrongly, for example by a host that does not wait for the device.
    """
    doubt = _too_short("the step", graphed.step_ms, "its own probe", graphed.computing_ms)
    if doubt or eager is None or _other_kernels(graphed, eager):
        return doubt
    probe_name = "the probe of its eager baseline"
    return _too_short("the step", graphed.step_ms, probe_name, eager.computing_ms, QUICKER_IN_A_GRAPH)


def _too_short(step: str, step_ms: float, who: str, computing_ms: float, allowance: float = NEAR) -> str:
    """Return why ``step`` is doubtful if ``who`` saw ``computing_ms`` of computing in it, or an empty text."""
    if not step_ms < computing_ms * (1 - allowance):
        return ""
    return f"timing is doubtful: {step} was timed at {step_ms:.2f} ms, but {who} saw {computing_ms:.2f} ms of computing in it"


def _other_kernels(graphed: GraphedStep, eager: EagerStep) -> bool:
    """Return whether the kernels differ both in number and in time.

    A difference in number alone may be the same work, because a graph counts fills and copies as kernels.
    """
    pairs = ((graphed.kernels, eager.kernels), (graphed.computing_ms, eager.computing_ms))
    return all(abs(own - baseline) > NEAR * baseline for own, baseline in pairs)


def eager_step(attempts: Sequence[Attempt], ranks: int) -> EagerStep | str:
    """Return a step of the eager ``attempts`` with complete records, or why there is none."""
    found = _timed_eager(attempts, ranks)
    return found if isinstance(found, str) else found.doubt or found


def _timed_eager(attempts: Sequence[Attempt], ranks: int, step_ms: float | None = None) -> EagerStep | str:
    """Do what :func:`eager_step` does, without comparing the step with its kernels. ``step_ms`` is the pairs' step time, if known."""
    sound = [attempt for attempt in attempts if is_sound(attempt)]
    if not sound:
        return "no eager run ended with complete records"
    if missing := _without_probe(sound, ranks):
        return f"rank {missing[0]} of the eager run ended without a probe"
    probes = (probe for attempt in sound for probe in attempt.probes.values())
    communicates = any(probe.busy_ms - probe.computing_ms > NEAR * probe.busy_ms for probe in probes)
    mean_ms = step_ms or _mean([measured_ms(attempt) for attempt in sound])
    found = EagerStep(mean_ms, *_figures(sound), communicates)
    return _implausible(found) or found


def graphed_step(pairs: Sequence[Pair], ranks: int) -> GraphedStep | str:
    """Return a step of the graphed runs of ``pairs``, which have a speed-up, or why there is none."""
    attempts = [pair.graphed.attempt for pair in pairs if pair.graphed.attempt]
    if missing := _without_probe(attempts, ranks):
        return f"rank {missing[0]} of the graphed run ended without a probe"
    launches = _most(attempts, lambda probe: probe.graph_launches)
    found = GraphedStep(geometric_mean([pair.speed.graphed_ms for pair in pairs]), *_figures(attempts), launches)
    return found if found.busy_ms > 0 else "a rank of the graphed run saw no kernel in its probe"


def _figures(attempts: Sequence[Attempt]) -> tuple[float, float, float | None, float]:
    """Return ``busy_ms``, ``computing_ms``, ``host_ms`` and ``kernels`` of a step of ``attempts``."""
    return (
        _mean([_least_busy_ms(attempt) for attempt in attempts]),
        _slowest_ms(attempts, lambda probe: probe.computing_ms),
        _slowest_host(attempts),
        _most(attempts, lambda probe: probe.kernels),
    )


def measured_ms(attempt: Attempt) -> float:
    """Return the median of the measured steps, or NaN if there are none or one is implausible."""
    times = attempt.steps.step_time_ms[attempt.steps.phase == "measure"]
    return float(np.median(times)) if len(times) and is_plausible(times).all() else math.nan


def _without_probe(attempts: Sequence[Attempt], ranks: int) -> list[int]:
    return [rank for attempt in attempts for rank in range(ranks) if rank not in attempt.probes]


def _most(attempts: Sequence[Attempt], count: Callable[[Probe], float]) -> float:
    """Take the maximum over ranks in each repeat, and return the median over repeats."""
    return float(np.median([max(map(count, attempt.probes.values())) for attempt in attempts]))


def _slowest_ms(attempts: Sequence[Attempt], time: Callable[[Probe], float]) -> float:
    """Take the maximum over ranks in each repeat, and return the geometric mean over repeats."""
    return _mean([max(map(time, attempt.probes.values())) for attempt in attempts])


def _least_busy_ms(attempt: Attempt) -> float:
    """Return the least busy rank's time, but at least the largest computing time: a rank may wait without a kernel."""
    least = min(probe.busy_ms for probe in attempt.probes.values())
    return max(least, _slowest_ms([attempt], lambda probe: probe.computing_ms)) if least > 0 else least


def _slowest_host(attempts: Sequence[Attempt]) -> float | None:
    """Return the slowest host's time, or None if a host waits for the device within a step."""
    times = [[probe.host_ms for probe in attempt.probes.values()] for attempt in attempts]
    known = [[time for time in ranks if time is not None] for ranks in times]
    return _mean([max(ranks) for ranks in known]) if known == times else None


def _mean(times: Sequence[float]) -> float:
    """Return the geometric mean, or an implausible time if there is one."""
    wrong = [time for time in times if not (math.isfinite(time) and time > 0)]
    return wrong[0] if wrong else geometric_mean(times)


def _implausible(step: EagerStep) -> str:
    """Return why ``step`` gives no bound, or an empty text."""
    times = {"step": step.step_ms, "busy": step.busy_ms, "computing": step.computing_ms}
    times |= {} if step.host_ms is None else {"host": step.host_ms}
    wrong = [
        f"no {name} time" if math.isnan(value) else f"{name} {value:g} ms"
        for name, value in times.items()
        if not (math.isfinite(value) and value > 0)
    ]
    return f"times must be positive, but the eager run has {', '.join(wrong)}" if wrong else ""
