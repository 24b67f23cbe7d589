"""Test the step check: the first check finds a planted fault and names the right tensor, but rounding is no fault."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch.contract.records.memory import requested_bytes
from launch.contract.records.step_check import COMPARISON_BYTES, StepCheck
from launch.contract.spec import CudaGraph, Data, GraphImpl, Model, Parallelism, RunSpec
from launch.engines import torch_native
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.decoder import Layer
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.moe import token_dispatcher
from launch.engines.torch_native.moe.permutation import padded_permutation
from launch.engines.torch_native.moe.router import RepeatedChoice
from launch.engines.torch_native.optim import adamw, fused_kernels
from launch.engines.torch_native.parallel.data_parallel import GradientReduction
from launch.engines.torch_native.step_check import TorchNativeStep
from launch.train.inspection import check_memory, step_check, uncaptured_passes
from launch.train.inspection.snapshot import Snapshot
from launch.train.inspection.step_check import check_step
from tests.distributed import workers
from tests.numerics.full_iteration_on_cpu import full_iteration_on_cpu
from tests.numerics.graphed_callables_on_cpu import graphs_on_cpu
from tests.numerics.test_graphed_layers import EXPERTS
from tests.numerics.tiny import CPU, GPT_OSS, MOE, batches, make_spec

MODEL = replace(MOE, num_layers=3, hidden_size=32, vocab_size=64)
FULL = CudaGraph("full_iteration", warmup_steps=1)
Fault = Callable[[TorchNativeEngine], AbstractContextManager[Any]]


FEW = 5
"""Micro-batches of a step in which the fourth and the fifth have faults. Small faults in 16 bits need the noise of eight."""


def spec_of(graph: CudaGraph, precision: str = "fp32", samples: int = 8) -> RunSpec:
    precisions = (
        {"precision": "bf16", "optimizer_precision": "lean"} if precision == "lean" else {"precision": precision}
    )
    spec = make_spec(MODEL, steps=4, global_batch_size=samples, sequence_length=16, learning_rate=1e-3, **precisions)
    return replace(spec, cuda_graph=graph, step_checks=2)


def engine_of(spec: RunSpec, rank: int = 0) -> TorchNativeEngine:
    with full_iteration_on_cpu():
        return TorchNativeEngine(spec, RankPlace(rank, spec.parallelism.world_size, CPU))


def train_to_first_check(spec: RunSpec, rank: int = 0) -> tuple[TorchNativeEngine, torch.Tensor]:
    engine, given = engine_of(spec, rank), batches(spec)
    for _ in range(spec.first_compared):
        engine.step(next(given))
    return engine, next(given)


@pytest.fixture(scope="module", params=["fp32", "bf16", "lean"])
def captured(request: pytest.FixtureRequest) -> tuple[TorchNativeEngine, torch.Tensor]:
    """Return an engine that has captured, and the batch of its first check. Checks do not change the engine."""
    samples = FEW if request.param == "fp32" else 8
    return train_to_first_check(spec_of(replace(FULL, optimizer=True), request.param, samples))


def check(captured: tuple[TorchNativeEngine, torch.Tensor], fault: Fault) -> StepCheck:
    """Check a step in which only the replay has ``fault``."""
    engine, batch = captured
    runner: Any = engine._runner
    replay = runner.replay

    def faulty(batch: torch.Tensor) -> Any:
        with fault(engine):
            return replay(batch)

    with mock.patch.object(runner, "replay", faulty):
        return check_step(engine.checkable_step(), engine._step, batch)


def faults_of(found: StepCheck) -> list[str]:
    return [row.name for row in found.differences if row.is_fault] + [row.name for row in found.routing if row.is_fault]


def sum_in_halves(engine: TorchNativeEngine) -> AbstractContextManager[Any]:
    """Sum in another order, as another kernel may."""
    linear = torch.nn.functional.linear

    def in_halves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        half = weight.shape[1] // 2
        y = linear(x[..., :half], weight[:, :half]) + linear(x[..., half:], weight[:, half:])
        return y if bias is None else y + bias

    return mock.patch.object(torch.nn.functional, "linear", in_halves)


def weigh_sample(share: float) -> Fault:
    """Let one of the samples count ``share``."""

    def fault(engine: TorchNativeEngine) -> AbstractContextManager[Any]:
        accumulate, calls = engine.flat_parameters.accumulate_gradients, itertools.count()
        return mock.patch.object(
            engine.flat_parameters, "accumulate_gradients",
            lambda given, *flags: accumulate(given * share if next(calls) == 3 else given, *flags),
        )  # fmt: skip

    return fault


@contextmanager
def previous_batch(engine: TorchNativeEngine) -> Iterator[None]:
    """Do not copy the static batch."""
    batch = (engine._runner.batch + 1) % MODEL.vocab_size  # type: ignore[union-attr]
    static = mock.Mock(wraps=batch, copy_=lambda _: batch)
    with (
        mock.patch.object(engine._runner, "batch", static),
        mock.patch.object(
            engine._train_step, "forward_backward", lambda _, run=engine._train_step.forward_backward: run(batch)
        ),
    ):
        yield


@contextmanager
def overwritten_microbatch(engine: TorchNativeEngine) -> Iterator[None]:
    """Use the gradient of the previous micro-batch (pytorch/pytorch#181723)."""
    run = engine._train_step.forward_backward

    def overwrite(batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone()
        batch[4] = batch[3]
        return run(batch)

    with mock.patch.object(engine._train_step, "forward_backward", overwrite):
        yield


def other_weight(name: str, change: Callable[[torch.Tensor], object]) -> Fault:
    """Let the graph read another copy of a weight."""

    @contextmanager
    def fault(engine: TorchNativeEngine) -> Iterator[None]:
        weight = dict(engine.chunks[0].named_parameters())[name].data
        run = engine._train_step.forward_backward

        def stale(batch: torch.Tensor) -> torch.Tensor:
            kept = weight.clone()
            change(weight)
            loss = run(batch)
            weight.copy_(kept)
            return loss

        with mock.patch.object(engine._train_step, "forward_backward", stale):
            yield

    return fault


@contextmanager
def flipped_exponent_bit(engine: TorchNativeEngine) -> Iterator[None]:
    """Make one number of the input of layer 1 four times as large."""

    def flip(layer: Any, inputs: Any) -> Any:
        x = inputs[0].clone()
        x.view(-1)[5] *= 4
        return x, *inputs[1:]

    handle = engine.chunks[0].named_layers()["1"].register_forward_pre_hook(flip)
    yield
    handle.remove()


@contextmanager
def frozen_rate(engine: TorchNativeEngine) -> Iterator[None]:
    """Let the graph use the learning rate of an earlier step."""
    rate = engine._optimizer._rate
    kept = rate.clone()
    rate.mul_(1.02)
    yield
    rate.copy_(kept)


FAULTS: dict[str, tuple[Fault, str]] = {
    "a lost sample": (weigh_sample(0.0), "gradient of 0.head.weight"),
    # In bf16 the norm alone exceeds rounding on every processor.
    "a sample weighted 0.7": (weigh_sample(0.7), "gradient norm"),
    "the previous batch": (previous_batch, "gradient of 0.head.weight"),
    "an overwritten micro-batch": (overwritten_microbatch, "loss of micro-batch 4"),
    "a stale weight": (
        other_weight("layers.1.attention_norm.weight", lambda weight: weight.mul_(1.5)),
        "gradient of 0.layers.1.attention.qkv.weight",
    ),
    "a flipped exponent bit": (flipped_exponent_bit, "gradient of 0.layers.1.attention.qkv.weight"),
    "a frozen scalar": (frozen_rate, "weight of 0.layers.1.mlp.down"),
    "an expert's tokens dropped": (
        other_weight("layers.1.mlp.down", lambda weight: weight[0].zero_()),
        "gradient of 0.layers.1.mlp.router.weight",
    ),
}


EXHAUSTIVE = pytest.mark.exhaustive
OF_THE_OPTIMIZER = {"a lost sample", "a frozen scalar"}
"""Faults that a lean optimizer is tested with. Without it, bf16 sees the others."""


@pytest.mark.parametrize(
    ("captured", "name"),
    [
        pytest.param(
            precision, name, marks=[EXHAUSTIVE] if precision == "lean" and name not in OF_THE_OPTIMIZER else []
        )
        for precision in ("fp32", "bf16", "lean")
        for name in FAULTS
    ],
    indirect=["captured"],
)
def test_a_planted_fault_is_found_and_named(captured: tuple[TorchNativeEngine, torch.Tensor], name: str) -> None:
    fault, tensor = FAULTS[name]
    found = check(captured, fault)
    assert found.calibrated and tensor in faults_of(found)


@contextmanager
def in_shares(engine: TorchNativeEngine, count: int) -> Iterator[None]:
    """Each check compares one of ``count`` shares of the captured optimizer."""
    size = sum(tensor.nbytes for piece in engine._optimizer.pieces for tensor in piece.state())
    with mock.patch.object(torch_native.step_check, "COMPARED_BYTES", math.ceil(size / count)):
        yield


def small_pieces() -> AbstractContextManager[Any]:
    """Cut the optimizer of engines that are built inside the context into pieces of 3,000 elements."""
    modules = (adamw, fused_kernels)
    patches = ExitStack()
    for module in modules:
        patches.enter_context(mock.patch.object(module, "PIECE_ELEMENTS", 3000))
    return patches


@pytest.fixture(scope="module", params=["fp32", "bf16", "lean"])
def in_pieces(request: pytest.FixtureRequest) -> tuple[TorchNativeEngine, torch.Tensor]:
    with small_pieces():
        return train_to_first_check(spec_of(replace(FULL, optimizer=True), request.param, FEW))


def kept_by(engine: TorchNativeEngine) -> list[torch.Tensor]:
    state = (*engine.flat_parameters.stored_weights(), *engine._optimizer.state())
    return [tensor.clone() for tensor in state]


def test_checks_in_shares_compare_the_whole_optimizer_and_change_nothing(
    in_pieces: tuple[TorchNativeEngine, torch.Tensor],
) -> None:
    engine, batch = in_pieces
    before, compared = kept_by(engine), []
    pieces = engine._optimizer.pieces
    assert len(pieces) > 6
    with in_shares(engine, 2):
        for number in range(2):
            with mock.patch.object(engine, "_step", engine._checked_steps[number]):
                step = engine.checkable_step()
                found = check_step(step, engine._step, batch)
            assert (found.unequal, found.calibrated) == (0, True) and found.left_out > 20
            names = [name for name, _ in step.updated() if not name.startswith("step count")]
            assert len(names) + found.left_out == sum(len(list(piece.named_state())) for piece in pieces)
            compared += names
            assert all(torch.equal(*pair) for pair in zip(before, kept_by(engine), strict=True))
    assert len(set(compared)) == len(compared) == sum(len(list(piece.named_state())) for piece in pieces)


@pytest.mark.parametrize("number", range(2))
def test_a_fault_of_one_piece_is_found_by_the_check_that_compares_it(
    in_pieces: tuple[TorchNativeEngine, torch.Tensor], number: int
) -> None:
    """The graph decays one piece again. It is in the second of two shares, and named there."""
    engine, batch = in_pieces
    piece = engine._optimizer.pieces[1]

    @contextmanager
    def decay(engine: TorchNativeEngine) -> Iterator[None]:
        yield
        if not piece.held:
            piece.moments[0][0].mul_(0.9)

    with in_shares(engine, 2), mock.patch.object(engine, "_step", engine._checked_steps[number]):
        faults = faults_of(check((engine, batch), decay))
    assert {name for name, _ in piece.named_state() if name.startswith("first moment")} >= set(faults)
    assert bool(faults) is (number == 1)


def test_a_graph_that_writes_to_what_is_held_back_is_found(in_pieces: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    """The check does not restore it, but names it."""
    engine, batch = in_pieces
    moment = engine._optimizer.pieces[1].moments[0][0]
    kept = moment.clone()

    @contextmanager
    def overwrite(engine: TorchNativeEngine) -> Iterator[None]:
        yield
        moment.mul_(0.9)

    with in_shares(engine, 2), mock.patch.object(engine, "_step", engine._checked_steps[0]):
        faults = faults_of(check((engine, batch), overwrite))
    moment.copy_(kept)
    assert faults and all(name.startswith("first moment of") for name in faults)


@pytest.mark.parametrize(
    "in_pieces", [pytest.param("fp32", marks=EXHAUSTIVE), pytest.param("bf16", marks=EXHAUSTIVE), "lean"], indirect=True
)
def test_gradients_are_compared_in_every_share(in_pieces: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    engine, batch = in_pieces
    with in_shares(engine, 2):
        for number in range(2):
            with mock.patch.object(engine, "_step", engine._checked_steps[number]):
                found = check((engine, batch), weigh_sample(0.0))
            assert found.calibrated and "gradient of 0.head.weight" in faults_of(found)


LAYOUTS = {
    "tp": (Parallelism(tp=2, etp=2, sequence_parallel=True), 4),
    "pp": (Parallelism(pp=2), 4),
    "vpp": (Parallelism(pp=2, vpp=2, schedule="interleaved"), 4),
    "dp and ep": (Parallelism(dp=2, ep=2, distributed_optimizer=True), 6),
    "dp": (Parallelism(dp=2), 6),
    "tp and pp": (Parallelism(tp=2, etp=2, pp=2), 4),
}
"""Layouts with the samples of a step. Six are three micro-batches of two ranks."""


@contextmanager
def stale_norm(engine: TorchNativeEngine) -> Iterator[None]:
    """All of a replay reads another copy of a norm's weight, in the first layer of the last chunk."""
    weights = engine.chunks[-1].named_parameters()
    weight = next(weight.data for name, weight in weights if name.endswith("attention_norm.weight"))
    kept = weight.clone()
    weight.mul_(1.5)
    yield
    weight.copy_(kept)


LAYER_SCOPES = ((), ("attn",), ("attn", "moe_router", "moe_preprocess"))
QUICK_OF_SCOPE = ((0, 1), (1, 1), (0, 0))
"""The implementation and the precision of each scope that are quick, by index."""


@pytest.mark.parametrize(
    ("impl", "scope", "precision"),
    [  # Each scope, implementation and precision is quick once or twice.
        pytest.param(impl, scope, precision, marks=[] if (i, k) == QUICK_OF_SCOPE[j] else [EXHAUSTIVE])
        for i, impl in enumerate(("torch", "transformer_engine"))
        for j, scope in enumerate(LAYER_SCOPES)
        for k, precision in enumerate(("fp32", "bf16"))
    ],
)
def test_faults_of_layer_graphs_are_found_and_named(impl: GraphImpl, scope: tuple[str, ...], precision: str) -> None:
    model = replace(MODEL, num_moe_experts=0, moe_router_topk=0, moe_ffn_hidden_size=0) if scope == () else MODEL
    spec = replace(spec_of(CudaGraph(impl, scope, warmup_steps=1), precision), model=model)
    # With some seeds and processors, the noise of one gradient hides everything in bf16.
    spec = replace(spec, training=replace(spec.training, seed=5))
    with graphs_on_cpu():
        captured = train_to_first_check(spec)
        assert check(captured, lambda engine: nullcontext()).unequal == 0
        assert faults_of(check(captured, sum_in_halves)) == []
        assert "gradient of 0.head.weight" in faults_of(check(captured, weigh_sample(0.0)))
        assert any(
            name.startswith("gradient of 0.layers.0.attention.") for name in faults_of(check(captured, stale_norm))
        )


def check_with_fault_on_rank_1(spec: RunSpec) -> tuple[int, list[str]]:
    """Return how many results of a clean check differ, and the faults of one in which rank 1 reads a stale weight."""
    rank = dist.get_rank()
    captured = engine_of(spec, rank), batches(spec, spec.parallelism.rank_in("dp", rank))
    for _ in range(spec.first_compared):
        captured[0].step(next(captured[1]))
    batch = next(captured[1])
    stale = stale_norm if rank == 1 else lambda engine: nullcontext()
    clean = check((captured[0], batch), lambda engine: nullcontext())
    return clean.unequal, faults_of(check((captured[0], batch), stale))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=EXHAUSTIVE)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_checks_of_several_ranks_are_clean_and_find_a_fault_of_one(name: str, precision: str) -> None:
    layout, samples = LAYOUTS[name]
    spec = make_spec(replace(MODEL, num_layers=4), steps=4, global_batch_size=samples, precision=precision)
    spec = replace(spec, parallelism=layout, cuda_graph=FULL, step_checks=1)
    found = workers(layout.world_size).run(check_with_fault_on_rank_1, spec)
    assert [unequal for unequal, _ in found] == [0] * layout.world_size
    assert any(".attention." in fault for fault in found[1][1]), found


def check_with_late_rank(spec: RunSpec) -> list[str]:
    """Let the replay of rank 1 compute a different batch than that of rank 0."""
    late = dist.get_rank() == 1
    return faults_of(
        check(train_to_first_check(spec, dist.get_rank()), previous_batch if late else lambda _: nullcontext())
    )


def test_a_rank_that_is_out_of_step_is_found_on_both() -> None:
    spec = replace(spec_of(FULL, samples=FEW), parallelism=Parallelism(tp=2, etp=2))
    for faults in workers(2).run(check_with_late_rank, spec):
        assert "gradient of 0.head.weight" in faults


def test_rounding_is_no_fault(captured: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    found = check(captured, sum_in_halves)
    assert found.unequal > 20 and faults_of(found) == []


def sum_in_quarters(engine: TorchNativeEngine) -> AbstractContextManager[Any]:
    linear = torch.nn.functional.linear

    def in_quarters(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        parts = zip(x.chunk(4, -1), weight.chunk(4, -1), strict=True)
        y = functools.reduce(torch.add, (linear(*part) for part in parts))
        return y if bias is None else y + bias

    return mock.patch.object(torch.nn.functional, "linear", in_quarters)


AMPLIFIED = replace(GPT_OSS, hidden_size=32, vocab_size=64, init_std=2.0)
"""Its first layer amplifies rounding by up to 1,000 times as much as what follows it: attention and router are saturated."""


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=EXHAUSTIVE), pytest.param(4, marks=EXHAUSTIVE)])
def test_rounding_that_the_first_layer_amplifies_is_no_fault_but_a_planted_fault_is_one(seed: int) -> None:
    """Another order of summation differs by 0.1% to 0.4% of a gradient, up to 10 times the limit that its output alone gives."""
    spec = spec_of(FULL)
    spec = replace(spec, model=AMPLIFIED, training=replace(spec.training, seed=seed))
    captured = train_to_first_check(spec)
    with mock.patch.multiple(uncaptured_passes, LEAST_GROWTH=math.inf, LEAST_GROWTH_ALONE=math.inf):
        assert any(faults_of(check(captured, order)) for order in (sum_in_halves, sum_in_quarters))
    for order in (sum_in_halves, sum_in_quarters):
        found = check(captured, order)
        assert found.unequal > 20 and faults_of(found) == []
    planted = FAULTS.keys() - {"a frozen scalar"} if seed != 1 else {"a sample weighted 0.7", "a stale weight"}
    for name in planted:
        found = check(captured, FAULTS[name][0])
        assert found.calibrated and max(row.in_limits for row in found.rows) > 30, name


@pytest.mark.parametrize(("precision", "seed"), [("fp32", 1), ("fp32", 2), ("bf16", 2), ("bf16", 5)])
def test_rounding_that_large_weights_amplify_is_no_fault(precision: str, seed: int) -> None:
    """It differs by 8 to 24 times the noise: in fp32 by less than 0.05% of a result, in bf16 where another has a large noise."""
    spec = spec_of(FULL, precision)
    model = replace(MODEL, init_std=2.0 if precision == "fp32" else 1.0)
    spec = replace(spec, model=model, training=replace(spec.training, seed=seed))
    found = check(train_to_first_check(spec), sum_in_halves)
    assert found.unequal > 20 and faults_of(found) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_graph_that_changes_a_weight_is_found(precision: str) -> None:
    """Uncaptured code then computes with the same wrong weight, so nothing else differs."""
    name = "layers.1.attention_norm.weight"

    @contextmanager
    def garble(engine: TorchNativeEngine) -> Iterator[None]:
        weight = dict(engine.chunks[0].named_parameters())[name].data
        weight[0] *= 1.01
        yield

    assert faults_of(check(train_to_first_check(spec_of(FULL, precision, FEW)), garble)) == [f"weight of 0.{name}"]


def test_miscounted_tokens_of_an_expert_are_found() -> None:
    """The optimizer moves the expert's bias by this number."""
    spec = spec_of(FULL, samples=FEW)
    model = replace(MODEL, moe_router_score_function="sigmoid", moe_router_normalize_topk=True)
    captured = train_to_first_check(replace(spec, model=replace(model, moe_router_enable_expert_bias=True)))

    def miscount(engine: TorchNativeEngine) -> AbstractContextManager[Any]:
        step = engine._train_step
        run = step.forward_backward

        def count(batch: torch.Tensor) -> torch.Tensor:
            loss = run(batch)
            step.microbatches.tokens_per_expert[0][1, 0] += 1
            return loss

        return mock.patch.object(step, "forward_backward", count)

    assert faults_of(check(captured, lambda engine: nullcontext())) == []
    assert faults_of(check(captured, miscount)) == ["tokens of each expert, chunk 0"]


def test_equal_bits_need_no_scale(captured: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    found = check(captured, lambda engine: nullcontext())
    assert found.tensors > 20 and found.unequal == 0 and found.calibrated


def test_a_result_that_is_not_finite_on_one_side_is_a_fault(captured: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    found = check(captured, other_weight("final_norm.weight", lambda weight: weight.fill_(torch.nan)))
    assert "loss of micro-batch 0" in faults_of(found)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tokens_between_two_experts_are_counted_and_repeated(precision: str) -> None:
    """A router that rounds differently sends tokens to other experts, which is no fault. A router that sends them to
    experts with far different scores is one."""
    captured = train_to_first_check(spec_of(FULL, precision))
    routers = captured[0].chunks[0].routers()

    def shift(size: float) -> Fault:
        @contextmanager
        def fault(engine: TorchNativeEngine) -> Iterator[None]:
            real = type(routers[1]).forward

            def shifted(router: Any, x: torch.Tensor) -> Any:
                generator = torch.Generator().manual_seed(1)
                noise = torch.randn(x.shape, generator=generator).to(x.dtype)
                return real(router, x * (1 + size * noise) if router is routers[1] else x)

            with mock.patch.object(type(routers[1]), "forward", shifted):
                yield

        return fault

    scale = {"fp32": 2**-22, "bf16": 2**-8}[precision]
    assert faults_of(check(captured, shift(scale))) == []
    found = check(captured, shift(0.3))
    assert any(row.is_fault and row.name.startswith("router of layer 1") for row in found.routing)


def keeping(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Let experts of the graph rank tokens by ``change`` of their weights, (T, topk)."""
    own = padded_permutation

    def keep(weights: torch.Tensor, *rest: Any) -> Any:
        return own(change(weights), *rest)

    return lambda engine: mock.patch.object(token_dispatcher, "padded_permutation", keep)


def other_capacity(change: int) -> Fault:
    """Let experts of the graph keep ``change`` more tokens."""
    own = padded_permutation

    def keep(weights: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor, capacity: int) -> Any:
        return own(weights, experts, counts, capacity + change)

    return lambda engine: mock.patch.object(token_dispatcher, "padded_permutation", keep)


def round_otherwise(weights: torch.Tensor) -> torch.Tensor:
    return weights * (1 + 6e-7 * torch.rand(weights.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("ep", [1, 2])
def test_tokens_that_exceed_the_capacity_are_repeated(ep: int) -> None:
    """All tokens are equal, so rounding decides which ones exceed the capacity. If weights differ, the router is at fault."""
    spec = replace(spec_of(FULL), model=replace(MODEL, moe_expert_capacity_factor=1.0, moe_aux_loss_coeff=0.01))
    layout = Parallelism(ep=ep, dp=ep, dispatcher="alltoall")
    for clean, rounded, lightest, lost in workers(ep).run(check_capacity, replace(spec, parallelism=layout)):
        assert clean == (0, 0, True, [])
        assert rounded[1] > 3 and rounded[2:] == (True, [])
        assert {name[:6] for name in lightest[3]} == {"router"}
        assert lost[2] and "gradient norm" in lost[3]


def check_capacity(spec: RunSpec) -> list[tuple[int, int, bool, list[str]]]:
    """Return what checks find of a clean graph, other rounding, experts that keep the lightest tokens, and a lost sample:
    unequal results, tokens elsewhere, whether it is calibrated, and faults."""
    engine, batch = train_to_first_check(spec, dist.get_rank())
    found = [
        check((engine, batch), lambda engine: nullcontext()),
        check((engine, torch.zeros_like(batch)), keeping(round_otherwise)),
        check((engine, batch), keeping(lambda weights: 1 - weights)),
        check((engine, batch), weigh_sample(0.0)),
    ]
    return [(one.unequal, sum(row.tokens for row in one.routing), one.calibrated, faults_of(one)) for one in found]


@pytest.mark.parametrize("change", [1, -1])
def test_another_capacity_is_found_however_little_the_tokens_weigh(change: int) -> None:
    """With large weights in bf16, gradients and the leads of tokens stay within the noise."""
    model = replace(
        GPT_OSS, num_layers=2, hidden_size=32, vocab_size=64, num_moe_experts=8, moe_expert_capacity_factor=1.0
    )
    captured = train_to_first_check(replace(spec_of(FULL, "bf16"), model=model))
    faults = faults_of(check(captured, other_capacity(change)))
    assert any(name.startswith("router of layer 0") for name in faults)


@pytest.mark.parametrize("layers", [1, 2])
def test_rounding_of_the_first_router_is_no_fault(layers: int) -> None:
    """The perturbed output of a layer does not reach its own router, the only one of the first rank."""
    model = replace(MODEL, num_layers=layers, num_moe_experts=16, moe_router_topk=4)
    spec = make_spec(model, steps=3, global_batch_size=4, sequence_length=128, precision="bf16", learning_rate=1e-3)
    spec = replace(spec, parallelism=Parallelism(pp=layers), cuda_graph=FULL, step_checks=1)
    for spec in (replace(spec, training=replace(spec.training, seed=seed)) for seed in (1, 2)):
        for moved, faults in workers(layers).run(check_rounding, spec):
            assert moved > 3 and faults == []


def check_rounding(spec: RunSpec) -> tuple[int, list[str]]:
    """Return how many tokens move by rounding, and faults of routers, if the first layer does not count as amplifying it."""
    with mock.patch.multiple(uncaptured_passes, LEAST_GROWTH=math.inf, LEAST_GROWTH_ALONE=math.inf):
        found = check(train_to_first_check(spec, dist.get_rank()), sum_in_halves)
    return sum(row.tokens for row in found.routing), [row.name for row in found.routing if row.is_fault]


def test_rounding_of_weights_hides_no_wrong_expert() -> None:
    """Scores of all experts are small, and weights are not, because they are divided by the sum of a token's scores."""
    model = replace(
        MODEL, moe_router_score_function="sigmoid", moe_router_normalize_topk=True, moe_expert_capacity_factor=2.0,
        add_bias_linear=True,
    )  # fmt: skip
    captured = train_to_first_check(replace(spec_of(FULL, "bf16"), model=model))
    for router in captured[0].chunks[0].routers():
        assert router.bias is not None
        router.bias.data.fill_(-8)
    swap = other_weight("layers.1.mlp.router.weight", lambda weight: weight.copy_(weight.flip(0)))
    found = check(captured, swap)
    assert any(row.is_fault and row.name.startswith("router of layer 1") for row in found.routing)


def test_the_lead_of_dropped_tokens() -> None:
    """Two experts keep two of three tokens each. The weight of the first token underflows in the second expert."""
    weights = torch.tensor([[0.9, 0.0], [0.5, 0.1], [0.45, 0.7]])

    def gap(*experts: list[int]) -> float:
        choice = RepeatedChoice.of(torch.tensor(experts))
        choice.score_dropping(weights, 2)
        assert choice.of_tokens is not None
        return round(float(choice.of_tokens.gap), 6)

    assert gap([0, ~1], [0, 1], [~0, 1]) == 0.0
    assert gap([0, ~1], [~0, 1], [0, 1]) == 0.05
    assert gap([~0, ~1], [0, 1], [0, 1]) == 0.45
    assert gap([0, 1], [0, 1], [~0, ~1]) == 0.7
    assert gap([0, ~1], [0, 1], [~0, ~1]) == math.inf
    assert gap([0, ~1], [0, 1], [0, 1]) == math.inf


def test_a_free_place_may_drop_a_token_without_weight() -> None:
    choice = RepeatedChoice.of(torch.tensor([[0, ~1], [~0, 1], [0, ~1]]))
    choice.score_dropping(torch.tensor([[0.9, 0.0], [0.4, 0.6], [0.9, 0.0]]), 2)
    assert choice.of_tokens is not None and float(choice.of_tokens.gap) == 0.0


def test_a_perturbation_moves_no_token() -> None:
    """Two experts have nearly equal scores. A moved token would change an expert's gradient by a large part of it."""
    captured = train_to_first_check(spec_of(FULL))
    weight = captured[0].chunks[0].routers()[1].weight.data
    weight[1] = weight[0] * (1 + 2**-21 * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1)))
    assert faults_of(found := check(captured, weigh_sample(0.7))) and found.noise < 1e-3


def test_choices_that_are_not_repeated_leave_a_check_uncalibrated() -> None:
    spec = spec_of(FULL)
    hidden = replace(spec, model=replace(EXPERTS, num_layers=2))
    found = check(train_to_first_check(hidden), sum_in_halves)
    assert found.unequal and not found.calibrated and faults_of(found) == []


def sum_in_any_order() -> AbstractContextManager[Any]:
    """Sum in another order in each call, as atomic additions do."""
    linear, draws = torch.nn.functional.linear, random.Random(1)

    def in_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        cut = draws.randrange(1, weight.shape[1])
        y = linear(x[..., :cut], weight[:, :cut]) + linear(x[..., cut:], weight[:, cut:])
        return y if bias is None else y + bias

    return mock.patch.object(torch.nn.functional, "linear", in_parts)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_code_that_does_not_repeat_itself_gives_the_scale_where_nothing_can_be_perturbed(precision: str) -> None:
    spec = spec_of(FULL, precision)
    captured = train_to_first_check(replace(spec, model=replace(EXPERTS, num_layers=2)))
    with sum_in_any_order():
        clean = check(captured, lambda engine: nullcontext())
        lost = check(captured, weigh_sample(0.0))
    assert clean.unequal > 20 and clean.calibrated and faults_of(clean) == [] and 6 * clean.noise < 1
    assert not lost.calibrated and faults_of(lost) == []


@contextmanager
def negative_zeros(engine: TorchNativeEngine) -> Iterator[None]:
    """Give the zeros of gradients another sign, as another kernel may for tokens that a batch does not contain."""
    yield
    for _, shard, place in engine._train_step.main.owned():
        gradient = shard.gradients[place]
        gradient[gradient == 0] = -0.0


def test_signs_of_zeros_are_no_difference_where_nothing_can_be_perturbed() -> None:
    captured = train_to_first_check(replace(spec_of(FULL), model=replace(EXPERTS, num_layers=2, vocab_size=512)))
    found = check(captured, negative_zeros)
    assert (found.unequal > 0, found.calibrated, faults_of(found)) == (True, True, [])


@contextmanager
def other_tokens_dropped(engine: TorchNativeEngine) -> Iterator[None]:
    """Let layer 0 drop other tokens, as rounding of a hidden choice may."""

    def drop(experts: Any, inputs: Any, outputs: Any) -> Any:
        change = outputs[0].clone()
        change.view(-1, change.shape[-1])[4:8] = 0
        return change, *outputs[1:]

    handle = engine.chunks[0].named_layers()["0"].mlp.register_forward_hook(drop)
    yield
    handle.remove()


def test_a_hidden_choice_is_no_fault_of_later_routers() -> None:
    """The balancing loss counts the choices without a bias, which the check cannot repeat."""
    biased = replace(
        MODEL, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_aux_loss_coeff=0.01
    )
    found = check(train_to_first_check(replace(spec_of(FULL), model=biased)), other_tokens_dropped)
    assert found.routing and not found.calibrated and faults_of(found) == []


class _NoisyGradient(torch.autograd.Function):
    """The identity. Each backward pass rounds otherwise, as that of attention does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * (1 + 2**-8 * torch.tensor(_DRAWS.gauss(0, 1)))


_DRAWS = random.Random(1)


def test_what_repeats_itself_is_not_judged_by_what_does_not() -> None:
    """Only backward passes add atomically. So the noise of the gradient norm is not that of losses."""
    captured = train_to_first_check(replace(spec_of(FULL), model=replace(EXPERTS, num_layers=2)))
    layer = captured[0].chunks[0].named_layers()["1"]

    def add_noise(module: Any, inputs: Any, outputs: Any) -> Any:
        return cast(Any, _NoisyGradient).apply(outputs[0]), *outputs[1:]

    layer.register_forward_hook(add_noise)

    @contextmanager
    def wrong_loss(engine: TorchNativeEngine) -> Iterator[None]:
        yield
        engine._train_step.microbatches.losses[3].mul_(1 + 2**-10)

    clean = check(captured, lambda engine: nullcontext())
    assert clean.unequal > 10 and clean.calibrated and faults_of(clean) == []
    assert not check(captured, wrong_loss).calibrated


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


@contextmanager
def out_of_memory(place: tuple[type, str], passes: int, step: type = TorchNativeStep) -> Iterator[None]:
    """Let memory run out in one uncaptured pass, the one after ``passes``, in the fourth call of a method."""
    recompute, method = step.recompute, getattr(*place)  # type: ignore[attr-defined]
    left = iter(range(passes, -1, -1))

    def fail(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 3:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of"
            )
        return method(*arguments, **named)

    def recompute_once(self: Any, *arguments: Any) -> None:
        with mock.patch.object(*place, fail) if next(left, 1) == 0 else nullcontext():
            recompute(self, *arguments)

    calls = iter(range(1 << 30))
    with mock.patch.object(step, "recompute", recompute_once):
        yield


@pytest.mark.parametrize(("ranks", "needed"), [(1, 40), (2, 55)])
def test_several_ranks_count_what_the_allocator_lost_between_blocks(ranks: int, needed: int) -> None:
    with (
        mock.patch("torch.cuda.memory_allocated", lambda _: 60),
        mock.patch("torch.cuda.max_memory_allocated", lambda _: 100),
        mock.patch("torch.cuda.max_memory_reserved", lambda _: 115),
    ):
        assert check_memory.eager_step_bytes(torch.device("cuda", 0), ranks) == needed
    assert check_memory.eager_step_bytes(CPU, ranks) == 0


def test_memory_that_is_missing_is_measured() -> None:
    failed = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    needed = COMPARISON_BYTES + 2**30
    with (
        mock.patch.object(torch, "empty", side_effect=failed),
        mock.patch.object(torch.cuda, "mem_get_info", lambda device: (needed - 7, 2**40)),
    ):
        assert check_memory.missing_bytes(2**30, torch.device("cuda", 0)) == 7
    assert check_memory.missing_bytes(2**30, CPU) == 0
    assert requested_bytes(str(failed)) == 20 * 2**20


@pytest.mark.parametrize("captured", ["lean"], indirect=True)
def test_host_memory_that_is_missing_is_measured(
    captured: tuple[TorchNativeEngine, torch.Tensor], tmp_path: Path
) -> None:
    """The measurement respects the limits of control groups, and counts all ranks of a host."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "memory.max").write_text("max\n")
    with mock.patch.object(check_memory, "_memory_groups", lambda: [tmp_path, tmp_path / "open", tmp_path / "none"]):
        assert check_memory.missing_host_bytes(400_000, 1) == 0 < check_memory.missing_host_bytes(400_001, 1)
        assert check_memory.missing_host_bytes(300_000, 2) == 100_000
        (tmp_path / "memory.current").write_text("900000\n")  # A lean optimizer's state fits into 400,000 bytes.
        found = check(captured, lambda engine: nullcontext())
    needed = check_memory.pinned_bytes(captured[0].checkable_step().state())
    assert (found.missing_on, found.tensors, found.missing) == ("host", 0, needed - 200_000)


@pytest.mark.parametrize("captured", ["lean"], indirect=True)
def test_memory_that_runs_out_in_a_pass_of_several_ranks_ends_the_run_with_the_reason(
    captured: tuple[TorchNativeEngine, torch.Tensor],
) -> None:
    with (
        mock.patch.multiple(dist, is_initialized=lambda: True, get_world_size=lambda: 2),
        mock.patch.object(step_check, "largest_on_ranks", lambda value, device: value),
        mock.patch.object(uncaptured_passes, "largest_on_ranks", lambda value, device: value),
        out_of_memory(PLACES["forward"], 0),
        pytest.raises(
            torch.OutOfMemoryError, match=r"^in the check of step 2, where other ranks wait: CUDA out of memory"
        ),
    ):
        check(captured, lambda engine: nullcontext())


PLACES = {"forward": (Layer, "forward_attention"), "backward": (GradientReduction, "ready")}


@pytest.mark.parametrize("captured", ["fp32"], indirect=True)
@pytest.mark.parametrize(
    ("passes", "place"),
    [
        pytest.param(passes, place, marks=[EXHAUSTIVE] if (passes % 2 == 0) == (place == "forward") else [])
        for passes in range(4)
        for place in PLACES
    ],
)
def test_a_check_without_memory_leaves_nothing_behind(
    captured: tuple[TorchNativeEngine, torch.Tensor], passes: int, place: str
) -> None:
    """Memory runs out in the first pass, in the pass with the replay's routing, or in those that measure the noise."""
    engine, batch = captured
    moved = other_weight("layers.1.mlp.router.weight", lambda weight: weight[2].neg_())

    def replayed() -> list[torch.Tensor]:
        step = engine.checkable_step()
        with Snapshot(step.state(), step.generators(), on_host=False).restored():
            step.replay(batch)
            return [result.clone() for _, result in (*step.results(), *step.updated())]

    before = replayed()
    with out_of_memory(PLACES[place], passes):
        found = check(captured, moved)
    assert (found.missing, found.tensors) == (3 * 2**29, 0)
    assert not engine._train_step.keep_routing
    assert all(torch.equal(*pair) for pair in zip(before, replayed(), strict=True))
    assert check(captured, moved).calibrated


def run_with_checks(spec: RunSpec, lacking: str = "") -> dict[str, Any]:
    """Return the results of a rank's run, with or without checks, and the findings of the checks. The first check lacks
    memory at ``lacking``."""
    if lacking == "rank 1":
        missing = [2**30] if dist.get_rank() == 1 else []
        with mock.patch.object(step_check, "missing_bytes", lambda *_: missing.pop() if missing else 0):
            return run_with_checks(spec)
    if lacking:
        with out_of_memory(PLACES[lacking], 0):
            return run_with_checks(spec)
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: list[StepCheck] = []
    results = []
    layers = set()
    with graphs_on_cpu():
        engine = engine_of(spec, rank)
        for step, batch in enumerate(batches(spec, spec.parallelism.rank_in("dp", rank))):
            if step in spec.checked_steps:
                found.append(check_step(engine.checkable_step(), step, batch))
                layers = {layer.name for layer in engine.checkable_step().layers()}
            result = engine.step(batch)
            results.append((result.loss.item(), result.grad_norm.item()))
        stats = engine.graph_stats()
        engine.close()
    weights = torch.cat([one.flatten().double() for one in kept_by(engine)])
    checks = [(one.step, one.tensors > 20, one.unequal, len(one.routing)) for one in found if not one.missing]
    return {"results": results, "weights": weights, "checks": checks, "proven": stats.proven, "layers": layers}


def layer_results(spec: RunSpec) -> set[str]:
    """Return the names of the outputs of layers in all micro-batches, and of their gradients."""
    numbers = range(spec.model.num_layers)
    layers = ["the embedding", *(f"decoder layer {number}" for number in numbers), "the final norm"]
    outputs = [f"output of {layer}, micro-batch {m}" for layer in layers for m in range(spec.num_microbatches)]
    return {*outputs, *(f"gradient of the {output}" for output in outputs)}


PIPELINE, ZERO = Parallelism(pp=2), Parallelism(dp=2, ep=2, distributed_optimizer=True)


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


@pytest.mark.parametrize(
    ("impl", "scope", "optimizer", "layout"),
    [
        ("full_iteration", (), True, ZERO),
        ("full_iteration", (), False, PIPELINE),
        ("torch", ("attn", "moe_router"), False, PIPELINE),
        ("transformer_engine", (), False, Parallelism()),
        ("transformer_engine", ("attn", "moe"), False, ZERO),
    ],
)
def test_checks_find_nothing_and_change_nothing(
    impl: GraphImpl, scope: tuple[str, ...], optimizer: bool, layout: Parallelism
) -> None:
    spec = make_spec(replace(EXPERTS, num_layers=4), steps=4, global_batch_size=4)
    spec = replace(spec, parallelism=layout, cuda_graph=CudaGraph(impl, scope, 1, optimizer=optimizer))
    ranks = workers(layout.world_size)
    plain, checked = (
        ranks.run(run_with_checks, replace(spec, step_checks=count, layer_check_steps=2 * count)) for count in (0, 2)
    )
    parts = [with_checks["layers"] for with_checks in checked]
    assert set().union(*parts) == layer_results(spec)
    assert layout.pp == 1 or parts[0].isdisjoint(parts[1])
    for without, with_checks in zip(plain, checked, strict=True):
        assert with_checks["checks"] == [(2, True, 0, 0), (3, True, 0, 0)]
        assert with_checks["results"] == without["results"] and with_checks["proven"]
        assert torch.equal(with_checks["weights"], without["weights"])


@pytest.mark.parametrize("model", [MOE, GPT_OSS], ids=["moe", "gpt-oss"])
def test_whole_steps_on_packed_sequences_are_those_of_eager_code_and_pass_their_checks(model: Model) -> None:
    """Every step has other borders of documents."""
    packed = Data(kind="synthetic", eod_token=3, packed_sequences=True)
    eager = replace(make_spec(model, steps=4, sequence_length=32), data=packed)
    unpacked = replace(eager, data=replace(packed, packed_sequences=False))
    found = run_with_checks(replace(eager, cuda_graph=replace(FULL, optimizer=True), step_checks=2))
    assert found["checks"] == [(2, True, 0, 0), (3, True, 0, 0)] and found["proven"]
    assert found["results"] == run_with_checks(eager)["results"] != run_with_checks(unpacked)["results"]


def run_in_shares(spec: RunSpec) -> dict[str, Any]:
    with small_pieces(), mock.patch.object(torch_native.step_check, "COMPARED_BYTES", 1):
        return run_with_checks(spec)


def test_ranks_that_share_the_optimizer_compare_it_in_shares_and_change_nothing() -> None:
    """A replay gathers the weights that other ranks update, so they are restored too."""
    spec = make_spec(replace(EXPERTS, num_layers=4), steps=4, global_batch_size=4, precision="bf16")
    spec = replace(spec, parallelism=ZERO, cuda_graph=replace(FULL, optimizer=True))
    plain, checked = (workers(2).run(run_in_shares, replace(spec, step_checks=count)) for count in (0, 2))
    for without, with_checks in zip(plain, checked, strict=True):
        assert with_checks["checks"] == [(2, True, 0, 0), (3, True, 0, 0)]
        assert with_checks["results"] == without["results"]
        assert torch.equal(with_checks["weights"], without["weights"])


@pytest.mark.parametrize(
    ("impl", "scope", "layout", "lacking"),
    [
        ("full_iteration", (), ZERO, "rank 1"),
        ("torch", ("attn", "moe_router"), PIPELINE, "rank 1"),
        ("torch", (), Parallelism(), "backward"),
        ("transformer_engine", ("attn",), Parallelism(), "forward"),
    ],
)
def test_a_run_goes_on_without_a_check_that_lacks_memory(
    impl: GraphImpl, scope: tuple[str, ...], layout: Parallelism, lacking: str
) -> None:
    """If one rank lacks memory, all ranks skip the check. The run's numbers are those of a run without checks."""
    spec = make_spec(replace(EXPERTS, num_layers=4), steps=4, global_batch_size=4)
    spec = replace(spec, parallelism=layout, cuda_graph=CudaGraph(impl, scope, 1))
    ranks = workers(layout.world_size)
    plain, checked = ranks.run(run_with_checks, spec), ranks.run(run_with_checks, replace(spec, step_checks=2), lacking)
    for without, with_checks in zip(plain, checked, strict=True):
        assert with_checks["checks"] == [(3, True, 0, 0)], "the second check had its memory"
        assert with_checks["results"] == without["results"] and with_checks["proven"]
        assert torch.equal(with_checks["weights"], without["weights"])
