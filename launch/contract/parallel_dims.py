"""The layout of a run's ranks over the kinds of parallelism.

Ranks are in Megatron-Core's order tp-cp-ep-dp-pp (parallel_state.RankGenerator): neighbours share a tensor-parallel group,
and a pipeline stage is a contiguous range of ranks. Within a stage, experts have their own grid in the order
etp-ep-expert_dp: neighbours share an expert-tensor-parallel group, ranks of an expert-parallel group hold different experts,
and ranks with the same part of the same experts form an expert-data-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal

from launch.contract.errors import UnsupportedError
from launch.contract.spec import Parallelism

Axis = Literal["tp", "cp", "dp", "pp", "etp", "ep", "expert_dp"]
AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp", "etp", "ep", "expert_dp")


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of a layout of tp * cp * dp * pp ranks; etp * ep divides tp * cp * dp."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    etp: int = 1

    @classmethod
    def of(cls, parallelism: Parallelism) -> ParallelDims:
        """Return the degrees of ``parallelism``.

        Raises:
            UnsupportedError: the ranks of a stage cannot share the experts.
        """
        dims = cls(*(getattr(parallelism, field.name) for field in fields(cls)))
        if dims._stage % (dims.etp * dims.ep):
            raise UnsupportedError(
                f"parallelism.etp={dims.etp} * ep={dims.ep} does not divide tp={dims.tp} * cp={dims.cp} * dp={dims.dp}, "
                "the ranks of a stage"
            )
        return dims

    @property
    def world_size(self) -> int:
        return self._stage * self.pp

    @property
    def expert_dp(self) -> int:
        return self._stage // (self.etp * self.ep)

    @property
    def _stage(self) -> int:
        return self.tp * self.cp * self.dp

    def size(self, axis: Axis) -> int:
        degree: int = getattr(self, axis)
        return degree

    def rank_in(self, axis: Axis, rank: int) -> int:
        """Return the position of ``rank`` in its group along ``axis``."""
        return rank // self._stride(axis) % self.size(axis)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks of ``rank``'s group along ``axis``, in order."""
        stride = self._stride(axis)
        first = rank - self.rank_in(axis, rank) * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return all groups along ``axis``. Every rank is in exactly one."""
        return tuple(dict.fromkeys(self.group(axis, rank) for rank in range(self.world_size)))

    def _stride(self, axis: Axis) -> int:
        """Return the distance between neighbouring ranks of a group."""
        experts = {"etp": 1, "ep": self.etp, "expert_dp": self.etp * self.ep}
        return {"tp": 1, "cp": self.tp, "dp": self.tp * self.cp, "pp": self._stage, **experts}[axis]


def layers_of(num_layers: int, stages: int, chunks: int) -> tuple[range, ...]:
    """Return the layers of each virtual stage.

    If the layers are not divisible, the virtual stages before the last get one more each. The last computes the head and the
    loss. The first has the embedding and, with 1F1B, the most micro-batches in flight, so it is the last of the others to get
    one. Consecutive virtual stages are on different ranks, so no rank gets a second extra layer before all others but the last
    have one.

    Raises:
        ValueError: fewer layers than virtual stages.
    """
    parts = stages * chunks
    if num_layers < parts:
        raise ValueError(
            f"num_layers={num_layers} leaves some of pp={stages} * vpp={chunks} = {parts} virtual stages without a "
            f"layer: lower pp or vpp until their product is {num_layers} or less"
        )
    share, extra = divmod(num_layers, parts)
    ends = [(part + 1) * share + max(0, min(part - (parts - 2 - extra), extra)) for part in range(parts)]
    return tuple(range(start, end) for start, end in pairwise([0, *ends]))
