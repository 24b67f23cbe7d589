"""Test products in 8 bits with imitated modules of Transformer Engine: when weights are cast, when scales change, and that graphs
and checks of steps keep both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch.contract.spec import CudaGraph, Parallelism, RunSpec
from launch.engines.fp8_scales import fp8_scales
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.train.inspection.step_check import check_step
from tests.distributed import workers
from tests.numerics.checked_step import Fault, faults_of
from tests.numerics.full_iteration_on_cpu import full_iteration_on_cpu
from tests.numerics.graphed_callables_on_cpu import graphs_on_cpu
from tests.numerics.tiny import CPU, DENSE, GPT_OSS, MOE, batches, make_spec
from tests.numerics.transformer_engine_on_cpu import FP8GlobalStateManager, transformer_engine_on_cpu

CAPACITY = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
MODELS = {
    "dense": DENSE,
    "moe": replace(MOE, moe_shared_expert_ffn_hidden_size=8),
    "padded": replace(MOE, **CAPACITY),
    "gpt-oss": replace(GPT_OSS, init_std=0.2),
}
EAGER = CudaGraph("none")
WHOLE = CudaGraph("full_iteration", optimizer=True)
LAYERS = [CudaGraph("torch"), CudaGraph("transformer_engine")]
PRODUCTS = {"dense": 2 * 4, "padded": 2 * (2 + 2 * 4)}
"""The number of weights in 8 bits."""
STEPS, MICROBATCHES = 6, 2


def spec_of(name: str, graph: CudaGraph = EAGER, fp8: str = "delayed", **training: Any) -> RunSpec:
    settings = {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 2, "fp8": fp8, "learning_rate": 1e-2}
    return make_spec(MODELS[name], graph=graph, **settings | training)


@contextmanager
def on_cpu() -> Iterator[None]:
    with transformer_engine_on_cpu(), graphs_on_cpu(), full_iteration_on_cpu():
        yield


def scales_of(engine: TorchNativeEngine) -> list[torch.Tensor]:
    return fp8_scales(module for chunk in engine.chunks for module in chunk.modules())


def train(spec: RunSpec) -> dict[str, Any]:
    """Return a rank's losses and norms, its masters, its scales, and how often scales changed and weights were cast."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with on_cpu():
        engine = TorchNativeEngine(spec, RankPlace(rank, spec.parallelism.world_size, CPU))
        steps = [engine.step(tokens) for tokens in batches(spec)]
        found = {
            "steps": [(step.loss.item(), step.grad_norm.item()) for step in steps],
            "weights": engine.flat_parameters.weights,
            "scales": scales_of(engine),
            "updates": dict(FP8GlobalStateManager.updates),
            "casts": FP8GlobalStateManager.weight_casts,
            "proven": engine.graph_stats().proven,
        }
        engine.close()
    return found


@cache
def uncaptured(name: str, fp8: str = "delayed", **training: Any) -> dict[str, Any]:
    """Return the results of an uncaptured run of one rank, which several tests compare with."""
    return train(spec_of(name, EAGER, fp8, **training))


def expect_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["steps"] == expected["steps"]
    assert torch.equal(found["weights"], expected["weights"])
    assert len(found["scales"]) == len(expected["scales"])
    assert all(map(torch.equal, found["scales"], expected["scales"]))
    assert found["updates"] == expected["updates"]


@pytest.mark.parametrize("fp8", ["delayed", "current"])
@pytest.mark.parametrize("name", MODELS)
def test_8_bits_start_from_the_same_weights_and_round(name: str, fp8: str) -> None:
    found, expected = uncaptured(name, fp8), uncaptured(name, "none")
    losses, others = (torch.tensor([loss for loss, _ in one["steps"]]) for one in (found, expected))
    torch.testing.assert_close(losses, others, rtol=0.05, atol=0)
    assert not torch.equal(losses, others)
    assert bool(found["scales"]) == (fp8 == "delayed") and not expected["scales"]


@pytest.mark.parametrize("name", ["dense", "padded"])
def test_scales_change_once_in_each_pass_and_weights_are_cast_once_in_each_step(name: str) -> None:
    found = uncaptured(name)
    assert found["updates"] == {True: STEPS * MICROBATCHES, False: STEPS * MICROBATCHES}
    assert found["casts"] == STEPS * PRODUCTS[name]
    without = uncaptured(name, fp8_weight_caching=False)
    assert without["updates"] == found["updates"] and without["casts"] == MICROBATCHES * found["casts"]


