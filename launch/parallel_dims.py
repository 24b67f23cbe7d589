"""How the ranks of a run are laid out over the kinds of parallelism. Pure, without torch.

Ranks are in Megatron-Core's order tp-cp-ep-dp-pp (parallel_state.RankGenerator): neighbours share a tensor-parallel
group, and a pipeline stage is one stretch of ranks. Within a stage the experts have a grid of their own, without tensor
parallelism: neighbours share an expert-parallel group, whose ranks hold different experts, and ranks with the same
experts form an expert-data-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launch.errors import UnsupportedError
from launch.spec import Parallelism

Axis = Literal["tp", "dp", "pp", "ep", "expert_dp"]
AXES: tuple[Axis, ...] = ("tp", "dp", "pp", "ep", "expert_dp")


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of a layout whose product tp * dp * pp is the number of ranks; ep divides tp * dp."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, parallelism: Parallelism) -> ParallelDims:
        """
        Raises:
            UnsupportedError: context or expert-tensor parallelism, or experts that the ranks of a stage cannot share.
        """
        for name in ("cp", "etp"):
            if getattr(parallelism, name) != 1:
                raise UnsupportedError(f"parallelism.{name}={getattr(parallelism, name)} is not had here: set 1")
        tp, dp, pp, ep = parallelism.tp, parallelism.dp, parallelism.pp, parallelism.ep
        if (tp * dp) % ep:
            raise UnsupportedError(f"parallelism.ep={ep} does not divide tp={tp} * dp={dp}, the ranks of a stage")
        return cls(tp, dp, pp, ep)

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        return self.tp * self.dp // self.ep

    def size(self, axis: Axis) -> int:
        degree: int = getattr(self, axis)
        return degree

    def rank_in(self, axis: Axis, rank: int) -> int:
        """Where ``rank`` stands in its group along ``axis``."""
        return rank // self._stride(axis) % self.size(axis)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks of ``rank``'s group along ``axis``, in order."""
        stride = self._stride(axis)
        first = rank - self.rank_in(axis, rank) * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axis``; every rank is in one of them."""
        return tuple(dict.fromkeys(self.group(axis, rank) for rank in range(self.world_size)))

    def _stride(self, axis: Axis) -> int:
        """How far apart the ranks of a group are."""
        return {"tp": 1, "dp": self.tp, "pp": self.tp * self.dp, "ep": 1, "expert_dp": self.ep}[axis]
