"""Group the optimizer steps of one training step, because chained optimizers step one after another. Pure."""

from __future__ import annotations


class StepGroups:
    """Learns the optimizers of a step. The end of the first step shows only in the second one, later ends at once."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._open: set[int] = set()
        self.last: int | None = None
        """The optimizer with which the last training step ended."""
        self._latest: int | None = None

    def stepped(self, optimizer: int) -> tuple[bool, bool]:
        """Take one optimizer's step. Return whether a training step had ended before it, and whether one ends with it."""
        late, before, self._latest = optimizer in self._open, self._latest, optimizer
        if late:
            self.last = before
            self._members |= self._open
            self._open.clear()
        elif self._members and not self._open and optimizer not in self._members:
            # A new optimizer after the known ones belongs to the step that has just ended.
            self._members.add(optimizer)
            return False, False
        self._open.add(optimizer)
        ends = bool(self._members) and self._open >= self._members
        if ends:
            self._open.clear()
            self.last = optimizer
        return late, ends

    @property
    def first_may_have_ended(self) -> bool:
        """Whether the first training step has ended if no other optimizer follows."""
        return bool(self._open) and not self._members

    @property
    def is_open(self) -> bool:
        """Whether an optimizer has stepped since the last training step that is known to have ended."""
        return bool(self._open)
