"""Find throttled GPUs, and widen or withdraw the speed verdicts that throttling may explain.

The driver of each rank's GPU counts for how long it lowered the clocks, and why (launch/train/telemetry/gpu_clocks.py). There
are two kinds of reasons:

- Slowdowns: heat, a hardware slowdown (to half the clocks or less), a power brake, and waiting for a slower GPU (sync boost).
  These are faults of a machine that come and go. Without them steps would be shorter by their share of the time at most, and the
  interval becomes that much wider. Up to ``SLOWED``, which NEUTRAL allows, they are ignored.
- Power caps. GPUs work at their cap under full load, and graphs that leave fewer gaps reach it more often; this does not weaken
  FASTER. If one side was capped for longer by ``CAPPED_APART`` of the time, its steps would be shorter by that share at most, as
  long as a cap leaves clocks at half or more. If clocks were read under the cap, they would be shorter at most by that share of
  what the lowest of them lacks. Drivers also count time in which a cap takes less than 1% of the clock.

Where clocks differ and no counter says why, somebody set them. The side with lower clocks could be faster by their ratio at most.

A verdict that does not hold for the whole wider interval becomes INCONCLUSIVE. A verdict also becomes
INCONCLUSIVE if a power limit changed, or if a slowdown was seen but not counted. Unknown values change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.pairing.pair import Pair
from analysis.records.run import Attempt
from analysis.speed.speed_verdict import BAND, RatioBounds
from analysis.speed.steady_window import NOTICEABLE
from launch.contract.records.clocks import ClockReason, Clocks

SLOWED = BAND
"""The share of the measured time for which slowdowns are ignored."""
CAPPED_APART = NOTICEABLE
"""The difference of the capped shares of both sides that is ignored, in the mean over pairs."""
WORDS: Mapping[ClockReason, str] = {
    "power_cap": "power cap",
    "thermal": "heat",
    "sync_boost": "sync boost",
    "hardware_slowdown": "hardware slowdown",
    "hardware_thermal": "hardware slowdown by heat",
    "power_brake": "power brake",
}
LEAST_READINGS = 3
"""The least number of clocks under a power cap that show how far it lowers clocks."""
COUNTED: tuple[ClockReason, ...] = ("power_cap", "thermal")
"""Reasons that need a counter before the rest of the time counts as unthrottled."""


@dataclass(frozen=True)
class ThrottleEvidence:
    """Throttling over all ranks of some runs.

    ``most`` is the largest counted share of a run's measured time, with its rank. ``seen`` holds slowdowns at the window's start or
    end that were not counted. ``unknown`` names what some driver does not report. ``power_limits`` are in watts. ``sm_mhz`` is the
    lowest clock at the window's end, with its maximum. ``cap_depth`` is the largest share of its clock that a power cap took from a
    GPU at the window's end, or 1 with fewer than ``LEAST_READINGS`` such clocks.
    """

    most: Mapping[ClockReason, tuple[float, int]]
    seen: tuple[ClockReason, ...]
    unknown: tuple[str, ...]
    power_limits: tuple[float, ...]
    sm_mhz: tuple[int, int] | None
    cap_depth: float

    @property
    def slowed(self) -> str:
        """What slowed GPUs down, or an empty text if nothing is known to have."""
        counted = [
            f"{WORDS[reason]} for {share:.0%} of the measured time on rank {rank}"
            for reason, (share, rank) in self.most.items()
            if reason != "power_cap" and share > SLOWED
        ]
        return ", ".join([*counted, *(f"{WORDS[reason]} when it began or ended" for reason in self.seen)])

    @property
    def summary(self) -> str:
        """A summary for a table's column."""
        said = [f"{WORDS[reason]} {share:.0%}" for reason, (share, _) in self.most.items() if share > SLOWED]
        said += [f"{WORDS[reason]} seen" for reason in self.seen]
        ignored = 0.0 if self.most.get("power_cap", (0.0, 0))[0] > SLOWED else NOTICEABLE
        if self.sm_mhz and self.sm_mhz[0] < self.sm_mhz[1] * (1 - ignored):
            said.append(f"{self.sm_mhz[0]} of {self.sm_mhz[1]} MHz at the end")
        if len(self.unknown) == len(COUNTED) + 1:
            return ", ".join([*said, "the rest not known"]) if said else "not known"
        said += [f"{' and '.join(self.unknown)} not known"] if self.unknown else []
        return ", ".join(said) or "no"


