"""A step's forward and backward passes by Megatron-Core's schedule: every microbatch, and gradients that are final."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from launch.contract.spec import RunSpec
from launch.engines.megatron.model import Configuration


class Schedule:
    """
    Attributes:
        chunks: this rank's virtual stages, each with its gradient buffers.
        forward_backward: Megatron-Core's function for all microbatches of a step, which a graph may take the place of.
    """

    def __init__(self, spec: RunSpec, config: Configuration, chunks: list[Any], device: torch.device) -> None:
        self.config = config
        self.chunks = chunks
        self.forward_backward: Callable[..., list[torch.Tensor]] = get_forward_backward_func()
        self._training = spec.training
        self._layout = spec.parallelism
        self._device = device
        self._positions = torch.arange(spec.training.sequence_length, device=device).unsqueeze(0)

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """The mean loss over the global batch, of shape () and the caller's own, on every rank.

        Args:
            batch: int64 of shape (microbatches, microbatch size, sequence + 1).
        """
        losses = self.forward_backward(
            forward_step_func=self._forward,
            # Mappings, since FullCudaGraphWrapper copies nothing else into its static buffers.
            data_iterator=[iter([{"tokens": tokens} for tokens in batch.unbind()]) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batch),
            seq_length=self._training.sequence_length,
            micro_batch_size=self._training.micro_batch_size,
            forward_only=False,
        )
        return self._mean(losses)

    def _forward(
        self, microbatches: Iterator[Mapping[str, torch.Tensor]], chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        """One microbatch through a chunk: each token's loss from the last, activations from others; or the plan of that,
        for a schedule that runs it in pieces beside those of another microbatch."""
        tokens = next(microbatches)["tokens"]
        batch = get_batch_on_this_cp_rank({"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()})
        run = chunk.build_schedule_plan if return_schedule_plan else chunk
        return run(batch["tokens"], self._positions, None, labels=batch["labels"]), self._objective

    def _objective(self, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is differentiated, which the schedule then divides in place, and what is kept of it, of this rank's part of
        the sequences. The routers' losses add their gradients by themselves.

        The schedule multiplies by cp what it takes for a part of a sum (megatron-core 0.16.1 pipeline_parallel/schedules.py,
        ``forward_step_calc_loss``); gradients are then averaged over the ranks of dp and cp.
        """
        loss = losses.float().mean()
        return loss / self._layout.cp, loss.detach().clone()

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Of ``losses``, empty but on the last stage, which may be graph memory."""
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=self._device)
        dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return loss / (self._layout.dp * self._layout.cp)
