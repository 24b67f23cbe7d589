"""Test whole steps of the engine: accumulation, data parallelism, precision and rejected specs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from launch.contract.errors import UnsupportedError
from launch.contract.spec import CudaGraph, Model, RunSpec
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine, build
from tests.distributed import workers
from tests.numerics.tiny import CPU, DENSE, MOE, make_spec, train, train_rank

ALONE = RankPlace(0, 1, CPU)
TOKENS = torch.randint(MOE.vocab_size, (4, 1, 9), generator=torch.Generator().manual_seed(5))


def test_micro_batches_add_up_to_one_big_batch() -> None:
    split, whole = make_spec(micro_batch_size=1), make_spec(micro_batch_size=4)
    engines = [TorchNativeEngine(spec, ALONE, torch.float64) for spec in (split, whole)]
    found, expected = (train(engine, spec) for engine, spec in zip(engines, (split, whole), strict=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(one.grad_norm, other.grad_norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        engines[0].chunks[0].state_dict(), engines[1].chunks[0].state_dict(), rtol=1e-9, atol=1e-10
    )


def test_two_ranks_train_as_one() -> None:
    first, second = workers(2).run(train_rank, make_spec(dp=2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    alone = train_rank(make_spec(dp=1))
    for what in ("loss", "grad_norm"):
        torch.testing.assert_close(first[what], alone[what], rtol=1e-6, atol=0)
    torch.testing.assert_close(first["weights"], alone["weights"], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_repeats_bit_by_bit_and_learns(precision: str) -> None:
    spec = make_spec(precision=precision, steps=20, learning_rate=3e-2, deterministic=True)
    # Repeat one batch, because a model can learn random tokens only by heart.
    first, second = (repeat(spec, TOKENS) for _ in range(2))
    assert first == second
    assert first[-1] < first[0] / 2


def repeat(spec: RunSpec, tokens: torch.Tensor) -> list[float]:
    engine = build(spec, ALONE)
    return [engine.step(tokens).loss.item() for _ in range(spec.training.steps)]


def test_reported_loss_leaves_the_router_out_but_gradients_do_not() -> None:
    plain = build(make_spec(), ALONE).step(TOKENS)
    weighted = build(make_spec(replace(MOE, moe_aux_loss_coeff=1.0, moe_z_loss_coeff=1.0)), ALONE).step(TOKENS)
    assert plain.loss == weighted.loss
    assert plain.grad_norm != weighted.grad_norm


def test_results_are_the_callers_own() -> None:
    spec = make_spec()
    results = train(build(spec, ALONE), spec)
    assert len({result.loss.data_ptr() for result in results}) == len(results)
    assert len({result.grad_norm.item() for result in results}) == len(results)
    assert [result.kind for result in results] == ["warmup", "warmup", "warmup", "steady"]
    assert {(result.loss.dtype, result.loss.shape) for result in results} == {(torch.float32, torch.Size([]))}


@pytest.mark.parametrize(
    "training",
    [
        {"recompute": "selective"},
        {"recompute": "full"},
        {"compile": "elementwise"},
        {"gradient_precision": "bf16"},
        {"recompute": "full", "compile": "elementwise", "gradient_precision": "bf16"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_how_a_step_is_run_leaves_its_losses(training: dict[str, Any]) -> None:
    check_losses(MOE, training)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_kernels_of_bfloat16_leave_the_losses() -> None:
    """The kernels are Inductor's, for a dense layer. test_model.py compares those of a mixture of experts, in float64."""
    check_losses(replace(DENSE, num_layers=1, num_query_groups=4), {"compile": "elementwise"})


@cache
def plain_losses(model: Model) -> list[float]:
    return repeat(make_spec(model, precision="bf16", steps=8), TOKENS)


def check_losses(model: Model, training: dict[str, Any]) -> None:
    """Compare 8 steps in bfloat16 with and without the settings ``training``."""
    expected = plain_losses(model)
    found = repeat(make_spec(model, precision="bf16", steps=8, **training), TOKENS)
    assert found[0] == pytest.approx(expected[0], abs=5e-3)
    # bfloat16 rounds to about 4e-3. Lost or doubled gradients would change losses by a tenth or more by now.
    assert found == pytest.approx(expected, abs=3e-2)
    assert expected[0] - expected[-1] > 0.3


def test_expert_biases_follow_the_load_of_the_whole_batch() -> None:
    model = replace(MOE, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    model = replace(model, moe_router_bias_update_rate=0.1)
    alone = train_rank(make_spec(model))["weights"]
    biases = [name for name in alone if name.endswith("expert_bias")]
    assert len(biases) == 2
    for rank in workers(2).run(train_rank, make_spec(model, dp=2)):
        for name in biases:
            torch.testing.assert_close(rank["weights"][name], alone[name], rtol=0, atol=0)
            assert rank["weights"][name].abs().max() > 0.05


def test_deterministic_runs_ask_pytorch_for_it() -> None:
    build(make_spec(deterministic=True), ALONE)
    assert torch.are_deterministic_algorithms_enabled()


def test_refusal_names_every_field_at_fault() -> None:
    spec = make_spec(attention_backend="flex", graph=CudaGraph(impl="full_iteration"))
    with pytest.raises(
        UnsupportedError,
        match=r"training\.attention_backend=flex, resources\.device=cpu.*cuda_graph\.impl=full_iteration",
    ):
        build(spec, ALONE)
