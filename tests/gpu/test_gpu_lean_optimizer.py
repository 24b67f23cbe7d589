"""On a GPU: the lean optimizer's Triton kernel equals its PyTorch reference to the bit, also in a graph, and so do whole steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.contract.spec import CudaGraph, Model, RunSpec, Training
from launch.engines.torch_native.optim.fused_kernels import lean_adamw
from launch.engines.torch_native.optim.split_masters import join, split
from launch.train.inspection.step_check import check_step
from tests.gpu.test_gpu_eager import GPT_OSS, MOE
from tests.gpu.test_gpu_graphs import DENSE, spec_of, trained
from tests.numerics.test_step_check import faults_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
TRAINING = Training(weight_decay=0.1, adam_beta2=0.95)
ELEMENTS = 1_000_003  # no multiple of a block, and of nothing that makes loads wide


def lean_kernel(decays: bool) -> Any:
    from launch.engines.torch_native.optim.lean_kernel import LeanKernel  # imports Triton

    return LeanKernel(TRAINING, decays)


def drawn(seed: int = 0, count: int = ELEMENTS, smallest: int = -12) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a slice (low halves, weights, moments) on the GPU, and gradients from 10**smallest to 10."""
    generator = torch.Generator().manual_seed(seed)
    weights, _ = split(torch.randn(count, generator=generator))
    low = torch.randint(-(2**15), 2**15, (count,), generator=generator).short()
    state = [low, weights, *(torch.zeros(count, dtype=torch.bfloat16) for _ in range(2))]
    sizes = [10.0 ** torch.randint(smallest, 2, (count,), generator=generator) for _ in range(5)]
    gradients = [torch.randn(count, generator=generator) * size for size in sizes]
    return [one.cuda() for one in state], [one.cuda() for one in gradients]


def scalars(step: int) -> list[torch.Tensor]:
    """Return the clip factor, the rate and both bias corrections of ``step``, counted from 1."""
    values = [0.7, 1e-3, 1 - TRAINING.adam_beta1**step, 1 - TRAINING.adam_beta2**step]
    return [torch.tensor(value, device="cuda") for value in values]


def apply(update: Any, state: list[torch.Tensor], gradient: torch.Tensor, values: list[torch.Tensor]) -> None:
    low, weights, mean, square = state
    update(low, gradient, weights, mean, square, *values)


def expect_equal(found: list[torch.Tensor], expected: list[torch.Tensor], say: object) -> None:
    for name, one, other in zip(("low halves", "weights", "mean", "square"), found, expected, strict=True):
        unequal = int((one.view(torch.int16) != other.view(torch.int16)).sum())
        assert unequal == 0, (name, say, unequal)


