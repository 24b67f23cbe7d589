"""What is forecast of a rank's memory is what the engine allocates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from analysis.memory.static_memory import MOMENTS, Parameters, bytes_of_stages, stages
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.parallel.buckets import ALIGNMENT
from launch.engines.torch_native.parallel.sharding import find_shardings
from tests.numerics.layouts import Layout, legal_layouts
from tests.numerics.tiny import CPU
from tests.pairwise import cover

EVERY = legal_layouts()
LAYOUTS = [EVERY[number] for number in cover([layout.values for layout in EVERY])]
MOST_AN_ELEMENT = 2 + 4 + 4 + MOMENTS
PRECISIONS = (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32"))


@contextmanager
def alone_as(rank: int, of: int) -> Iterator[None]:
    """One rank of many, whose collectives reach nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=of)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("precision", "gradients"), PRECISIONS)
def test_a_rank_of_each_stage_holds_what_is_forecast(layout: Layout, precision: Any, gradients: Any) -> None:
    training = replace(layout.spec.training, precision=precision, gradient_precision=gradients)
    spec, dims = replace(layout.spec, training=training), layout.spec.parallelism
    held, expected = stages(spec.model, spec.parallelism), bytes_of_stages(spec)
    for stage in range(dims.pp):
        rank = dims.world_size // dims.pp * stage
        with alone_as(rank, dims.world_size):
            engine = TorchNativeEngine(spec, RankPlace(rank, dims.world_size, CPU))
        assert parameters_of(engine) == held[stage]
        # Each parameter begins at a multiple of so many elements, and each bucket ends at one for each rank that shares it.
        padded = ALIGNMENT * dims.world_size * (len(engine.flat_parameters.parameters) + 1)
        sharded_masters = precision == "fp32" and spec.parallelism.distributed_optimizer
        padding = padded * MOST_AN_ELEMENT + (engine.flat_parameters.weights.nbytes if sharded_masters else 0)
        assert expected[stage] <= allocated(engine) <= expected[stage] + padding


def parameters_of(engine: TorchNativeEngine) -> Parameters:
    """Each once, where two are one."""
    chunks = nn.ModuleList(engine.chunks)
    shardings = find_shardings(chunks)
    named = [(parameter.numel(), shardings[name].axis == "ep") for name, parameter in chunks.named_parameters()]
    return Parameters(
        sum(size for size, of_experts in named if not of_experts), sum(size for size, of_experts in named if of_experts)
    )


def allocated(engine: TorchNativeEngine) -> int:
    """Weights, gradients and masters, two of which may be one, and moments, which the first step makes."""
    main = engine.flat_parameters
    storages = [tensor.untyped_storage() for tensor in (*main.parameters, main.gradients, main.weights)]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(held.values()) + MOMENTS * main.weights.numel()
