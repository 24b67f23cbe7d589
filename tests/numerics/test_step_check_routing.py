"""Test step checks of routers: choices that are close, capacities, and code that does not repeat itself."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch.contract.spec import Parallelism, RunSpec
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.moe import token_dispatcher
from launch.engines.torch_native.moe.permutation import padded_permutation
from launch.engines.torch_native.moe.router import RepeatedChoice
from launch.train.inspection import uncaptured_passes
from tests.distributed import workers
from tests.numerics.checked_step import (
    FEW,
    FULL,
    MODEL,
    Fault,
    check,
    faults_of,
    other_weight,
    spec_of,
    sum_in_halves,
    train_to_first_check,
    weigh_sample,
)
from tests.numerics.test_graphed_layers import EXPERTS
from tests.numerics.tiny import GPT_OSS, make_spec


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
