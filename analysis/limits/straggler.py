"""Find a rank that others wait for: its GPU computes longer, or its host takes longer, than others with the same work.

The ranks of a pipeline stage do the same work, so a rank is compared with the others of its stage. If experts are spread over
ranks, a rank may receive more tokens and compute longer.
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
"""The share of the step by which a straggler exceeds the median of the others."""
FIGURES: Mapping[Literal["computing", "host"], Callable[[Probe], float | None]] = {
    "computing": lambda probe: probe.computing_ms,
    "host": lambda probe: probe.host_ms,
}


@dataclass(frozen=True)
class Straggler:
    """A slow rank. Its milliseconds per step and those of the other ranks of its stage are medians.

    ``throttled`` describes whether the clocks of its GPU were lowered.
    """

    rank: int
    what: Literal["computing", "host"]
    milliseconds: float
    others_ms: float
    throttled: str = ""


def cell_straggler(attempts: Sequence[Attempt], layout: Parallelism, step_ms: float) -> Straggler | None:
    """Return the slowest rank in ``attempts`` with a probe of every rank, or None if no rank stands out."""
    ranks = range(layout.world_size)
    with_probes = [attempt for attempt in attempts if all(rank in attempt.probes for rank in ranks)]
    probed = [attempt.probes for attempt in with_probes]
    stage_size = layout.stage_size
    if not probed or stage_size < 2:
        return None
    every = [probe for probes in probed for probe in probes.values()]
    found = [
        _slowest(list(range(first, first + stage_size)), what, probed)
        for what, figure in FIGURES.items()
        # None marks a host that waits for the device within a step.
        if None not in map(figure, every)
        for first in range(0, layout.world_size, stage_size)
    ]
    worst = max(found, key=lambda straggler: straggler.milliseconds - straggler.others_ms)
    if worst.milliseconds - worst.others_ms <= NOTICEABLE * step_ms:
        return None
    return replace(worst, throttled=find_throttling(with_probes, [worst.rank]).summary)


def _slowest(stage: list[int], what: Literal["computing", "host"], probed: Sequence[Mapping[int, Probe]]) -> Straggler:
    figures = {
        rank: [figure for probes in probed if (figure := FIGURES[what](probes[rank])) is not None] for rank in stage
    }
    times = {rank: float(np.median(of_rank)) for rank, of_rank in figures.items()}
    slowest = max(stage, key=lambda rank: times[rank])
    return Straggler(
        slowest, what, times[slowest], float(np.median([times[rank] for rank in stage if rank != slowest]))
    )
