"""The megatron engine on one rank: Megatron-Core's model, schedule, gradient reduction and optimizer."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import configure_nvtx_profiling
from torch import nn
from torch._C._distributed_c10d import HashStore

from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import GraphedStep
from launch.engines.lr_schedule import learning_rate
from launch.engines.megatron.ddp_hooks import wrap_with_ddp
from launch.engines.megatron.device_norm import norm_on_device
from launch.engines.megatron.graphs import make_runner
from launch.engines.megatron.init.weight_map import draw_weights
from launch.engines.megatron.mends import MENDS
from launch.engines.megatron.model import (
    Configuration,
    build_chunk,
    fuse_gradient_accumulation,
    has_apex_kernel,
    make_config,
)
from launch.engines.megatron.observed_layers import ObservedLayers
from launch.engines.megatron.observed_router import observe_routers
from launch.engines.megatron.router_bias import router_bias_converted, uses_product
from launch.engines.megatron.schedule import Schedule, to_scalar
from launch.engines.megatron.side_stream import on_stream, use_side_stream
from launch.engines.megatron.step_check import MegatronStep
from launch.engines.profile_ranges import RANGES
from launch.engines.protocol import CheckableStep, RankPlace, StepResult
from launch.engines.torch_native.parallel.process_groups import Group
from launch.megatron_config.determinism import settle_determinism
from launch.megatron_config.transformer_config import Layers, optimizer_settings, parallel_sizes
from launch.support.expandable_segments import disable_nccl_graph_register
from launch.support.megatron import CORRECTED
from launch.support.rule import judge

COPIED_ELEMENTS = 2**27
"""The number of elements of a lean optimizer's group. An update copies its moments to fp32, which takes 1 GiB."""


class MegatronEngine:
    """Trains Megatron-Core's model. Layers consist of Transformer Engine's modules on a GPU, else of Megatron-Core's own."""

    def __init__(self, spec: RunSpec, mesh: RankPlace) -> None:
        self._spec = spec
        self._device = mesh.device
        self._step = 0
        self._environment = dict(disable_nccl_graph_register(os.environ, spec.graphed))
        if spec.training.deterministic:
            self._environment |= settle_determinism(os.environ)
        # Megatron-Core's own ranges: attention and MLP of each layer, and the transfers between stages.
        configure_nvtx_profiling(RANGES.are_named)
        self._stream = use_side_stream() if mesh.device.type == "cuda" else None
        self.layers: Layers = "transformer_engine" if mesh.device.type == "cuda" else "local"
        _initialize_parallel_state(spec, mesh)
        # Stages draw different numbers, as in Megatron-LM (megatron/training/initialize.py, ``_set_random_seed``).
        seed = spec.training.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
        model_parallel_cuda_manual_seed(seed, te_rng_tracker=self.layers == "transformer_engine")
        self.config = make_config(spec, self.layers, mesh.device)
        self.chunks: list[Any] = _build_chunks(spec, self.config, self.layers, mesh.device, self._stream)
        self._optimizer = get_megatron_optimizer(
            optimizer_config_of(spec, self.config.params_dtype), self.chunks, use_gloo_process_groups=False
        )
        if spec.training.optimizer_precision == "lean":
            split_groups(self._optimizer, COPIED_ELEMENTS)
        self._repairs = ExitStack()
        self._norm_kernels: dict[str, str] = {}
        if spec.training.capturable_optimizer:
            move_rates(self._optimizer, mesh.device)
            self._norm_kernels["gradient norm and clipping"] = self._repairs.enter_context(norm_on_device())
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self._optimizer.scale_loss
        self._routers = observe_routers(self.chunks, self.config) if spec.step_checks else None
        self._layers = ObservedLayers(spec.model.num_layers, spec.cuda_graph.implementation.extent == "step")
        if spec.layer_check_steps:
            self._layers.attach(self.chunks)
        for name in spec.cuda_graph.mend:
            self._repairs.enter_context(MENDS[name]())
        if self._has_router_bias:
            self._repairs.enter_context(router_bias_converted())
        self._schedule = Schedule(spec, self.config, self.chunks, mesh.device)
        self._runner = make_runner(spec, self._schedule, self._optimizer)

    @property
    def capture_step(self) -> int | None:
        return self._runner.capture_step

    @property
    def choices(self) -> Mapping[str, str]:
        modules = {"transformer_engine": "Transformer Engine", "local": "Megatron-Core"}
        return {
            "layers": f"modules of {modules[self.layers]}",
            **self._fused_gradients(),
            **self._norm_kernels,
            **self._mended(),
            **({"router bias": "converted to the precision of the output"} if self._has_router_bias else {}),
            **self._environment,
        }

    @property
    def _has_router_bias(self) -> bool:
        """Whether Transformer Engine would add a router's bf16 bias to fp32 output."""
        return self.layers == "transformer_engine" and uses_product() and bool(judge(CORRECTED, self._spec))

    def _mended(self) -> Mapping[str, str]:
        return {"mended": ", ".join(self._spec.cuda_graph.mend)} if self._spec.cuda_graph.mend else {}

    def _fused_gradients(self) -> Mapping[str, str]:
        if not self._spec.training.gradient_accumulation_fusion:
            return {}
        where = "all" if has_apex_kernel() else "all but the output layer's, which takes Apex's kernel"
        return {"gradient_accumulation_fusion": where}

    def step(self, batch: torch.Tensor) -> StepResult:
        self._set_rates()
        self._clear_gradients()
        self._layers.forget()
        (loss, norm), kind = self._runner.run(self._step, batch)
        if norm is None:
            # No graph has run the optimizer.
            _, norm, _ = self._optimizer.step()
        self._step += 1
        return StepResult(loss, to_scalar(norm, self._device), kind)

    def checkable_step(self) -> CheckableStep:
        assert isinstance(self._runner, GraphedStep)
        self._set_rates()
        return MegatronStep(
            self._schedule,
            self._runner,
            self._optimizer,
            self._spec.cuda_graph.optimizer,
            self._clear_gradients,
            self._routers,
            self._layers,
        )

    def _set_rates(self) -> None:
        """Set the learning rate of the next step. A graph reads it on the device, where each group then keeps it."""
        rate = learning_rate(self._spec.training, self._step)
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            # Megatron-Core leaves weight decay to its scheduler. Norms and biases have a factor of 0.
            group["weight_decay"] = self._spec.training.weight_decay * group["wd_mult"]

    def _clear_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return nn.ModuleList(self.chunks).named_parameters()

    def graph_stats(self) -> GraphStats:
        return self._runner.stats()

    def close(self) -> None:
        self._runner.close()
        self._repairs.close()
        parallel_state.destroy_model_parallel()
        if self._stream is not None:
            on_stream(torch.cuda.default_stream())


