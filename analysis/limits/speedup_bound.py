"""How far a graphed step is from what the device needs: the limit that graphs cannot pass, from the eager twin.

Graphs take away what the host costs and nothing of what the device does. With T the twin's step and B the time in it in
which its device is busy, at most T / B can be won. Kernels that communicate are busy while they wait for other ranks, whose
hosts may be what is late: graphs end that wait, and B is then no limit. What is left is C, without these kernels: a step is
no shorter, and longer by what it takes to pass the data and to wait for what others compute. What can be won of several ranks
is then at most T / C. Their B is of the rank that is busy for least: its device is idle while the others wait for it. How long
a graphed step takes comes from its timed steps alone, since tracing disturbs replay. All other times are milliseconds a step,
of the slowest rank; steps are as rank 0 timed them, and as the speed-up has them (analysis/speed/speedup.py). Over
repeats all are geometric means, so that a ratio of two is the mean of the pairs' own, on machines that differ too;
counts are medians.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.pairing.pair import Pair
from analysis.records.run import Attempt
from analysis.speed.speedup import BAND, geometric_mean
from analysis.speed.steady_window import is_plausible
from analysis.speed.step_time import is_sound, steady_ms
from launch.contract.records.probe import Probe

Bound = Literal["device", "communication", "host", "host in part", "gaps", "other kernels"]
NEAR = 0.05
"""A step that is longer than the device is busy by no more than this share of it is bound by the device. Counts of kernels
that differ by no more are of the same ones."""
QUICKER_IN_A_GRAPH = 0.2
"""The share of its twin's computing by which a graphed step may be shorter, for the same kernels take less time in a graph:
10% in a pipeline of Megatron-Core's on four H200s (docs/results/qwen3_8l_megatron_parallel), 7% on one."""
HOST_SHARE, HOST_PART = 0.9, 0.5
"""Shares of a step from which on the host's time bounds it, or a part of it: host and device alternate between them."""


@dataclass(frozen=True)
class EagerStep:
    """A step of the eager twin; each time is a positive number. ``kernels`` is a count. ``busy_ms`` is of the rank that is
    busy for least, ``communicates`` whether a rank passes data or waits for others for a good part of its own. ``host_ms``
    is None where the host waits for the device in a step."""

    step_ms: float
    busy_ms: float
    computing_ms: float
    host_ms: float | None
    kernels: float
    communicates: bool = False

    @property
    def launch_bound(self) -> float:
        """The share of the step in which a device does nothing; below 0 where kernels waited longer when traced."""
        return 1 - self.busy_ms / self.step_ms

    @property
    def not_computing(self) -> float:
        """The share of the step in which the device does nothing or communicates."""
        return 1 - self.computing_ms / self.step_ms

    @property
    def largest_speedup(self) -> float | None:
        """None where kernels wait for other ranks."""
        return None if self.communicates else self.step_ms / self.busy_ms

    @property
    def largest_speedup_computing(self) -> float:
        """The same without communication: no graph can pass it that runs the twin's kernels."""
        return self.step_ms / self.computing_ms

    @property
    def doubt(self) -> str:
        """Why it cannot have been so short; empty where it can."""
        return _too_short("the eager step", self.step_ms, "its own probe", self.computing_ms)


@dataclass(frozen=True)
class GraphedStep:
    """A step of a graphed cell; its time is a positive number. Kernels and launches are counts, the largest of ranks;
    kernels that graphs run are among them."""

    step_ms: float
    host_ms: float | None
    kernels: float
    graph_launches: float
    computing_ms: float
    busy_ms: float
    """Of the rank that is busy for least. These two are by its own probe, which tracing may disturb: they are held against
    the step and are no limit."""


@dataclass(frozen=True)
class SpeedupBound:
    """A graphed cell beside its limit. ``reason`` says why a side is missing; it is empty where both are there. ``doubt``
    is the reason where it is that the graphed step cannot have been so short, ``eager_doubt`` that its twin's cannot."""

    eager: EagerStep | None = None
    graphed: GraphedStep | None = None
    reason: str = ""
    doubt: str = ""
    eager_doubt: str = ""

    @property
    def times_busy(self) -> float | None:
        """The graphed step in busy times of the twin: 1 is the limit of the twin's kernels. None where these wait for other
        ranks."""
        if self.eager is None or self.graphed is None or self.eager.communicates:
            return None
        return self.graphed.step_ms / self.eager.busy_ms

    @property
    def times_computing(self) -> float | None:
        return self.graphed.step_ms / self.eager.computing_ms if self.eager and self.graphed else None

    @property
    def attained(self) -> float | None:
        """The share of what could be won that was: (T - graphed step) / (T - B). None where there is nothing to win, and
        where kernels wait for other ranks."""
        if self.eager is None or self.graphed is None or self.eager.communicates or self.eager.launch_bound <= BAND:
            return None
        return (self.eager.step_ms - self.graphed.step_ms) / (self.eager.step_ms - self.eager.busy_ms)

    @property
    def attained_computing(self) -> float | None:
        """The same without communication: the share of the time in which the device does not compute that was won."""
        if self.eager is None or self.graphed is None or self.eager.not_computing <= BAND:
            return None
        return (self.eager.step_ms - self.graphed.step_ms) / (self.eager.step_ms - self.eager.computing_ms)

    @property
    def bound(self) -> Bound | None:
        """What the graphed step waits for."""
        return classify_bound(self.eager, self.graphed) if self.eager and self.graphed else None


