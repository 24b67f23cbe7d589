"""Determine the phases of a user's program from its captures in each step. Pure."""

from __future__ import annotations

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
    replays: list[int] = field(default_factory=list)
    """The number of replays in each step after the last capture."""
    _settled: int = 0

    def __post_init__(self) -> None:
        if not self.graphed and self.warmup_steps == 0:
            self.phase = "settle"

    def end_step(self, captures: int, replays: int) -> Phase:
        """End a step with these numbers of captures and replays. Return its phase. ``phase`` is then that of the next step."""
        ended = self.phase
        if captures and self.phase == "measure":
            self.recaptures += captures
        elif captures and self.graphed:
            ended = "capture"
        self.steps += 1
        if ended == "capture":
            self.replays.clear()
        elif self.graphed and ended != "warmup":
            self.replays.append(replays)
        self._turn(ended)
        return ended

    def _turn(self, ended: Phase) -> None:
        if ended == "capture" or (not self.graphed and self.phase == "warmup" and self.steps >= self.warmup_steps):
            self.phase, self._settled = "settle", 0
        elif ended == "settle":
            self._settled += 1
            self.phase = "measure" if self._settled == SETTLE_STEPS else "settle"
