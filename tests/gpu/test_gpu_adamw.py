"""On a GPU, test that AdamW's Triton kernel equals its PyTorch reference bit for bit, also in a graph, and that lean
steps do so in graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.contract.spec import CudaGraph, Model, RunSpec, Training
from launch.engines.torch_native.optim.fused_kernels import adamw_in_operators
from launch.engines.torch_native.optim.split_masters import join, split
from launch.train.inspection.step_check import check_step
from tests.gpu.test_gpu_eager import GPT_OSS, MOE
from tests.gpu.test_gpu_graphs import DENSE, spec_of, trained
from tests.numerics.checked_step import faults_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
TRAINING = Training(weight_decay=0.1, adam_beta2=0.95)
ELEMENTS = 1_000_003  # This is no multiple of a block, nor of any width of vector loads.


KINDS = ("lean", "bf16", "fp32")
"""Masters in two halves, masters next to bf16 weights, and masters that are the weights."""


def kernel_of(kind: str, decays: bool = True) -> Any:
    from launch.engines.torch_native.optim.adamw_kernel import AdamWKernel  # imports Triton

    return AdamWKernel(TRAINING, decays, lean=kind == "lean")


def reference_of(kind: str, decays: bool = True) -> Any:
    return adamw_in_operators(TRAINING, decays, lean=kind == "lean")


State = dict[str, torch.Tensor | None]


def drawn(kind: str, count: int = ELEMENTS, smallest: int = -12) -> tuple[State, list[torch.Tensor]]:
    """Return a slice on the GPU, and gradients from 10**smallest to 10."""
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(count, generator=generator)
    low = torch.randint(-(2**15), 2**15, (count,), generator=generator).short()
    weights, compute = {
        "lean": (low, split(masters)[0]), "bf16": (masters, masters.bfloat16()), "fp32": (masters, None)
    }[kind]  # fmt: skip
    moments = [torch.zeros(count, dtype=torch.bfloat16 if kind == "lean" else torch.float32) for _ in range(2)]
    sizes = [10.0 ** torch.randint(smallest, 2, (count,), generator=generator) for _ in range(5)]
    gradients = [(torch.randn(count, generator=generator) * size).cuda() for size in sizes]
    tensors: State = {"weights": weights, "compute": compute, "mean": moments[0], "square": moments[1]}
    return copied({name: one if one is None else one.cuda() for name, one in tensors.items()}), gradients


def copied(state: State) -> State:
    return {name: one if one is None else one.clone() for name, one in state.items()}


def scalars(step: int) -> list[torch.Tensor]:
    """Return the clip factor, the rate, both bias corrections of ``step``, counted from 1, and that nothing is held back."""
    values = [0.7, 1e-3, 1 - TRAINING.adam_beta1**step, 1 - TRAINING.adam_beta2**step, 0.0]
    return [torch.tensor(value, device="cuda") for value in values]


def apply(update: Any, state: State, gradient: torch.Tensor, values: list[torch.Tensor]) -> None:
    update(state["weights"], gradient, state["compute"], state["mean"], state["square"], *values)


def expect_equal(found: State, expected: State, say: object) -> None:
    for name, one in found.items():
        other = expected[name]
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            unequal = int((one.view(torch.int16) != other.view(torch.int16)).sum())
            assert unequal == 0, (name, say, unequal)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decays", [False, True], ids=["plain", "decayed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 64, 1024, ELEMENTS])
def test_the_kernel_equals_the_reference_to_the_bit(count: int, dtype: torch.dtype, decays: bool, kind: str) -> None:
    state, gradients = drawn(kind, count)
    mine, expected = copied(state), copied(state)
    for step, gradient in enumerate(gradients, 1):
        apply(kernel_of(kind, decays), mine, gradient.to(dtype), scalars(step))
        apply(reference_of(kind, decays), expected, gradient.to(dtype), scalars(step))
        expect_equal(mine, expected, step)
    assert not torch.equal(tensor_of(mine, "weights"), tensor_of(state, "weights"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_is_held_back_changes_nothing(kind: str) -> None:
    state, gradients = drawn(kind)
    mine = copied(state)
    apply(kernel_of(kind), mine, gradients[0], [*scalars(1)[:-1], torch.ones((), device="cuda")])
    expect_equal(mine, state, "held back")


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_below_the_normal_ones_are_not_flushed(kind: str) -> None:
    """Squares of gradients down to 1e-24 are subnormal, in float32 and in bfloat16."""
    state, gradients = drawn(kind, smallest=-24)
    mine, expected = copied(state), copied(state)
    for step, gradient in enumerate(gradients, 1):
        apply(kernel_of(kind), mine, gradient, scalars(step))
        apply(reference_of(kind), expected, gradient, scalars(step))
        expect_equal(mine, expected, step)


def test_the_cpu_computes_the_same_but_for_roots() -> None:
    """PyTorch's root on a CPU may be off by one unit, so masters may be off by one unit in the last place of an update."""
    state, gradients = drawn("lean")
    mine = copied(state)
    expected: State = {name: one if one is None else one.cpu() for name, one in state.items()}
    for step, gradient in enumerate(gradients, 1):
        apply(kernel_of("lean"), mine, gradient, scalars(step))
        apply(reference_of("lean"), expected, gradient.cpu(), [one.cpu() for one in scalars(step)])
    for name in ("mean", "square"):
        assert torch.equal(tensor_of(mine, name).cpu(), tensor_of(expected, name))
    torch.testing.assert_close(masters_of(mine).cpu(), masters_of(expected), rtol=3e-7, atol=5e-9)


