"""The megatron engine: Megatron-Core's model, schedule, gradient reduction and optimizer, one step at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch._C._distributed_c10d import HashStore

from launch.engines.base import Mesh, StepKind, StepResult
from launch.engines.megatron.model import Configuration, build_chunk, configure
from launch.engines.megatron.settings import Layers, data_parallel_settings, optimizer_settings
from launch.engines.megatron.weights import draw_weights
from launch.engines.torch_native.mesh import Group
from launch.learning_rate import learning_rate
from launch.record import GraphStats
from launch.spec import RunSpec


class MegatronEngine:
    """Layers are of Transformer Engine's modules on a GPU, and elsewhere of Megatron-Core's own."""

    capture_step = None

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self._spec = spec
        self._device = mesh.device
        self._step = 0
        self.layers: Layers = "transformer_engine" if mesh.device.type == "cuda" else "local"
        _join(spec, mesh)
        model_parallel_cuda_manual_seed(spec.training.seed, te_rng_tracker=self.layers == "transformer_engine")
        self.config = configure(spec, self.layers, mesh.device)
        self.chunks: list[Any] = _build_chunks(spec, self.config, self.layers, mesh.device)
        settings = optimizer_settings(spec)
        settings |= {"params_dtype": self.config.params_dtype, "clip_grad": spec.training.clip_grad or math.inf}
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(**settings), self.chunks, use_gloo_process_groups=False
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self._optimizer.scale_loss
        self._forward_backward = get_forward_backward_func()
        self._positions = torch.arange(spec.training.sequence_length, device=mesh.device).unsqueeze(0)

    @property
    def choices(self) -> Mapping[str, str]:
        modules = {"transformer_engine": "Transformer Engine", "local": "Megatron-Core"}
        return {"layers": f"modules of {modules[self.layers]}"}

    def step(self, batch: torch.Tensor) -> StepResult:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._spec.training, self._step)
            # Megatron-Core leaves this to its scheduler too: norms and biases have a factor of 0.
            group["weight_decay"] = self._spec.training.weight_decay * group["wd_mult"]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = self._forward_backward(
            forward_step_func=self._forward,
            data_iterator=[iter(batch.unbind()) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batch),
            seq_length=self._spec.training.sequence_length,
            micro_batch_size=self._spec.training.micro_batch_size,
            forward_only=False,
        )
        loss = self._mean(losses)
        _, norm, _ = self._optimizer.step()
        kind: StepKind = "warmup" if self._step < self._spec.cuda_graph.warmup_steps else "steady"
        self._step += 1
        return StepResult(loss, torch.tensor(norm, dtype=torch.float32, device=self._device), kind)

    def graph_stats(self) -> GraphStats:
        return GraphStats(impl="none", mechanism="eager")

    def close(self) -> None:
        parallel_state.destroy_model_parallel()

    def _forward(self, tokens: Iterator[torch.Tensor], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """One micro-batch through a chunk: each token's loss from the last, activations from others."""
        inputs = next(tokens)
        labels = inputs[:, 1:].contiguous()
        return chunk(inputs[:, :-1], self._positions, None, labels=labels), _objective

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The mean over the global batch, on every rank; ``losses`` is empty but on the last stage."""
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=self._device)
        dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return loss / self._spec.parallelism.dp


def _objective(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is differentiated, which the schedule then divides in place, and what is kept of it. The routers' losses add
    their gradients by themselves."""
    loss = losses.float().mean()
    return loss, loss.detach().clone()


def _join(spec: RunSpec, mesh: Mesh) -> None:
    """Megatron's process groups, of ranks in its own order, which is that of launch.parallel_dims."""
    if not dist.is_initialized():  # a rank that is alone; Megatron wants groups all the same
        backend = "nccl" if mesh.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    layout = spec.parallelism
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,  # they serve Megatron's checkpoints
    )


def _build_chunks(spec: RunSpec, config: Configuration, layers: Layers, device: torch.device) -> list[torch.nn.Module]:
    """This rank's virtual stages, their first weights drawn, each with its gradient buffers."""
    stages = range(spec.parallelism.vpp) if spec.parallelism.vpp > 1 else [None]
    tp = Group(parallel_state.get_tensor_model_parallel_rank(), spec.parallelism.tp)
    ep = Group(parallel_state.get_expert_model_parallel_rank(), spec.parallelism.ep)
    chunks: list[torch.nn.Module] = []
    for stage in stages:
        chunk = build_chunk(spec, config, layers, stage).to(device)
        draw_weights(chunk, spec.model, spec.training.seed, tp, ep)
        chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    if device.type != "cuda":
        return _with_gradients(spec, config, chunks)
    # Gradient accumulators remember the stream that they were made on, and a capture forbids the default one.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wrapped = _with_gradients(spec, config, chunks)
    torch.cuda.current_stream().wait_stream(side)
    return wrapped


def _with_gradients(spec: RunSpec, config: Configuration, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    settings = DistributedDataParallelConfig(**data_parallel_settings(spec))
    return [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
