"""Whether GPUs ran slower than they can while steps were measured, and when that leaves a speed-up without a word.

The driver of each rank's GPU counts for how long it lowered the clocks, and why (launch/clocks.py). Two kinds of reasons:

- What slows a GPU down: heat, a hardware slowdown (to half the clocks or less), a power brake, and a slower GPU that it is to
  keep step with (sync boost). It is a fault of the machine, and comes and goes. Without it steps would be shorter by its
  share of their time at most; above ``SLOWED``, which is what NEUTRAL allows, there is no word.
- A power cap. It is how a GPU works under full load, the same for all runs while the limit is, and graphs that leave it
  fewer gaps meet it more: that a graphed run is capped more takes nothing from being FASTER. Where the side that looks
  better was capped less by ``CAPPED_APART`` of the time, the cap may be all there is to it, and there is no word.

Nor is there one across a change of the power limit. What the driver does not say is not known, and doubts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from analysis.pair import PairResult
from analysis.run import Attempt
from analysis.speedup import BAND, SpeedWord
from analysis.steady import NOTICEABLE
from launch.record import ClockReason, Clocks

SLOWED = BAND
"""Share of the measured time for which a GPU may be slowed down."""
CAPPED_APART = NOTICEABLE
"""By how much of the measured time a power cap may differ between the sides, in the mean over pairs."""
WORDS: Mapping[ClockReason, str] = {
    "power_cap": "power cap",
    "thermal": "heat",
    "sync_boost": "sync boost",
    "hardware_slowdown": "hardware slowdown",
    "hardware_thermal": "hardware slowdown by heat",
    "power_brake": "power brake",
}
COUNTED: tuple[ClockReason, ...] = ("power_cap", "thermal")
"""What there has to be a counter of, for the rest of the time to count as unthrottled."""


@dataclass(frozen=True)
class Throttled:
    """Of some runs, all of their ranks. ``most`` is the largest share of a run's measured time that any driver counted, and
    the rank it is of. ``seen`` is what slowed a GPU down when the window began or ended, and was not counted. ``unknown``
    says in words what some driver does not say; ``power_limits`` are watts, ``sm_mhz`` the lowest clock at the window's end,
    with the highest that it could be."""

    most: Mapping[ClockReason, tuple[float, int]]
    seen: tuple[ClockReason, ...]
    unknown: tuple[str, ...]
    power_limits: tuple[float, ...]
    sm_mhz: Optional[tuple[int, int]]

    @property
    def slowed(self) -> str:
        """By what GPUs were slowed down; empty where they were not, or it is not known."""
        counted = [
            f"{WORDS[reason]} for {_percent(share)} of the measured time on rank {rank}"
            for reason, (share, rank) in self.most.items()
            if reason != "power_cap" and share > SLOWED
        ]
        return ", ".join([*counted, *(f"{WORDS[reason]} when it began or ended" for reason in self.seen)])

    @property
    def summary(self) -> str:
        """For a column of a table."""
        if len(self.unknown) == len(COUNTED) + 1:
            return "not known"
        said = [f"{WORDS[reason]} {_percent(share)}" for reason, (share, _) in self.most.items() if share > SLOWED]
        said += [f"{WORDS[reason]} seen" for reason in self.seen]
        if self.sm_mhz and self.sm_mhz[0] < self.sm_mhz[1] * (1 - NOTICEABLE):
            said.append(f"{self.sm_mhz[0]} of {self.sm_mhz[1]} MHz at the end")
        said += [f"{' and '.join(self.unknown)} not known"] if self.unknown else []
        return ", ".join(said) or "no"


@dataclass(frozen=True)
class Throttling:
    """Of a cell's own runs, and of the eager runs of its pairs where it has any."""

    own: Throttled
    eager: Optional[Throttled] = None


def throttling_of(
    attempts: Sequence[Attempt], compared: Sequence[tuple[Attempt, Attempt]], ranks: int
) -> Optional[Throttling]:
    """Of a cell's own ``attempts`` and the pairs of it, (eager, graphed), of so many ranks each; None where no run ended with
    its results."""
    own = [attempt for attempt in attempts if attempt.outcome.results_intact]
    eager = [attempt for attempt, _ in compared if attempt.outcome.results_intact]
    sides = [throttled(side, range(ranks)) if side else None for side in (own, eager)]
    return Throttling(sides[0], sides[1]) if sides[0] else None