@pytest.mark.parametrize("decays", [False, True], ids=["plain", "decayed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 64, 1024, ELEMENTS])
def test_the_kernel_equals_the_reference_to_the_bit(count: int, dtype: torch.dtype, decays: bool) -> None:
    state, gradients = drawn(count=count)
    kernel, reference = lean_kernel(decays), lean_adamw(TRAINING, decays)
    mine, expected = [one.clone() for one in state], [one.clone() for one in state]
    for step, gradient in enumerate(gradients, 1):
        apply(kernel, mine, gradient.to(dtype), scalars(step))
        apply(reference, expected, gradient.to(dtype), scalars(step))
        expect_equal(mine, expected, step)
    assert not torch.equal(mine[0], state[0])


def test_numbers_below_the_normal_ones_are_not_flushed() -> None:
    """Squares of gradients down to 1e-24 are subnormal, in float32 and in bfloat16."""
    state, gradients = drawn(smallest=-24)
    mine, expected = [one.clone() for one in state], [one.clone() for one in state]
    for step, gradient in enumerate(gradients, 1):
        apply(lean_kernel(True), mine, gradient, scalars(step))
        apply(lean_adamw(TRAINING, True), expected, gradient, scalars(step))
        expect_equal(mine, expected, step)


def test_the_cpu_computes_the_same_but_for_roots() -> None:
    """PyTorch's CPU root may be off by one unit, so masters may be off by a unit of the last place of an update."""
    state, gradients = drawn()
    mine, expected = [one.clone() for one in state], [one.cpu() for one in state]
    for step, gradient in enumerate(gradients, 1):
        apply(lean_kernel(True), mine, gradient, scalars(step))
        apply(lean_adamw(TRAINING, True), expected, gradient.cpu(), [one.cpu() for one in scalars(step)])
    for one, other in zip(mine[2:], expected[2:], strict=True):
        assert torch.equal(one.cpu(), other)
    torch.testing.assert_close(join(mine[1], mine[0]).cpu(), join(expected[1], expected[0]), rtol=3e-7, atol=5e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_spoils_nothing_else(bad: float) -> None:
    state, (gradient, *_) = drawn(count=4096)
    gradient[7] = bad
    apply(lean_kernel(True), state, gradient, scalars(1))
    assert state[1].isnan().nonzero().flatten().tolist() == [7]
    assert join(state[1], state[0]).isnan().nonzero().flatten().tolist() == [7]


def test_a_graph_reads_the_gradients_and_scalars_of_each_replay() -> None:
    state, gradients = drawn()
    kernel, reference = lean_kernel(True), lean_adamw(TRAINING, True)
    mine, expected = [one.clone() for one in state], [one.clone() for one in state]
    static, values = gradients[0].clone(), scalars(1)
    apply(kernel, [one.clone() for one in state], static, values)  # compiles it
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        apply(kernel, mine, static, values)
    expect_equal(mine, state, "a capture executes nothing")
    for step, gradient in enumerate(gradients, 1):
        static.copy_(gradient)
        for value, now in zip(values, scalars(step), strict=True):
            value.copy_(now)
        graph.replay()
        apply(reference, expected, gradient, scalars(step))
        expect_equal(mine, expected, step)


LEAN = {"optimizer_precision": "lean", "learning_rate": 3e-3, "weight_decay": 0.1}
MODELS = {"dense": DENSE, "moe": MOE, "gpt-oss": GPT_OSS}
GRAPHS = {
    "whole": CudaGraph("full_iteration"),
    "whole, optimizer": CudaGraph("full_iteration", optimizer=True),
    "parts": CudaGraph("torch", ("attn",)),
}


def kept(spec: RunSpec) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """Return losses and norms, and the bits of all that the optimizer keeps."""
    engine, results, _ = trained(spec)
    assert not spec.graphed or engine.graph_stats().proven, engine.graph_stats()
    state = (*engine.flat_parameters.stored_weights(), *engine._optimizer.state().values())
    bits = torch.cat([one.flatten().view(torch.int16) for one in state])
    engine.close()
    return results, bits


@pytest.mark.parametrize("training", [{}, {"gradient_precision": "bf16", "compile": "elementwise"}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_graphed_steps_equal_eager_ones_to_the_bit(model: str, training: dict[str, Any]) -> None:
    spec = spec_of(MODELS[model], CudaGraph("none"), steps=20, **LEAN | training)
    expected, bits = kept(spec)
    assert len({loss for loss, _ in expected}) == 20
    for name, graph in GRAPHS.items():
        found, own = kept(replace(spec, cuda_graph=graph))
        assert found == expected and torch.equal(own, bits), name


def test_lean_steps_stay_beside_those_of_fp32() -> None:
    lean = [loss for loss, _ in kept(spec_of(MOE, CudaGraph("none"), steps=60, **LEAN))[0]]
    fp32 = [
        loss for loss, _ in kept(spec_of(MOE, CudaGraph("none"), steps=60, **LEAN | {"optimizer_precision": "fp32"}))[0]
    ]
    assert lean[0] == fp32[0] and lean != fp32
    assert lean == pytest.approx(fp32, abs=0.1)


def checked(model: Model, graph: CudaGraph) -> Any:
    """Train past the capture. Return the engine, the next step's number and its batch."""
    # A cosine would end at a rate of 0, of which 2% is nothing.
    settings = LEAN | {"deterministic": False, "learning_rate": 3e-3, "learning_rate_schedule": "constant"}
    spec = replace(spec_of(model, graph, **settings), step_checks=3)
    engine, _, _ = trained(spec)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(spec.model.vocab_size, (3, 2, 65), generator=generator).cuda()
    return engine, engine._step, tokens


@pytest.mark.parametrize("graph", ["whole, optimizer", "whole"])
def test_step_checks_of_lean_steps_are_clean_and_find_another_rate(graph: str) -> None:
    engine, number, tokens = checked(DENSE, GRAPHS[graph])
    clean = check_step(engine.checkable_step(), number, tokens)
    assert clean.calibrated and faults_of(clean) == []
    if GRAPHS[graph].optimizer:
        runner, replay = engine._runner, engine._runner.replay

        def stale(batch: torch.Tensor) -> Any:
            rate = engine._optimizer._rate
            now = rate.clone()
            rate.mul_(1.02)
            output = replay(batch)
            rate.copy_(now)
            return output

        runner.replay = stale
        faults = faults_of(check_step(engine.checkable_step(), number, tokens))
        assert any(fault.startswith("weight of") for fault in faults), faults
    engine.close()


def test_its_memory_is_ten_bytes_a_parameter_with_bf16_gradients() -> None:
    """2 of weights, 2 of gradients, 2 of low halves and 4 of moments; fp32 takes 18 with fp32 gradients."""
    spec = spec_of(DENSE, CudaGraph("none"), steps=2, gradient_precision="bf16", **LEAN)
    engine, _, _ = trained(spec)
    main = engine.flat_parameters
    state = [*main.stored_weights(), main.gradients, *engine._optimizer.state().values()]
    assert sum(one.nbytes for one in state if one.dim()) == 10 * main.weights.numel()
    engine.close()