@dataclass(frozen=True)
class Throttling:
    """Throttling of a cell's own runs, and of the eager runs of its pairs if it has any."""

    own: ThrottleEvidence
    eager: ThrottleEvidence | None = None


def throttling_of(
    attempts: Sequence[Attempt], compared: Sequence[tuple[Attempt, Attempt]], ranks: int
) -> Throttling | None:
    """Return the throttling of a cell's ``attempts`` and of its (eager, graphed) pairs, or None without results."""
    own = [attempt for attempt in attempts if attempt.outcome.results_intact]
    eager = [attempt for attempt, _ in compared if attempt.outcome.results_intact]
    sides = [find_throttling(side, range(ranks)) if side else None for side in (own, eager)]
    return Throttling(sides[0], sides[1]) if sides[0] else None


def find_throttling(attempts: Sequence[Attempt], ranks: Sequence[int]) -> ThrottleEvidence:
    """Return the throttling of ``ranks`` in at least one of ``attempts``."""
    found = [(attempt.clocks.get(rank), rank) for attempt in attempts for rank in ranks]
    told = [(clocks, rank) for clocks, rank in found if clocks]
    shares = {
        reason: [(share, rank) for clocks, rank in told if (share := _share(clocks, reason)) is not None]
        for reason in WORDS
    }
    unknown = [WORDS[reason] for reason in COUNTED if any(not c or _share(c, reason) is None for c, _ in found)]
    unknown += ["hardware slowdown"] if any(not clocks or clocks.active is None for clocks, _ in found) else []
    speeds = [(c.sm_mhz, c.max_sm_mhz) for c, _ in told if c.sm_mhz is not None and c.max_sm_mhz is not None]
    capped = [c.sm_mhz / c.max_sm_mhz for c, _ in told if c.sm_mhz and c.max_sm_mhz and "power_cap" in (c.active or ())]
    lowered = [clock for clock in capped if clock < 1]
    return ThrottleEvidence(
        most={reason: max(each) for reason, each in shares.items() if each},
        seen=tuple(reason for reason in WORDS if any(reason in _seen(clocks) for clocks, _ in told)),
        unknown=tuple(unknown),
        power_limits=tuple(sorted({limit for clocks, _ in told for limit in clocks.power_limits})),
        sm_mhz=min(speeds, default=None),
        cap_depth=1 - min(lowered) if len(lowered) >= LEAST_READINGS else 1.0,
    )


def throttle_bounds(results: Sequence[Pair], ranks: int) -> RatioBounds:
    """Return how far throttling may have changed the ratio of a cell with at least one timed pair."""
    timed = [(result.eager, result.graphed) for result in results if result.speed.ratio is not None]
    pairs = [
        (eager.attempt, graphed.attempt) for eager, graphed in timed if eager and eager.attempt and graphed.attempt
    ]
    found = [_slowed(pairs, ranks), _other_limits(pairs), _capped_apart(pairs, ranks), _clocks_apart(pairs)]
    return RatioBounds(
        math.prod(one.least for one in found),
        math.prod(one.most for one in found),
        "; ".join(one.reason for one in found if one.reason),
    )


def _slowed(pairs: Sequence[tuple[Attempt, Attempt]], ranks: int) -> RatioBounds:
    names = ("eager", "graphed")
    attempts = [[pair[place] for pair in pairs] for place in range(len(names))]
    sides = [find_throttling(side, range(ranks)) for side in attempts]
    said = [f"in {name} runs by {side.slowed}" for name, side in zip(names, sides, strict=True) if side.slowed]
    if not said:
        return RatioBounds()
    left = [1 - _lost(runs, side) for runs, side in zip(attempts, sides, strict=True)]
    return RatioBounds(
        left[0],
        1 / left[1] if left[1] > 0 else math.inf,
        f"GPUs were slowed down {' and '.join(said)}; check their cooling and power, or use other nodes",
    )


def _lost(attempts: Sequence[Attempt], side: ThrottleEvidence) -> float:
    """Return the largest share of their time by which a side's steps would be shorter without slowdowns.

    It is that of the worst run, summed over ranks, since each may have been slow at another time. It is all of the time if a
    slowdown was not counted.
    """
    if not side.slowed:
        return 0.0
    if side.seen:
        return 1.0
    faults = [reason for reason in WORDS if reason != "power_cap"]
    return min(
        1.0, max(sum(_share(c, reason) or 0.0 for c in a.clocks.values() for reason in faults) for a in attempts)
    )