def throttled(attempts: Sequence[Attempt], ranks: Sequence[int]) -> Throttled:
    """What is known of ``ranks`` of ``attempts``, of at least one."""
    found = [(attempt.clocks.get(rank), rank) for attempt in attempts for rank in ranks]
    told = [(clocks, rank) for clocks, rank in found if clocks]
    shares = {
        reason: [(share, rank) for clocks, rank in told if (share := _share(clocks, reason)) is not None]
        for reason in WORDS
    }
    unknown = [WORDS[reason] for reason in COUNTED if any(not c or reason not in c.throttled for c, _ in found)]
    unknown += ["hardware slowdown"] if any(not clocks or clocks.active is None for clocks, _ in found) else []
    speeds = [(c.sm_mhz, c.max_sm_mhz) for c, _ in told if c.sm_mhz is not None and c.max_sm_mhz is not None]
    return Throttled(
        most={reason: max(each) for reason, each in shares.items() if each},
        seen=tuple(reason for reason in WORDS if any(reason in _seen(clocks) for clocks, _ in told)),
        unknown=tuple(unknown),
        power_limits=tuple(sorted({limit for clocks, _ in told for limit in clocks.power_limits})),
        sm_mhz=min(speeds, default=None),
    )


def doubt_of(results: Sequence[PairResult], ranks: int, word: SpeedWord) -> str:
    """Why ``word`` cannot be said of the pairs that have a ratio; empty where it can."""
    timed = [(result.eager, result.graphed) for result in results if result.speed.ratio is not None]
    pairs = [
        (eager.attempt, graphed.attempt) for eager, graphed in timed if eager and eager.attempt and graphed.attempt
    ]
    names = ("eager", "graphed")
    sides = {name: throttled([pair[place] for pair in pairs], range(ranks)) for place, name in enumerate(names)}
    slowed = [f"in {name} runs by {side.slowed}" for name, side in sides.items() if side.slowed]
    if slowed:
        return f"GPUs were slowed down {' and '.join(slowed)}: see to their cooling and power, or run on other nodes"
    for eager, graphed in pairs:
        for rank in eager.clocks.keys() & graphed.clocks.keys():
            limits = sorted({*eager.clocks[rank].power_limits, *graphed.clocks[rank].power_limits})
            if len(limits) > 1:
                return f"the power limit of a GPU changed, from {limits[0]:g} to {limits[-1]:g} W: run them again"
    return _capped_apart(pairs, ranks, word)


def _capped_apart(pairs: Sequence[tuple[Attempt, Attempt]], ranks: int, word: SpeedWord) -> str:
    both = [(_capped(eager, ranks), _capped(graphed, ranks)) for eager, graphed in pairs]
    known = [(eager, graphed) for eager, graphed in both if eager is not None and graphed is not None]
    if not known:
        return ""
    before, after = (sum(side) / len(known) for side in zip(*known, strict=True))
    in_favour = {"FASTER": before - after, "SLOWER": after - before}.get(word, abs(before - after))
    if word == "INCONCLUSIVE" or in_favour <= CAPPED_APART:
        return ""
    return (
        f"a power cap lowered clocks for {_percent(before)} of the time of eager runs and {_percent(after)} of that of "
        "graphed ones, and may be the difference: hold clocks below the cap (nvidia-smi --lock-gpu-clocks) to tell"
    )


def _capped(attempt: Attempt, ranks: int) -> Optional[float]:
    """The share of the rank with most; None where a rank's is not known."""
    shares = [_share(clocks, "power_cap") if (clocks := attempt.clocks.get(rank)) else None for rank in range(ranks)]
    known = [share for share in shares if share is not None]
    return max(known) if len(known) == ranks else None


def _share(clocks: Clocks, reason: ClockReason) -> Optional[float]:
    """At most 1: counters and the clock of the host are not read at the same instant."""
    if reason not in clocks.throttled or not clocks.seconds:
        return None
    return min(1.0, clocks.throttled[reason] / clocks.seconds)


def _seen(clocks: Clocks) -> list[ClockReason]:
    """What slowed the GPU down by the flags at the window's ends, and is not counted or counted as nothing: nvml.h
    says up to CUDA 12.9 that heat is not counted."""
    return [reason for reason in clocks.active or () if reason != "power_cap" and not clocks.throttled.get(reason)]


def _percent(share: float) -> str:
    return f"{share:.0%}"