REPLAYED = [
    *((name, graph, fp8) for name in ("dense", "padded") for graph in (WHOLE, *LAYERS) for fp8 in ("delayed", "current")),
    ("moe", CudaGraph("torch", ("attn", "moe_router")), "delayed"),
    ("moe", CudaGraph("transformer_engine", ("attn", "moe_router", "moe_preprocess")), "delayed"),
    ("padded", CudaGraph("transformer_engine", ("moe",)), "delayed"),
]  # fmt: skip


def cached_or_not() -> Iterator[Any]:
    """Yield each case with cached weights. Weights that are cast again take turns of models and scalings."""
    for number, (name, graph, fp8) in enumerate(REPLAYED):
        case = f"{name}-{graph.label}-{fp8}"
        yield pytest.param(name, graph, fp8, True, id=f"{case}-cached")
        repeated = name != "moe" and number % 4 in (1, 2)
        yield pytest.param(
            name, graph, fp8, False, id=f"{case}-cast again", marks=[pytest.mark.exhaustive] if repeated else []
        )


@pytest.mark.parametrize(("name", "graph", "fp8", "caching"), list(cached_or_not()))
def test_replays_compute_what_uncaptured_code_computes(name: str, graph: CudaGraph, fp8: str, caching: bool) -> None:
    found = train(spec_of(name, graph, fp8, fp8_weight_caching=caching))
    # True is the default: a run with it is the one that the tests above train.
    expected = uncaptured(name, fp8) if caching else uncaptured(name, fp8, fp8_weight_caching=False)
    assert found["proven"]
    expect_equal(found, expected)


@pytest.mark.parametrize(
    "caching", [pytest.param(True, id="cached"), pytest.param(False, marks=pytest.mark.exhaustive, id="cast again")]
)
@pytest.mark.parametrize(
    ("layout", "graph"),
    [
        (Parallelism(pp=2), CudaGraph("transformer_engine")),
        (Parallelism(pp=2, vpp=2, schedule="interleaved"), CudaGraph("torch")),
        (Parallelism(tp=2, sequence_parallel=True), CudaGraph("transformer_engine")),
    ],
    ids=["1f1b", "interleaved", "tp"],
)
def test_graphs_of_two_ranks(layout: Parallelism, graph: CudaGraph, caching: bool) -> None:
    spec = replace(spec_of("dense", global_batch_size=8, fp8_weight_caching=caching), parallelism=layout)
    spec = replace(spec, model=replace(DENSE, num_layers=4, vocab_size=32))
    for found, expected in zip(
        *(workers(2).run(train, one) for one in (replace(spec, cuda_graph=graph), spec)), strict=True
    ):
        expect_equal(found, expected)


def checked(fault: Fault | None) -> tuple[list[str], bool]:
    """Check a step of a graph of the whole step, in which only the replay has ``fault``. Return the faults, and whether the check
    left all scales as they were."""
    spec = replace(spec_of("dense", CudaGraph("full_iteration"), steps=8), step_checks=1)
    with on_cpu():
        engine = TorchNativeEngine(spec, RankPlace(0, 1, CPU))
        tokens = list(batches(spec))
        for batch in tokens[: spec.first_compared]:
            engine.step(batch)
        runner: Any = engine._runner
        replay = runner.replay

        def faulty(batch: torch.Tensor) -> Any:
            if fault is None:
                return replay(batch)
            with fault(engine):
                return replay(batch)

        kept = [scale.clone() for scale in scales_of(engine)]
        with mock.patch.object(runner, "replay", faulty):
            found = check_step(engine.checkable_step(), engine._step, tokens[engine._step])
        return faults_of(found), all(map(torch.equal, kept, scales_of(engine)))


@contextmanager
def stale_scale(engine: TorchNativeEngine) -> Iterator[None]:
    """Let the graph read another copy of a scale. With this one, most numbers exceed the range of e4m3."""
    (linear,) = (one for name, one in engine.chunks[0].named_modules() if name == "layers.1.mlp.down")
    linear.fp8_meta["scaling_fwd"].scale[0] *= 2**8
    yield


def test_a_check_leaves_scales_and_finds_a_stale_one() -> None:
    assert checked(None) == ([], True)
    faults, left = checked(stale_scale)
    assert "gradient of 0.layers.1.mlp.down.weight" in faults and left
