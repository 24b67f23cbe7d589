"""The forward and backward passes of a step, run by Megatron-Core's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from launch.contract.spec import RunSpec
from launch.engines.megatron.model import Configuration
from launch.engines.megatron.packed_sequences import document_borders, packed_parameters
from launch.engines.megatron.release import cut_for_context_parallelism
from launch.engines.profile_ranges import RANGES


def to_scalar(norm: float | torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return the optimizer's gradient norm as float32 of shape (). Some releases give a host number, others a device tensor."""
    return torch.as_tensor(norm, dtype=torch.float32, device=device).reshape(())


class Schedule:
    """Runs all microbatches of a step, and computes final gradients.

    Attributes:
        chunks: this rank's virtual stages, each with its gradient buffers.
        forward_backward: Megatron-Core's function for all microbatches of a step. A graph may replace it.
        device: the device of this rank's tensors.
        losses: the losses of the last step's microbatches, each of shape (), on the last stage. They may be graph memory.
    """

    def __init__(self, spec: RunSpec, config: Configuration, chunks: list[Any], device: torch.device) -> None:
        self.config = config
        self.chunks = chunks
        self.forward_backward: Callable[..., list[torch.Tensor]] = get_forward_backward_func()
        self.losses: list[torch.Tensor] = []
        self._training = spec.training
        self._layout = spec.parallelism
        self._data = spec.data
        self.device = device
        self._positions = torch.arange(spec.training.sequence_length, device=device).unsqueeze(0)

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the global batch, shape (), on every rank. The caller owns it.

        Args:
            batch: int64 (microbatches, microbatch size, sequence + 1).
        """
        microbatches = self._microbatches(batch)
        self.losses = self.forward_backward(
            forward_step_func=self._forward,
            data_iterator=[iter(microbatches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batch),
            seq_length=self._training.sequence_length,
            micro_batch_size=self._training.micro_batch_size,
            forward_only=False,
        )
        return self._mean(self.losses)

    def _microbatches(self, batch: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Return what the schedule reads of each microbatch. FullCudaGraphWrapper copies only mappings into its static buffers."""
        inputs = {"tokens": batch}
        if self._data.packed_sequences:
            assert self._data.eod_token is not None and self._data.max_documents is not None
            tokens = batch[..., :-1].squeeze(1)
            inputs["borders"] = document_borders(tokens, self._data.eod_token, self._data.max_documents)
        return [dict(zip(inputs, parts, strict=True)) for parts in zip(*inputs.values(), strict=True)]

    def _forward(
        self, microbatches: Iterator[Mapping[str, torch.Tensor]], chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        """Run one microbatch through a chunk. Return its output and the function of the loss.

        The last chunk returns the loss of each token, (microbatch size, sequence / cp). Other chunks return activations. With
        ``return_schedule_plan``, return a plan instead, for a schedule that overlaps two microbatches.
        """
        inputs = next(microbatches)
        tokens, borders = inputs["tokens"], inputs.get("borders")
        packed = None if borders is None else packed_parameters(borders, self._training.sequence_length)
        batch = cut_for_context_parallelism({"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()})
        run = chunk.build_schedule_plan if return_schedule_plan else chunk
        with RANGES.named("micro-batch forward"):
            losses = run(batch["tokens"], self._positions, None, labels=batch["labels"], packed_seq_params=packed)
            return losses, self._objective

    def _objective(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss to differentiate and the loss to report, each of shape (), for this rank's part of the sequences.

        Args:
            losses: (microbatch size, sequence / cp).
        """
        loss = losses.float().mean()
        # The schedule multiplies by cp, because it expects a part of a sum (megatron-core 0.16.1
        # pipeline_parallel/schedules.py, ``forward_step_calc_loss``). Gradients are then averaged over dp and cp. The schedule
        # also divides the first loss in place, hence the clone.
        return loss / self._layout.cp, loss.detach().clone()

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Average the microbatches' losses over all ranks. Only the last stage has losses, which may be graph memory."""
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=self.device)
        dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return loss / (self._layout.dp * self._layout.cp)
