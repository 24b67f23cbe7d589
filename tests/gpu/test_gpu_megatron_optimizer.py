"""On GPUs, test Megatron-Core's lean and capturable optimizers, and the graph of the latter."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from launch.contract.spec import CudaGraph, Model, Placement, RunSpec, Training
from launch.support import unsupported
from tests.gpu.megatron_training import (  # noqa: F401 (fixtures)
    EAGER,
    FP8,
    MODELS,
    ROUTED,
    STEPS,
    WHOLE,
    Trained,
    check,
    deterministic,
    deterministic_of,
    named,
    no_groups_left,
    results_of,
    spec_of,
    trained,
)
from tests.gpu.test_gpu_eager import GPT_OSS, MOE
from tests.megatron_release import RELEASE

# Megatron-Core and Transformer Engine cause these warnings.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

UPDATED = CudaGraph("full_iteration", optimizer=True)


def lean(spec: RunSpec) -> RunSpec:
    training = replace(spec.training, optimizer_precision="lean")
    return replace(spec, training=training, parallelism=replace(spec.parallelism, distributed_optimizer=True))


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [Model(qk_layernorm=True), MOE], ids=["dense", "moe"])
def test_a_lean_optimizer_trains_beside_that_of_fp32(
    model: Model, gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps 6 bytes per element, in groups that an update copies one by one."""
    from launch.engines.megatron import engine as module

    monkeypatch.setattr(module, "COPIED_ELEMENTS", 2**16)
    made, groups, split_groups = [], [], module.split_groups

    def split_and_keep(optimizer: Any, most: int) -> None:
        groups.append(len(optimizer.param_groups))
        split_groups(optimizer, most)
        made.append(optimizer)

    monkeypatch.setattr(module, "split_groups", split_and_keep)
    spec = spec_of(model, EAGER)
    spec = lean(replace(spec, training=replace(spec.training, gradient_precision=gradients)))
    assert unsupported(spec) == ()
    found = results_of(spec)
    states = [state for part in made[0].chained_optimizers for state in part.optimizer.state.values()]
    assert len(made[0].param_groups) > groups[0] and states
    for state in states:
        assert {name: one.dtype for name, one in state.items()} == {
            "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "master_param": torch.int16
        }  # fmt: skip
    plain = replace(spec, training=replace(spec.training, optimizer_precision="fp32"))
    for expected in (results_of(plain), results_of(replace(spec, engine="torch_native"))):
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=3e-2)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-1, atol=0)


@pytest.mark.parametrize("case", [("dense", WHOLE), ("moe", CudaGraph("transformer_engine", ROUTED))], ids=named)
def test_graphs_compute_what_eager_code_computes_beside_a_lean_optimizer(case: tuple[str, CudaGraph]) -> None:
    name, graph = case
    eager, again = (trained(lean(spec_of(MODELS[name], EAGER))) for _ in range(2))
    check(trained(lean(spec_of(MODELS[name], graph))), eager, again, graph)


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("model", [Model(qk_layernorm=True), MOE, GPT_OSS], ids=["dense", "moe", "gpt-oss"])
def test_fp8_is_near_bfloat16_and_something_else(model: Model, fp8: Any) -> None:
    training = Training(steps=8, global_batch_size=4, micro_batch_size=2, precision="bf16", fp8=fp8)
    spec = RunSpec(
        engine="megatron", megatron_core=RELEASE, model=model, training=training, placement=Placement(device="cuda")
    )
    assert unsupported(spec) == ()
    found, expected = results_of(spec), results_of(replace(spec, training=replace(training, fp8="none")))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-1)
    # In the first step, no scale is known yet.
    torch.testing.assert_close(found[1][1:], expected[1][1:], rtol=3e-1, atol=0)
    assert not torch.equal(found[0], expected[0])


HAS_OPTIMIZER_GRAPH = pytest.mark.skipif(RELEASE == "0.16", reason="it has no graph of the optimizer")
CLIP = 0.25


@cache
def trained_with_updates(name: str, graph: CudaGraph, capturable: bool = True, schedule: Any = "cosine") -> Trained:
    """Deterministic, with gradients that are clipped, and learning rates that change in each step of a cosine."""
    spec = deterministic_of(spec_of(MODELS[name], graph), fuses=False)
    training = replace(
        spec.training,
        capturable_optimizer=capturable,
        clip_grad=CLIP,
        learning_rate=3e-3,
        learning_rate_schedule=schedule,
    )
    spec = replace(spec, training=training)
    assert unsupported(spec) == ()
    return trained(spec)


@HAS_OPTIMIZER_GRAPH
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ["dense", "padded"])
def test_a_graph_of_the_optimizer_updates_what_eager_code_updates(name: str) -> None:
    """Losses and norms of every step are bitwise equal, and so are the clipped gradients."""
    eager, found = trained_with_updates(name, EAGER), trained_with_updates(name, UPDATED)
    assert found.kinds == ["warmup"] * 3 + ["capture"] + ["steady"] * (STEPS - 4)
    assert found.stats.proven and found.stats.effective_scope == ("forward_backward", "optimizer"), found.stats
    assert found.stats.graphs == found.stats.launches_per_step == found.launches == 2, (found.launches, found.stats)
    assert torch.equal(found.losses, eager.losses) and torch.equal(found.norms, eager.norms)
    for one, expected in zip(found.gradients, eager.gradients, strict=True):
        assert [key for key in expected if not torch.equal(one[key], expected[key])] == []
    assert found.pool_while_open > 0 and found.pool_when_closed == 0


@HAS_OPTIMIZER_GRAPH
@pytest.mark.usefixtures("deterministic")
def test_a_capturable_optimizer_trains_as_another_does() -> None:
    """The learning rate moves losses by more than rounding, and some steps are clipped."""
    found, plain = (trained_with_updates("dense", EAGER, capturable) for capturable in (True, False))
    constant = trained_with_updates("dense", EAGER, schedule="constant")
    assert (plain.norms > CLIP).any()
    torch.testing.assert_close(found.losses, plain.losses, rtol=0, atol=3e-2)
    torch.testing.assert_close(found.norms, plain.norms, rtol=1e-1, atol=0)
    assert not torch.equal(found.losses, constant.losses)


@HAS_OPTIMIZER_GRAPH
@pytest.mark.usefixtures("deterministic")
def test_no_step_with_a_captured_optimizer_waits_for_the_device() -> None:
    assert trained_with_updates("dense", UPDATED).host_ms is not None
