"""Group the optimizer steps of one training step, because chained optimizers step one after another. Pure."""

from __future__ import annotations


class StepGroups:
    """Learns the optimizers of a step. The end of the first step shows only in the second one, later ends at once."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._open: set[int] = set()

    def stepped(self, optimizer: int) -> tuple[bool, bool]:
        """Take one optimizer's step. Return whether a training step had ended before it, and whether one ends with it."""
        late = optimizer in self._open
        if late:
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
        return late, ends

    @property
    def size(self) -> int:
        """Return the number of known optimizers of a step."""
        return len(self._members)

    @property
    def missing(self) -> int:
        """Return the number of known optimizers whose steps end the current training step."""
        return len(self._members - self._open)

    @property
    def first_may_have_ended(self) -> bool:
        """Whether the first training step has ended if no other optimizer follows."""
        return bool(self._open) and not self._members
