"""Group the optimizer steps of one training step, because chained optimizers step one after another. Pure."""

from __future__ import annotations


class StepGroups:
    """Learns the optimizers of a step. The end of the first step shows only in the second one, later ends at once.

    An optimizer may step in some training steps only, as the generator of a GAN, or replace the known ones in the middle of a run.
    """

    def __init__(self) -> None:
        self._members: set[int] = set()
        """The optimizers whose steps end a training step."""
        self._open: set[int] = set()
        """The optimizers that have stepped since the last training step that is known to have ended."""
        self._occasional: set[int] = set()
        """The optimizers without which a training step has ended."""
        self.has_new = False
        """Whether those that have stepped are new, so that their steps may still belong to the training step before."""
        self.last: int | None = None
        """The optimizer with which the last training step ended."""
        self._latest: int | None = None

    def stepped(self, optimizer: int) -> tuple[bool, bool]:
        """Take one optimizer's step. Return whether a training step had ended before it, and whether one ends with it."""
        late, before, self._latest = optimizer in self._open, self._latest, optimizer
        if late:
            self.last = before
            self._occasional = (self._occasional | self._members) - self._open
            self._members, self._open, self.has_new = self._open, set(), False
        elif self.has_new and optimizer in self._members:
            # The new optimizers belonged to the step that had ended.
            self._members |= self._open - self._occasional
            self._open, self.has_new = set(), False
        elif self._members and not self._open and optimizer not in self._members:
            self.has_new = True
        self._open.add(optimizer)
        ends = bool(self._members) and self._open >= self._members
        if ends:
            self._open = set()
            self.last = optimizer
        return late, ends

    def steps_again(self, optimizer: int) -> bool:
        """Return whether a training step has ended if this optimizer steps next."""
        return optimizer in self._open

    @property
    def is_undecided(self) -> bool:
        """Whether only the next optimizer's step shows if a training step has ended."""
        return bool(self._open)

    @property
    def is_open(self) -> bool:
        """Whether a training step has begun that is not known to have ended."""
        return bool(self._open) and not self.has_new
