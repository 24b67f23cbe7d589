"""The torch_native engine on one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from launch.contract.errors import CompileError
from launch.contract.pipeline_stages import layers_of
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import RunSpec
from launch.engines.determinism import use_deterministic_algorithms
from launch.engines.graph_protocol import GraphedStep
from launch.engines.protocol import RankPlace, StepResult, check_supported
from launch.engines.torch_native.compiled_model import CompiledModel, compile_errors_as, disable_kernel_timing
from launch.engines.torch_native.decoder import Decoder, build_decoder
from launch.engines.torch_native.graphs import make_runner
from launch.engines.torch_native.kernel_warmup import warm_up_kernels
from launch.engines.torch_native.layers.build_context import make_build_context
from launch.engines.torch_native.optim.accumulation import FusedAccumulation
from launch.engines.torch_native.optim.adamw import Optimizer
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.parallel.pipeline import Pipeline
from launch.engines.torch_native.parallel.process_groups import Group, ParallelMesh, make_mesh
from launch.engines.torch_native.step_check import TorchNativeStep, share_of
from launch.engines.torch_native.train_step import TrainStep
from launch.support.expandable_segments import disable_nccl_graph_register

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TorchNativeEngine:
    """Trains a decoder on one rank. ``dtype`` is the type of weights and activations, by default ``training.precision``."""

    def __init__(self, spec: RunSpec, mesh: RankPlace, dtype: torch.dtype | None = None) -> None:
        self._step = 0
        self._environment = disable_nccl_graph_register(os.environ, spec.graphed) if mesh.device.type == "cuda" else {}
        self.mesh = make_mesh(mesh, spec.parallelism)
        dtype = dtype or PRECISIONS[spec.training.precision]
        self.chunks = _build_chunks(spec, self.mesh, dtype)
        shape = _activation_shape(spec)
        if mesh.world_size > 1 and mesh.device.type == "cuda":
            warm_up_kernels(spec, self.chunks, shape, dtype)
        torch.manual_seed(seed_of_draws(spec, mesh.rank))
        self.flat_parameters = FlatParameters(
            nn.ModuleList(self.chunks),
            self.mesh,
            torch.promote_types(dtype, PRECISIONS[spec.training.gradient_precision]),
            distributed_optimizer=spec.parallelism.distributed_optimizer,
            tied=_tied(self.chunks, self.mesh),
            # The reduction over ranks changes gradients after the last of a rank.
            fused=None if spec.training.compile == "none" else FusedAccumulation(sums_squares=mesh.world_size == 1),
            lean=spec.training.optimizer_precision == "lean",
        )
        self._optimizer = Optimizer(self.flat_parameters, spec.training)
        layout = spec.parallelism
        pipeline = Pipeline(self.mesh, layout.schedule, layout.vpp, spec.num_microbatches, shape, dtype)
        self._captures_optimizer = spec.graphed and spec.cuda_graph.optimizer
        self._checked_steps = spec.checked_steps
        self._train_step = TrainStep(
            self.mesh, self.chunks, self.flat_parameters, self._optimizer, pipeline, spec.layer_check_steps > 0
        )
        compile = spec.training.compile
        if compile == "whole":
            self._train_step.model = CompiledModel(self.chunks[0])
        self._compile_errors: Callable[[], AbstractContextManager[None]] = (
            nullcontext
            if compile == "none"
            else partial(compile_errors_as, f"training.compile={compile!r}", CompileError)
        )
        self._runner = make_runner(spec, self._train_step)

    @property
    def capture_step(self) -> int | None:
        return self._runner.capture_step

    @property
    def choices(self) -> Mapping[str, str]:
        backends: dict[str, str] = {}
        for chunk in self.chunks:
            backends |= chunk.attention_backends(self.mesh.device)
        return {
            **{f"attention_backend, {layers}": backend for layers, backend in backends.items()},
            **self._environment,
        }

    def step(self, batch: torch.Tensor) -> StepResult:
        self._optimizer.set_rate(self._step)
        with self._compile_errors():
            (loss, norm), kind = self._runner.run(self._step, batch)
            # A graph that contains the optimizer has already run it.
            norm = self._train_step.update() if norm is None else norm
        self._step += 1
        return StepResult(loss.float(), norm.float(), kind)

    def checkable_step(self) -> TorchNativeStep:
        assert isinstance(self._runner, GraphedStep)
        self._optimizer.set_rate(self._step)
        number = sum(step < self._step for step in self._checked_steps)
        compared = (
            share_of(self._optimizer.pieces, number, len(self._checked_steps)) if self._captures_optimizer else None
        )
        return TorchNativeStep(self._train_step, self._runner, compared)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return nn.ModuleList(self.chunks).named_parameters()

    def graph_stats(self) -> GraphStats:
        return self._runner.stats()

    def close(self) -> None:
        self._runner.close()


def seed_of_draws(spec: RunSpec, rank: int) -> int:
    """Return the seed of a rank's random numbers.

    Tensor-parallel ranks that hold the same activations draw the same numbers. All other ranks draw different ones.
    """
    shares = spec.model.hidden_dropout > 0 and not spec.parallelism.sequence_parallel
    return spec.training.seed + (rank // spec.parallelism.tp if shares else rank)


def _build_chunks(spec: RunSpec, mesh: ParallelMesh, dtype: torch.dtype) -> list[Decoder]:
    """Build this rank's virtual stages, or the whole model without a pipeline."""
    layout = spec.parallelism
    stages = layers_of(spec.model.num_layers, layout.pp, layout.vpp)
    context = make_build_context(spec, mesh)
    return [
        build_decoder(context, spec.training.seed, dtype, mesh.device, stages[chunk * layout.pp + mesh.pp.rank])
        for chunk in range(layout.vpp)
    ]


def _activation_shape(spec: RunSpec) -> tuple[int, ...]:
    """Return the shape of activations between stages: (microbatch size, sequence or a rank's shard, hidden_size)."""
    layout, training = spec.parallelism, spec.training
    length = training.sequence_length // (layout.tp if layout.sequence_parallel else 1)
    return training.micro_batch_size, length, spec.model.hidden_size


def _tied(chunks: list[Decoder], mesh: ParallelMesh) -> dict[str, Group]:
    """Return the group of the two copies of a tied embedding at the ends of a pipeline, by parameter. A collective call."""
    if not chunks[0].context.model.tie_embeddings or mesh.pp.size == 1:
        return {}
    ends = Group()
    for pipeline in mesh.dims.groups("pp"):
        process_group = dist.new_group([pipeline[0], pipeline[-1]], group_desc="tied embeddings")
        if mesh.world.rank in (pipeline[0], pipeline[-1]):
            ends = Group(int(mesh.world.rank == pipeline[-1]), 2, process_group)
    first = {"0.embedding.weight": ends} if chunks[0].is_first else {}
    return first | ({f"{len(chunks) - 1}.head.weight": ends} if chunks[-1].is_last else {})


def build(spec: RunSpec, mesh: RankPlace) -> TorchNativeEngine:
    """Build the engine of ``spec`` on this rank, with initial weights.

    Raises:
        UnsupportedError: the engine does not support ``spec``. The message names every field at fault.
    """
    check_supported(spec)
    if spec.training.deterministic:
        use_deterministic_algorithms()
        if spec.compiles:
            disable_kernel_timing()
    engine = TorchNativeEngine(spec, mesh)
    # A step needs blocks of other sizes than those that the build freed, so its peak would contain them.
    torch.cuda.empty_cache()
    return engine
