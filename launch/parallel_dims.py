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
from launch.spec import Parallelism, RunSpec

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


def misfits(spec: RunSpec) -> tuple[str, ...]:
    """Why the model and the batch cannot be laid out as ``spec`` says, with the numbers; empty where they can.

    The rules of docs/rules.md say the same before a run is submitted; here a job looks for itself.
    """
    model, layout, training = spec.model, spec.parallelism, spec.training
    widths = {"num_attention_heads": layout.tp, "num_query_groups": layout.tp, "vocab_size": layout.tp}
    if model.has_dense_layers:
        widths["ffn_hidden_size"] = layout.tp
    if model.is_moe:
        widths |= {"moe_shared_expert_ffn_hidden_size": layout.tp, "num_moe_experts": layout.ep}
    wrong = [
        f"model.{name}={getattr(model, name)} over {degree} ranks"
        for name, degree in widths.items()
        if getattr(model, name) % degree
    ]
    if (layout.sequence_parallel or model.is_moe) and training.sequence_length % layout.tp:
        wrong.append(f"training.sequence_length={training.sequence_length} over tp={layout.tp} ranks")
    if layout.pp * layout.vpp > model.num_layers:
        wrong.append(f"model.num_layers={model.num_layers} over pp={layout.pp} * vpp={layout.vpp} virtual stages")
    interleaved = layout.schedule == "interleaved"
    if (layout.vpp > 1) != interleaved or (interleaved and layout.pp < 2):
        wrong.append(f"parallelism.schedule={layout.schedule} with pp={layout.pp} and vpp={layout.vpp}")
    if training.global_batch_size % (training.micro_batch_size * layout.dp):
        wrong.append(f"training.global_batch_size={training.global_batch_size} over dp={layout.dp} ranks")
    elif interleaved and spec.num_microbatches % layout.pp:
        wrong.append(f"{spec.num_microbatches} micro-batches interleaved over pp={layout.pp}")
    return tuple(wrong)
