"""Test that checks of layers name the first layer that differs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.contract.spec import RunSpec
from launch.engines.torch_native.engine import TorchNativeEngine
from tests.distributed import workers
from tests.numerics.checked_step import (
    FAULTS,
    FEW,
    FULL,
    MODEL,
    PIPELINE,
    check,
    engine_of,
    faults_of,
    other_weight,
    spec_of,
    sum_in_halves,
    train_to_first_check,
)
from tests.numerics.tiny import batches, make_spec

FIRST = {
    "a lost sample": None,
    "the previous batch": "output of the embedding, micro-batch 0",
    "an overwritten micro-batch": "output of the embedding, micro-batch 4",
    "a stale weight": "output of decoder layer 1, micro-batch 0",
    "a frozen scalar": None,
    "a gradient lost in a layer": "gradient of the output of decoder layer 0, micro-batch 2",
}


@contextmanager
def lost_gradient(engine: TorchNativeEngine) -> Iterator[None]:
    """Let layer 1 pass no gradient back in one micro-batch."""
    calls = itertools.count()

    def lose(layer: Any, inputs: Any, outputs: Any) -> Any:
        x = outputs[0].clone()
        if next(calls) == 2:
            outputs[0].register_hook(torch.zeros_like)
        return x, *outputs[1:]

    handle = engine.chunks[0].named_layers()["1"].register_forward_hook(lose)
    yield
    handle.remove()


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def observed(request: pytest.FixtureRequest) -> tuple[TorchNativeEngine, torch.Tensor]:
    spec = spec_of(replace(FULL, optimizer=True), request.param, FEW)
    return train_to_first_check(replace(spec, layer_check_steps=4))


@pytest.mark.parametrize("name", FIRST)
def test_the_first_layer_that_differs_is_named(observed: tuple[TorchNativeEngine, torch.Tensor], name: str) -> None:
    found = check(observed, FAULTS[name][0] if name in FAULTS else lost_gradient)
    first = found.first and found.first[0].name
    assert first == FIRST[name] and (first is None or found.first[1].name == first)


def test_rounding_is_in_no_layer_a_fault(observed: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    found = check(observed, sum_in_halves)
    assert found.unequal > 12 * FEW and faults_of(found) == [] and found.first is None


def first_on_rank(spec: RunSpec) -> str:
    """Return what a check names first on this rank. The graph reads a stale weight on the second rank."""
    rank = dist.get_rank()
    engine, given = engine_of(spec, rank), batches(spec)
    for _ in range(spec.first_compared):
        engine.step(next(given))
    stale = other_weight("layers.2.attention_norm.weight", lambda weight: weight.mul_(1.5))
    found = check((engine, next(given)), stale if rank else lambda engine: nullcontext())
    return found.first[0].name if found.first else ""


def test_the_stage_that_differs_first_names_the_output_and_the_one_before_it_a_gradient() -> None:
    spec = make_spec(replace(MODEL, num_layers=4), steps=4, global_batch_size=4)
    spec = replace(spec, parallelism=PIPELINE, cuda_graph=FULL, step_checks=1, layer_check_steps=4)
    assert workers(2).run(first_on_rank, spec) == [
        "gradient of the output of decoder layer 1, micro-batch 0",
        "output of decoder layer 2, micro-batch 0",
    ]