def _other_limits(pairs: Sequence[tuple[Attempt, Attempt]]) -> RatioBounds:
    for eager, graphed in pairs:
        for rank in eager.clocks.keys() & graphed.clocks.keys():
            limits = sorted({*eager.clocks[rank].power_limits, *graphed.clocks[rank].power_limits})
            if len(limits) > 1:
                said = f"the power limit of a GPU changed from {limits[0]:g} to {limits[-1]:g} W; run the pairs again"
                return RatioBounds(0.0, math.inf, said)
    return RatioBounds()


def _clocks_apart(pairs: Sequence[tuple[Attempt, Attempt]]) -> RatioBounds:
    """Return how far SM clocks that differ at the end of the window, without a power cap, may have changed the ratio."""
    speeds = [
        (one.sm_mhz, other.sm_mhz)
        for eager, graphed in pairs
        for one, other in ((eager.clocks[rank], graphed.clocks[rank]) for rank in eager.clocks.keys() & graphed.clocks)
        if one.sm_mhz and other.sm_mhz and not (_share(one, "power_cap") or _share(other, "power_cap"))
    ]
    apart = {
        eager / graphed: (eager, graphed)
        for eager, graphed in speeds
        if min(eager, graphed) < max(eager, graphed) * (1 - NOTICEABLE)
    }
    if not apart:
        return RatioBounds()
    eager, graphed = apart[max(apart, key=lambda share: abs(math.log(share)))]
    said = f"a GPU's clocks were at {eager} MHz in an eager run and at {graphed} MHz in a graphed one; hold them equal"
    return RatioBounds(min(1.0, *apart), max(1.0, *apart), f"{said} (nvidia-smi --lock-gpu-clocks)")


def _capped_apart(pairs: Sequence[tuple[Attempt, Attempt]], ranks: int) -> RatioBounds:
    both = [(_capped(eager, ranks), _capped(graphed, ranks)) for eager, graphed in pairs]
    known = [(eager, graphed) for eager, graphed in both if eager is not None and graphed is not None]
    if not known:
        return RatioBounds()
    before, after = (sum(side) / len(known) for side in zip(*known, strict=True))
    more = find_throttling([pair[before < after] for pair in pairs], range(ranks))
    explained = _explained(abs(before - after), more)
    if not explained:
        return RatioBounds()
    left = 1 - explained
    return RatioBounds(
        left if before > after else 1.0,
        1.0 if before > after else (1 / left if left > 0 else math.inf),
        f"a power cap lowered clocks for {before:.0%} of the time of eager runs and {after:.0%} of the time of graphed runs, "
        f"which explains a difference of up to {explained:.1%}; lock clocks below the cap (nvidia-smi --lock-gpu-clocks)",
    )


def _explained(apart: float, more: ThrottleEvidence) -> float:
    """Return the share by which steps of the side ``more``, capped longer by ``apart`` of the time, would be shorter at most.

    It is 0 up to a share that is ignored.
    """
    explained = apart * more.cap_depth
    return explained if apart > CAPPED_APART and explained > SLOWED else 0.0


def least_beside(fast: Throttling | None, slow: Throttling | None) -> float:
    """Return the smallest share of the ratio of two cells' steps that would remain if both had been capped for equally long.

    It is 0 under different power limits, and 1 if nothing is known.
    """
    if not fast or not slow:
        return 1.0
    if fast.own.power_limits and slow.own.power_limits and fast.own.power_limits != slow.own.power_limits:
        return 0.0
    capped = [cell.own.most.get("power_cap") for cell in (fast, slow)]
    if not capped[0] or not capped[1]:
        return 1.0
    return 1 - _explained(capped[1][0] - capped[0][0], slow.own)


def _capped(attempt: Attempt, ranks: int) -> float | None:
    """Return the capped share of the worst rank, or None if a rank's is unknown."""
    shares = [_share(clocks, "power_cap") if (clocks := attempt.clocks.get(rank)) else None for rank in range(ranks)]
    known = [share for share in shares if share is not None]
    return max(known) if len(known) == ranks else None


def _share(clocks: Clocks, reason: ClockReason) -> float | None:
    """Return a reason's share of the time, at most 1: counters and the host's clock are not read at the same instant."""
    if reason not in clocks.throttled or not clocks.seconds:
        return None
    return min(1.0, clocks.throttled[reason] / clocks.seconds)


def _seen(clocks: Clocks) -> list[ClockReason]:
    """Return slowdowns that flags show at the window's ends but counters do not: up to CUDA 12.9 heat is not counted (nvml.h)."""
    return [reason for reason in clocks.active or () if reason != "power_cap" and not clocks.throttled.get(reason)]