def masters_of(lean: State) -> torch.Tensor:
    return join(tensor_of(lean, "compute"), tensor_of(lean, "weights"))


def tensor_of(state: State, name: str) -> torch.Tensor:
    found = state[name]
    assert found is not None
    return found


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so_and_spoils_nothing_else(kind: str, bad: float) -> None:
    state, (gradient, *_) = drawn(kind, count=4096)
    gradient[7] = bad
    apply(kernel_of(kind), state, gradient, scalars(1))
    results = [masters_of(state) if kind == "lean" else state["weights"], state["compute"]]
    for one in results:
        assert one is None or one.isnan().nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_reads_the_gradients_and_scalars_of_each_replay(kind: str) -> None:
    state, gradients = drawn(kind)
    kernel, mine, expected = kernel_of(kind), copied(state), copied(state)
    static, values = gradients[0].clone(), scalars(1)
    apply(kernel, copied(state), static, values)  # compiles it
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
        apply(reference_of(kind), expected, gradient, scalars(step))
        expect_equal(mine, expected, step)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_bound_by_memory(kind: str) -> None:
    """With a billion elements, an update takes at most 1.3 times as long as a copy of equally many bytes."""
    count = 2**30
    tensors: State = {
        "weights": torch.zeros(count, device="cuda", dtype=torch.int16 if kind == "lean" else torch.float32),
        "compute": None if kind == "fp32" else torch.zeros(count, device="cuda", dtype=torch.bfloat16),
    }
    for name in ("mean", "square"):
        tensors[name] = torch.zeros(count, device="cuda", dtype=torch.bfloat16 if kind == "lean" else torch.float32)
    gradient = torch.ones(count, device="cuda", dtype=torch.bfloat16 if kind == "lean" else torch.float32)
    kernel, values = kernel_of(kind), scalars(1)
    moved = gradient.nbytes + {"lean": 16, "bf16": 26, "fp32": 24}[kind] * count
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    update = median_milliseconds(lambda: apply(kernel, tensors, gradient, values))
    copy = median_milliseconds(lambda: target.copy_(source))
    print(f"{kind}: {update:.2f} ms for {moved / 1e9:.1f} GB; a copy of as many takes {copy:.2f} ms")
    assert update < 1.3 * copy


def median_milliseconds(work: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


LEAN = {"optimizer_precision": "lean", "learning_rate": 3e-3, "weight_decay": 0.1}
MODELS = {"dense": DENSE, "moe": MOE, "gpt-oss": GPT_OSS}
GRAPHS = {
    "whole": CudaGraph("full_iteration"),
    "whole, optimizer": CudaGraph("full_iteration", optimizer=True),
    "parts": CudaGraph("torch", ("attn",)),
}


def kept(spec: RunSpec) -> tuple[list[tuple[float, float]], torch.Tensor]:
    """Return losses and norms, and the bits of all state that the optimizer keeps."""
    engine, results, _ = trained(spec)
    assert not spec.graphed or engine.graph_stats().proven, engine.graph_stats()
    state = (*engine.flat_parameters.stored_weights(), *engine._optimizer.state())
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
    # A cosine schedule would end at a rate of 0, and 2% of 0 is 0.
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
    """Weights take 2 bytes, gradients 2, low halves 2 and moments 4. With fp32 masters and gradients, a parameter takes
    18."""
    spec = spec_of(DENSE, CudaGraph("none"), steps=2, gradient_precision="bf16", **LEAN)
    engine, _, _ = trained(spec)
    main = engine.flat_parameters
    state = [*main.stored_weights(), main.gradients, *engine._optimizer.state()]
    assert sum(one.nbytes for one in state if one.dim()) == 10 * main.weights.numel()
    engine.close()
