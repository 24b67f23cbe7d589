"""Test torch_compile on a CPU: it computes the same numbers, and its proof fails where it should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.contract.errors import ReplayError
from launch.contract.spec import CudaGraph, Model
from launch.engines.protocol import RankPlace, StepResult
from launch.engines.torch_native.engine import TorchNativeEngine, build
from tests.numerics.tiny import CPU, DENSE, GPT_OSS, MOE, make_spec, train

# Dynamo asks tensors for gradients when it traces a torch.autograd.Function (PyTorch 2.13).
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

PLAIN = pytest.mark.usefixtures("plain_kernels")
ALONE = RankPlace(0, 1, CPU)
# One layer with experts that drop and pad, unlike those of GPT_OSS. tests/integration/test_sweep.py compiles a dense
# layer.
MODEL = replace(
    MOE,
    num_layers=1,
    moe_aux_loss_coeff=0.01,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_expert_capacity_factor=1.0,
    moe_pad_expert_input_to_capacity=True,
)
WARMUP, STEPS, MICRO_BATCHES = 2, 6, 4
EAGER = make_spec(MODEL, steps=STEPS, deterministic=True)
COMPILED = replace(EAGER, cuda_graph=CudaGraph(impl="torch_compile", warmup_steps=WARMUP))


@pytest.fixture(scope="module")
def compiled() -> tuple[TorchNativeEngine, list[StepResult]]:
    engine = build(COMPILED, ALONE)
    assert engine.capture_step == WARMUP
    return engine, train(engine, COMPILED)


@pytest.fixture(scope="module")
def plain() -> list[StepResult]:
    return train(build(EAGER, ALONE), EAGER)


def test_compiled_steps_equal_eager_ones(
    compiled: tuple[TorchNativeEngine, list[StepResult]], plain: list[StepResult]
) -> None:
    for step, (found, eager) in enumerate(zip(compiled[1], plain, strict=True)):
        tolerance = 0.0 if step < WARMUP else 1e-5
        torch.testing.assert_close(found.loss, eager.loss, rtol=tolerance, atol=0)
        torch.testing.assert_close(found.grad_norm, eager.grad_norm, rtol=10 * tolerance, atol=0)


def test_proof_counts_every_micro_batch_from_the_capture_on(
    compiled: tuple[TorchNativeEngine, list[StepResult]],
) -> None:
    engine, results = compiled
    assert [result.kind for result in results] == ["warmup", "warmup", "capture", "steady", "steady", "steady"]
    stats = engine.graph_stats()
    assert stats.proven
    assert (stats.graphs, stats.replays, stats.recompilations) == (1, MICRO_BATCHES * (STEPS - WARMUP), 0)
    assert stats.expected_replays == stats.replays
    assert stats.capture_seconds > 0
    assert stats.mechanism == "compiled by Inductor without CUDA graphs (CPU)"


def test_a_model_that_is_compiled_whole_is_the_same_code_with_and_without_graphs(plain: list[StepResult]) -> None:
    """Results are equal bit for bit. Whether compiled and plain code round alike depends on the processor, but they are
    close on any. The kernels are those of the test above."""
    spec = replace(EAGER, training=replace(EAGER.training, compile="whole"))
    eager, graphed = build(spec, ALONE), build(replace(spec, cuda_graph=COMPILED.cuda_graph), ALONE)
    found, expected = curves(train(graphed, spec)), curves(train(eager, spec))
    assert found == expected
    stats = graphed.graph_stats()
    assert stats.proven and (stats.graphs, stats.replays) == (1, MICRO_BATCHES * (STEPS - WARMUP)), stats
    assert eager.graph_stats().recompilations == 0
    for one, other in zip(expected, curves(plain), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def curves(results: list[StepResult]) -> list[tuple[float, float]]:
    return [(result.loss.item(), result.grad_norm.item()) for result in results]


@pytest.mark.slow
def test_compiled_steps_of_gpt_oss_equal_eager_ones() -> None:
    """Experts are chosen after the softmax here, so that Inductor compiles this order too."""
    compare_with_eager(replace(GPT_OSS, num_layers=1, moe_router_order="softmax_then_topk"), recompute="selective")


@PLAIN
@pytest.mark.slow
def test_parts_that_are_compiled_for_eager_steps_are_compiled_into_the_whole() -> None:
    """The model has a dense layer and one with experts. The backward pass computes both again."""
    compare_with_eager(replace(GPT_OSS, num_layers=2, moe_layer_freq=2), recompute="full", compile="elementwise")


def compare_with_eager(model: Model, **training: Any) -> None:
    """Train GPT-OSS eagerly and compiled: losses and gradient norms are close, and the proof holds."""
    eager = make_spec(replace(model, init_std=0.2), steps=5, **training)
    spec = replace(eager, cuda_graph=CudaGraph(impl="torch_compile", warmup_steps=2))
    engine = build(spec, ALONE)
    for found, expected in zip(train(engine, spec), train(build(eager, ALONE), eager), strict=True):
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=0)
        torch.testing.assert_close(found.grad_norm, expected.grad_norm, rtol=1e-3, atol=0)
    assert engine.graph_stats().proven
    engine.close()


@PLAIN
def test_recompilation_undoes_the_proof() -> None:
    spec = make_spec(replace(DENSE, num_layers=1), graph=CudaGraph(impl="torch_compile", warmup_steps=0))
    engine = build(spec, ALONE)
    engine.step(torch.zeros(4, 1, 9, dtype=torch.int64))
    assert engine.graph_stats().recompilations == 0
    # Compiled code keeps the values that Python's numbers had at compilation.
    engine.chunks[0].named_layers()["0"].epsilon *= 2
    engine.step(torch.zeros(4, 1, 9, dtype=torch.int64))
    assert engine.graph_stats().recompilations == 1
    assert not engine.graph_stats().proven
    engine.close()


@PLAIN
def test_another_batch_than_was_compiled_is_refused_with_both() -> None:
    spec = make_spec(replace(DENSE, num_layers=1), graph=CudaGraph(impl="torch_compile", warmup_steps=0))
    engine = build(spec, ALONE)
    engine.step(torch.zeros(4, 1, 9, dtype=torch.int64))
    for batch, said in (
        (torch.zeros(4, 1, 8, dtype=torch.int64), r"shape \(4, 1, 8\), but was captured with \(4, 1, 9\)"),
        (torch.zeros(4, 1, 9, dtype=torch.int32), r"dtype torch\.int32, but was captured with torch\.int64"),
    ):
        with pytest.raises(ReplayError, match=f"the batch has {said}"):
            engine.step(batch)
    engine.close()


def test_eager_micro_batches_after_the_capture_undo_the_proof() -> None:
    engine = build(COMPILED, ALONE)
    with torch.compiler.set_stance("force_eager"):
        train(engine, COMPILED)
    stats = engine.graph_stats()
    assert (stats.replays, stats.expected_replays, stats.proven) == (0, MICRO_BATCHES * (STEPS - WARMUP), False)
