"""A rank that others wait for: whose GPU computes longer, or whose host takes longer, than those that do the same work.

The ranks of one pipeline stage do the same work, so that a rank is held against the others of its stage. Where experts are
spread over ranks, one may be sent more tokens than others, and computes longer for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from analysis.limits.throttling import find_throttling
from analysis.records.run import Attempt
from launch.contract.records.probe import Probe
from launch.contract.spec import Parallelism

NOTICEABLE = 0.05
"""Share of the step by which a rank must take longer than the median of the others."""
FIGURES: Mapping[Literal["computing", "host"], Callable[[Probe], float | None]] = {
    "computing": lambda probe: probe.computing_ms,
    "host": lambda probe: probe.host_ms,
}


@dataclass(frozen=True)
class Straggler:
    """Milliseconds a step, medians over repeats: the rank's, and the median of the others of its pipeline stage.
    ``throttled`` says in words whether the clocks of its GPU were lowered."""

    rank: int
    what: Literal["computing", "host"]
    milliseconds: float
    others_ms: float
    throttled: str = ""


def cell_straggler(attempts: Sequence[Attempt], layout: Parallelism, step_ms: float) -> Straggler | None:
    """The rank that stands out most from ``attempts`` with a probe of every rank; None where none does."""
    ranks = range(layout.world_size)
    with_probes = [attempt for attempt in attempts if all(rank in attempt.probes for rank in ranks)]
    probed = [attempt.probes for attempt in with_probes]
    a_stage = layout.world_size // layout.pp  # Megatron's order of ranks: a stage is one stretch of them
    if not probed or a_stage < 2:
        return None
    every = [probe for probes in probed for probe in probes.values()]
    found = [
        _slowest_of(list(range(first, first + a_stage)), what, probed)
        for what, figure in FIGURES.items()
        if None not in map(figure, every)  # a host that waits for the device in a step
        for first in range(0, layout.world_size, a_stage)
    ]
    worst = max(found, key=lambda straggler: straggler.milliseconds - straggler.others_ms)
    if worst.milliseconds - worst.others_ms <= NOTICEABLE * step_ms:
        return None
    return replace(worst, throttled=find_throttling(with_probes, [worst.rank]).summary)


def _slowest_of(
    stage: list[int], what: Literal["computing", "host"], probed: Sequence[Mapping[int, Probe]]
) -> Straggler:
    figures = {
        rank: [figure for probes in probed if (figure := FIGURES[what](probes[rank])) is not None] for rank in stage
    }
    times = {rank: float(np.median(of_rank)) for rank, of_rank in figures.items()}
    slowest = max(stage, key=lambda rank: times[rank])
    return Straggler(
        slowest, what, times[slowest], float(np.median([times[rank] for rank in stage if rank != slowest]))
    )
