"""Determine the phases of a user's program from its captures in each step. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch.contract.records.events import SETTLE_STEPS, Phase


@dataclass
class PhaseTracker:
    """Names the phase of each step as it ends. A graphed program warms up until a capture is followed by two steps without one.

    A capture after these two steps is a recapture, and the steps still count as measured.
    """

    graphed: bool
    warmup_steps: int
    phase: Phase = "warmup"
    """The phase of the current step."""
    steps: int = 0
    recaptures: int = 0
    replayed: list[Mapping[int, int]] = field(default_factory=list)
    """How often each graph was replayed, by its number, for each step after the last capture."""
    _settled: int = 0

    def __post_init__(self) -> None:
        if not self.graphed and self.warmup_steps == 0:
            self.phase = "settle"

    def end_step(self, captures: int, replayed: Sequence[int]) -> Phase:
        """End a step with this number of captures, which ``replayed`` the graphs of these numbers. Return its phase.

        ``phase`` is then that of the next step.
        """
        ended = self.phase
        if captures and self.phase == "measure":
            self.recaptures += captures
        elif captures and self.graphed:
            ended = "capture"
        self.steps += 1
        if ended == "capture":
            self.replayed.clear()
        elif self.graphed and ended != "warmup":
            self.replayed.append(Counter(replayed))
        self._turn(ended)
        return ended

    def _turn(self, ended: Phase) -> None:
        if ended == "capture" or (not self.graphed and self.phase == "warmup" and self.steps >= self.warmup_steps):
            self.phase, self._settled = "settle", 0
        elif ended == "settle":
            self._settled += 1
            self.phase = "measure" if self._settled == SETTLE_STEPS else "settle"