def optimizer_config_of(spec: RunSpec, params_dtype: torch.dtype) -> OptimizerConfig:
    """Return the optimizer's configuration, with types instead of their names. A limit of 0 does not clip."""
    settings = {
        name: getattr(torch, value) if name.endswith("_dtype") else value
        for name, value in optimizer_settings(spec).items()
    }
    settings |= {"params_dtype": params_dtype, "clip_grad": spec.training.clip_grad or math.inf}
    if spec.training.capturable_optimizer:
        settings["optimizer_cuda_graph"] = True
    return OptimizerConfig(**settings)


def move_rates(optimizer: Any, device: torch.device) -> None:
    """Keep each group's learning rate on ``device``. Transformer Engine's Adam already does, and PyTorch's does not."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()


def split_groups(optimizer: Any, most: int) -> None:
    """Divide groups of parameters into groups of at most ``most`` elements, or of one larger parameter.

    Transformer Engine 2.11's FusedAdam copies all moments of a group to fp32 before it updates any: 8 bytes per parameter, while
    bf16 moments save 4 (pull request 2632 ends the copies). Only Megatron-Core's checkpoints find parameters by their group.
    """
    for part in optimizer.chained_optimizers:
        groups: list[dict[str, Any]] = []
        for group in part.param_groups:
            room = 0
            for parameter in group["params"]:
                if parameter.numel() > room:
                    groups.append({**group, "params": []})
                    room = most
                groups[-1]["params"].append(parameter)
                room -= parameter.numel()
        if groups:
            part.optimizer.param_groups = groups


def _initialize_parallel_state(spec: RunSpec, mesh: RankPlace) -> None:
    """Create Megatron's process groups. Its order of ranks is that of launch.contract.spec.Parallelism."""
    # Megatron needs groups for a single rank too.
    if not dist.is_initialized():
        backend = "nccl" if mesh.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    # Only Megatron's checkpoints need gloo groups.
    parallel_state.initialize_model_parallel(**parallel_sizes(spec.parallelism), create_gloo_process_groups=False)


def _build_chunks(
    spec: RunSpec, config: Configuration, layers: Layers, device: torch.device, stream: torch.cuda.Stream | None
) -> list[torch.nn.Module]:
    """Build this rank's virtual stages with initial weights, each with its gradient buffers."""
    stages = range(spec.parallelism.vpp) if spec.parallelism.vpp > 1 else [None]
    tp = Group(parallel_state.get_tensor_model_parallel_rank(), spec.parallelism.tp)
    ep = Group(parallel_state.get_expert_model_parallel_rank(), spec.parallelism.ep)
    etp = Group(parallel_state.get_expert_tensor_parallel_rank(), spec.parallelism.etp)
    chunks: list[torch.nn.Module] = []
    for stage in stages:
        chunk = build_chunk(spec, config, layers, stage).to(device)
        draw_weights(chunk, spec.model, spec.training.seed, tp, ep, etp)
        chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    if spec.training.gradient_accumulation_fusion:
        fuse_gradient_accumulation(config, chunks)
    if stream is not None:
        on_stream(stream)
    return wrap_with_ddp(spec, config, chunks)
