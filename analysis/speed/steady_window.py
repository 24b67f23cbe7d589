"""The steady window of a pair: the steps from which speed is measured.

A step is in the window if both runs were in phase "measure". Warm-up, capture and the steps right after it are other phases. No
step of another phase may interrupt the window. Three rules apply in this order:

1. A step is off if it is farther from its run's median than ``FENCE`` robust standard deviations (the median absolute
   deviation times 1.4826) and than ``NOTICEABLE`` of the median. Source of the fence: Iglewicz and Hoaglin, How to Detect
   and Handle Outliers (1993); NIST/SEMATECH e-Handbook, 1.3.5.17.
2. Steps at the beginning that are off in either run are settling steps and are excluded, up to ``LONGEST_SETTLING`` of the
   window. If more steps are off, they are normal for the run, and none is excluded as settling.
3. Later steps that are off in either run are outliers and are excluded on both sides, unless they are behaviour. They are
   behaviour if they are more than ``RARE`` of one run's steps. They are also behaviour if one side has so many more than the
   other that noise explains it with a probability below ``CHANCE`` (sign test over all pairs of the cell). Behaviour counts in
   full. Otherwise a graphed run that takes twice as long every tenth step would look as fast as its better steps.

Outliers must not change the verdict, so analysis/speed/speed_verdict.py also checks it over all steps of the window. Settling
happens once and is part of the cost of a capture. The figure of a run is the mean of its window, not the median: training pays
for every step, and a median hides a second mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from analysis.records.steps import Booleans, Floats, Integers, Steps, shared_steps
from analysis.statistics.median import medians
from launch.common.text import count

FENCE = 3.5
TO_STANDARD_DEVIATION = 1.4826
NOTICEABLE = 0.05
LONGEST_SETTLING = 0.25
SHORTEST_MS, LONGEST_MS = 1e-6, 1e9
"""The shortest and the longest plausible step: a nanosecond and eleven days."""
RARE = 0.05
CHANCE = 0.05


@dataclass(frozen=True)
class Window:
    """The steps that both runs of a pair measured, without settling.

    All arrays have shape (steps,). Times are positive, in milliseconds. ``settling_ms`` has the graphed run's settling steps,
    shape (settling,). ``steps`` are the numbers of the steps.
    """

    steps: Integers
    eager_ms: Floats
    graphed_ms: Floats
    eager_off: Booleans
    graphed_off: Booleans
    settling_ms: Floats = field(default_factory=lambda: np.empty(0))

    @cached_property
    def excluded_steps(self) -> Booleans:
        either: Booleans = self.eager_off | self.graphed_off
        return either

    @property
    def settling(self) -> int:
        """The number of settling steps, excluded at the beginning."""
        return len(self.settling_ms)

    def __len__(self) -> int:
        return len(self.eager_ms)


def window_of(eager: Steps, graphed: Steps) -> Window | str:
    """Return the window of a pair, or the reason why there is none."""
    if _interrupted(eager) or _interrupted(graphed):
        return "steps of another phase lie among the measured ones"
    before, after = eager.phase == "measure", graphed.phase == "measure"
    steps, of_eager, of_graphed = shared_steps(eager.step[before], graphed.step[after])
    if not len(steps):
        return "no step was measured in both runs"
    settled = [int((side.phase == "settle").sum()) for side in (eager, graphed)]
    if settled[0] != settled[1]:
        return f"the eager run has {settled[0]} steps of phase settle, but the graphed run has {settled[1]}"
    eager_ms, graphed_ms = eager.step_time_ms[before][of_eager], graphed.step_time_ms[after][of_graphed]
    if not (is_plausible(eager_ms).all() and is_plausible(graphed_ms).all()):
        return f"a step time is not a number of milliseconds from {SHORTEST_MS:g} to {LONGEST_MS:g}"
    whole = Window(steps, eager_ms, graphed_ms, _off(eager_ms), _off(graphed_ms))
    settling = _settling(whole.excluded_steps)
    rest = slice(settling, None)
    off = whole.eager_off[rest], whole.graphed_off[rest]
    return Window(steps[rest], eager_ms[rest], graphed_ms[rest], *off, graphed_ms[:settling])


def behaviour(windows: Sequence[Window]) -> str:
    """Return why the steps that are off count in all ``windows`` of a cell, or "" if they are outliers or no step is off."""
    sides = {"eager": [w.eager_off for w in windows], "graphed": [w.graphed_off for w in windows]}
    for name, runs in sides.items():
        for off in runs:
            if off.mean() > RARE:
                return f"{off.sum()} of {len(off)} steps of one {name} run are far from their median"
    counts = {name: sum(int(off.sum()) for off in runs) for name, runs in sides.items()}
    (fewer, least), (more, most) = sorted(counts.items(), key=lambda item: item[1])
    if _chance(most, least + most) < CHANCE:
        few = f"only {count(f'{fewer} step', least)}" if least else f"no {fewer} step"
        return f"{most} {more} steps are far from their run's median, but {few}"
    return ""


def _interrupted(side: Steps) -> bool:
    """Return whether steps of other phases lie among the measured ones, so that a run could leave out steps."""
    # analysis/pairing/precapture_check.py has checked that step checks are where the plan has them.
    measured = np.flatnonzero(side.phase[side.phase != "check"] == "measure")
    return len(measured) > 0 and bool(measured[-1] - measured[0] >= len(measured))


def is_plausible(times: Floats) -> Booleans:
    """Return which ``times`` are plausible for a step, shape (steps,)."""
    which: Booleans = (times >= SHORTEST_MS) & (times <= LONGEST_MS)
    return which


def _off(times: Floats) -> Booleans:
    median = float(medians(times))
    deviation = np.abs(times - median)
    robust = TO_STANDARD_DEVIATION * float(medians(deviation))
    off: Booleans = deviation > max(FENCE * robust, NOTICEABLE * median)
    return off


def _settling(off: Booleans) -> int:
    """Return the number of consecutive steps that are off at the beginning, or 0 if they are too many to be settling."""
    first_steady = int(np.argmin(off))
    if off[first_steady] or first_steady > LONGEST_SETTLING * len(off):
        return 0
    return first_steady


def _chance(most: int, together: int) -> float:
    """Return the probability that ``most`` or more of ``together`` fair coins fall on the same side."""
    tail = sum(math.comb(together, count) for count in range(most, together + 1))
    return float(min(1, 2 * tail / 2**together))