def classify_bound(eager: EagerStep, graphed: GraphedStep) -> Bound:
    """What bounds a graphed step, by which of the twin's times it is as long as. Where it runs other kernels than the
    twin (Inductor's), these times are none of its own. A host that waits for the device in a step bounds nothing by itself."""
    if _other_kernels(graphed, eager):
        return "other kernels"
    if eager.communicates:
        return _bound_of_ranks(graphed)
    if graphed.step_ms <= eager.busy_ms * (1 + NEAR):
        return "device"
    return _bound_of_launches(graphed)


def _bound_of_ranks(graphed: GraphedStep) -> Bound:
    """Of ranks that wait for each other: for data, or for the slowest to compute, where no device has an idle moment in which
    others wait for its host, or hosts are fast and there is more of that than of idle moments. It is the graphed run's own
    trace that tells: the twin's hosts are others, and its kernels may take longer."""
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


def cell_limit(pairs: Sequence[Pair], ranks: int, twin_slowed: str = "") -> SpeedupBound:
    """The limit of a graphed cell on ``ranks`` GPUs, by its pairs that have a speed, else by their eager sides alone. A twin
    whose GPUs were slowed down, by ``twin_slowed``, gives none."""
    timed = [pair for pair in pairs if pair.speed.ratio is not None]
    step_ms = geometric_mean([pair.speed.eager_ms for pair in timed]) if timed else None
    attempts = [pair.eager.attempt for pair in timed or pairs if pair.eager and pair.eager.attempt]
    eager = _timed_eager(attempts, ranks, step_ms)
    too_short = "" if isinstance(eager, str) else eager.doubt
    graphed = graphed_step(timed, ranks) if timed else _untimed(pairs)
    known = None if isinstance(eager, str) or too_short or twin_slowed else eager
    if isinstance(graphed, GraphedStep) and (doubt := doubt_of(graphed, known)):
        return SpeedupBound(known, reason=doubt, doubt=doubt, eager_doubt=too_short)
    if isinstance(eager, str) or too_short:
        return SpeedupBound(reason=too_short or str(eager), eager_doubt=too_short)
    if twin_slowed:
        return SpeedupBound(reason=f"the GPUs of its eager twin were slowed down by {twin_slowed}")
    return SpeedupBound(eager, reason=graphed) if isinstance(graphed, str) else SpeedupBound(eager, graphed)


def eager_doubt(attempts: Sequence[Attempt], ranks: int) -> str:
    """Why the steps of an eager cell's ``attempts`` on ``ranks`` GPUs cannot have been as short as timed; empty where they
    can, or nobody knows."""
    timed = [(attempt, time) for attempt in attempts if is_sound(attempt) and (time := steady_ms(attempt)) is not None]
    found = _timed_eager([attempt for attempt, _ in timed], ranks, _mean([time for _, time in timed])) if timed else ""
    return "" if isinstance(found, str) else found.doubt


def _untimed(pairs: Sequence[Pair]) -> str:
    return next((pair.speed.reason for pair in pairs if pair.speed.reason), "it has no pair")


def doubt_of(graphed: GraphedStep, eager: EagerStep | None) -> str:
    """Why a graphed step cannot have been so short; empty where it can.

    A device computes no faster than its kernels run: those of the graphed run's own probe, and the twin's where it
    launches about as many. A step well below that was timed wrongly, as by a host that does not wait for the device.
    """
    doubt = _too_short("the step", graphed.step_ms, "its own probe", graphed.computing_ms)
    if doubt or eager is None or _other_kernels(graphed, eager):
        return doubt
    twin = "the probe of its eager twin"
    return _too_short("the step", graphed.step_ms, twin, eager.computing_ms, QUICKER_IN_A_GRAPH)


def _too_short(step: str, step_ms: float, who: str, computing_ms: float, allowance: float = NEAR) -> str:
    """Why a ``step`` is doubtful in which ``who`` saw so much computing; empty where it is not."""
    if not step_ms < computing_ms * (1 - allowance):
        return ""
    return f"timing is doubtful: {step} is said to take {step_ms:.2f} ms, and {who} saw {computing_ms:.2f} ms of computing in it"


def _other_kernels(graphed: GraphedStep, eager: EagerStep) -> bool:
    """Whether they are others in number and take another time. In number alone they may be the same work: what a stream is
    asked to fill or copy is no kernel, and is one in a graph."""
    pairs = ((graphed.kernels, eager.kernels), (graphed.computing_ms, eager.computing_ms))
    return all(abs(own - twins) > NEAR * twins for own, twins in pairs)


def eager_step(attempts: Sequence[Attempt], ranks: int, step_ms: float | None = None) -> EagerStep | str:
    """A step of the eager runs ``attempts``, or why nothing can be said of it; of those that ended with whole records.
    ``step_ms`` is what it took where a pair says so."""
    found = _timed_eager(attempts, ranks, step_ms)
    return found if isinstance(found, str) else found.doubt or found


def _timed_eager(attempts: Sequence[Attempt], ranks: int, step_ms: float | None) -> EagerStep | str:
    """The same, though it be shorter than what it computes."""
    sound = [attempt for attempt in attempts if is_sound(attempt)]
    if not sound:
        return "no eager run ended with whole records"
    if missing := _without_probe(sound, ranks):
        return f"rank {missing[0]} of the eager run ended without a probe"
    found = EagerStep(
        step_ms=step_ms or _mean([measured_ms(attempt) for attempt in sound]),
        busy_ms=_mean([_least_busy_ms(attempt) for attempt in sound]),
        computing_ms=_slowest_ms(sound, lambda probe: probe.computing_ms),
        host_ms=_slowest_host(sound),
        kernels=_most(sound, lambda probe: probe.kernels),
        communicates=any(_communicates(probe) for attempt in sound for probe in attempt.probes.values()),
    )
    return _implausible(found) or found


def graphed_step(pairs: Sequence[Pair], ranks: int) -> GraphedStep | str:
    """A step of the graphed side of ``pairs``, which have a speed, or why nothing can be said of it."""
    attempts = [pair.graphed.attempt for pair in pairs if pair.graphed.attempt]
    if missing := _without_probe(attempts, ranks):
        return f"rank {missing[0]} of the graphed run ended without a probe"
    found = GraphedStep(
        step_ms=geometric_mean([pair.speed.graphed_ms for pair in pairs]),
        host_ms=_slowest_host(attempts),
        kernels=_most(attempts, lambda probe: probe.kernels),
        graph_launches=_most(attempts, lambda probe: probe.graph_launches),
        computing_ms=_slowest_ms(attempts, lambda probe: probe.computing_ms),
        busy_ms=_mean([_least_busy_ms(attempt) for attempt in attempts]),
    )
    return found if found.busy_ms > 0 else "a rank of the graphed run saw no kernel in its probe"


def measured_ms(attempt: Attempt) -> float:
    """The median of the measured steps; NaN where there is none, or one is no time that a step can take."""
    times = attempt.steps.step_time_ms[attempt.steps.phase == "measure"]
    return float(np.median(times)) if len(times) and is_plausible(times).all() else math.nan


def _without_probe(attempts: Sequence[Attempt], ranks: int) -> list[int]:
    return [rank for attempt in attempts for rank in range(ranks) if rank not in attempt.probes]


def _most(attempts: Sequence[Attempt], count: Callable[[Probe], float]) -> float:
    """The largest of ranks, the median of repeats."""
    return float(np.median([max(map(count, attempt.probes.values())) for attempt in attempts]))


def _slowest_ms(attempts: Sequence[Attempt], time: Callable[[Probe], float]) -> float:
    """The largest of ranks, the mean of repeats."""
    return _mean([max(map(time, attempt.probes.values())) for attempt in attempts])


def _least_busy_ms(attempt: Attempt) -> float:
    """No less than the most that a rank computes: one that waits without a kernel is not busy. What is no time stays so."""
    least = min(probe.busy_ms for probe in attempt.probes.values())
    return max(least, _slowest_ms([attempt], lambda probe: probe.computing_ms)) if least > 0 else least


def _communicates(probe: Probe) -> bool:
    return probe.busy_ms - probe.computing_ms > NEAR * probe.busy_ms


def _slowest_host(attempts: Sequence[Attempt]) -> float | None:
    """The same of the host's time; None where the host of a rank waits for the device in a step."""
    times = [[probe.host_ms for probe in attempt.probes.values()] for attempt in attempts]
    known = [[time for time in ranks if time is not None] for ranks in times]
    return _mean([max(ranks) for ranks in known]) if known == times else None


def _mean(times: Sequence[float]) -> float:
    """Geometric; one that is no time, where there is one."""
    wrong = [time for time in times if not (math.isfinite(time) and time > 0)]
    return wrong[0] if wrong else geometric_mean(times)


def _implausible(step: EagerStep) -> str:
    """Why ``step`` gives no limit; empty where it does."""
    times = {"step": step.step_ms, "busy": step.busy_ms, "computing": step.computing_ms}
    times |= {} if step.host_ms is None else {"host": step.host_ms}
    wrong = [f"{name} {value:g} ms" for name, value in times.items() if not (math.isfinite(value) and value > 0)]
    if wrong:
        return f"no time is zero, negative or unknown, and the eager run has {', '.join(wrong)}"
    return ""
