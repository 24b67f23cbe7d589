"""On a GPU, test that step checks of megatron find nothing in right graphs, and name what the released libraries
compute wrongly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.contract.errors import CaptureError
from launch.contract.records.step_check import StepCheck
from launch.contract.spec import CudaGraph, RunSpec
from launch.engines.protocol import RankPlace
from launch.train.data_loader import batch, open_source
from launch.train.inspection.step_check import check_step
from tests.gpu.megatron_training import (  # noqa: F401 (a fixture)
    FP8,
    MODELS,
    ROUTED,
    WHOLE,
    YARN,
    fused,
    inputs_kept,
    named,
    no_groups_left,
    spec_of,
)
from tests.gpu.test_gpu_megatron_graphs import IN_8_BITS, in_8_bits
from tests.gpu.test_gpu_megatron_optimizer import HAS_OPTIMIZER_GRAPH, UPDATED
from tests.gpu.test_gpu_step_check import CHECKS, expect_clean, worst
from tests.megatron_release import RELEASE
from tests.numerics.checked_step import faults_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
LAYERS, LOCAL = CudaGraph("transformer_engine"), CudaGraph("local")
CASES: list[tuple[str, CudaGraph]] = [
    ("dense", LAYERS),
    ("dense", CudaGraph("transformer_engine", ("attn",))),
    ("moe", CudaGraph("transformer_engine", ROUTED)),
    ("moe", CudaGraph("transformer_engine", ("moe_router", "moe_preprocess"))),
    ("gpt-oss", CudaGraph("transformer_engine", ROUTED)),
    ("steered", CudaGraph("transformer_engine", ROUTED)),
    ("padded", LAYERS),
    ("dense", LOCAL),
    ("padded", LOCAL),
    ("padded gpt-oss", LOCAL),
    ("dense", WHOLE),
    ("padded", WHOLE),
    ("padded gpt-oss", WHOLE),
    ("padded yarn", WHOLE),
    *[(name, UPDATED) for name in ("dense", "padded") if RELEASE != "0.16"],
]


def checked(
    spec: RunSpec, count: int, precision: Any = "bf16", change: Callable[[Any], None] | None = None
) -> list[StepCheck]:
    """Train to the first check, ``change`` the engine, and check ``count`` steps in a row."""
    from launch.engines.megatron.engine import MegatronEngine

    training = replace(spec.training, steps=60, precision=precision, learning_rate=3e-3)
    spec = replace(spec, training=training, step_checks=CHECKS)
    device = torch.device("cuda", 0)
    engine = MegatronEngine(spec, RankPlace(0, 1, device))
    try:
        source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
        found = []
        for step in range(spec.first_compared + count):
            tokens = batch(source, spec, step, 0).to(device)
            if step >= spec.first_compared:
                if change is not None and step == spec.first_compared:
                    change(engine)
                found.append(check_step(engine.checkable_step(), step, tokens))
            engine.step(tokens)
        assert engine.graph_stats().proven, engine.graph_stats()
    finally:
        engine.close()
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1].label}")
def test_right_graphs_are_clean(
    case: tuple[str, CudaGraph], precision: str, record_property: Callable[[str, object], None]
) -> None:
    """``local`` has its known fault repaired here. Hidden choices of routers are not judged unless bits are equal."""
    name, graph = case
    if precision == "fp32" and graph.impl == "transformer_engine":
        pytest.skip("refused: see below")
    with inputs_kept() if graph.impl == "local" else nullcontext():
        found = checked(spec_of(MODELS[name], graph), CHECKS, precision)
    record_property("calibrated", sum(one.calibrated for one in found))
    if "padded" in name:
        found = [one for one in found if one.calibrated]
    if found:
        expect_clean(found, record_property)


DROPPED = replace(MODELS["dense"], attention_dropout=0.1, hidden_dropout=0.1)


@pytest.mark.parametrize(
    "graph", [LAYERS, CudaGraph("transformer_engine", ("attn",)), LOCAL, WHOLE], ids=lambda graph: graph.label
)
def test_replays_draw_what_uncaptured_code_draws(
    graph: CudaGraph, record_property: Callable[[str, object], None]
) -> None:
    """A check finds nothing. After the same steps, each generator is where it is after eager steps."""
    with inputs_kept():
        expect_clean(checked(spec_of(DROPPED, graph), 5), record_property)
        assert random_states(spec_of(DROPPED, graph)) == random_states(spec_of(DROPPED, CudaGraph()))


def random_states(spec: RunSpec) -> list[list[int]]:
    """Train. Return the states of the GPU's default generator and of those in the tracker."""
    from launch.engines.megatron.engine import MegatronEngine
    from launch.engines.megatron.random_tracker import generators_of_steps

    device = torch.device("cuda", 0)
    engine = MegatronEngine(spec, RankPlace(0, 1, device))
    try:
        source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
        for step in range(spec.training.steps):
            engine.step(batch(source, spec, step, 0).to(device))
        generators = [each for each in generators_of_steps(device) if each.device.type == "cuda"]
        assert len(generators) == 4, "model, data and expert parallelism have one each"
        return [each.get_state().tolist() for each in generators]
    finally:
        engine.close()


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("case", IN_8_BITS, ids=named)
def test_right_graphs_are_clean_in_8_bits(
    case: tuple[str, CudaGraph], fp8: Any, record_property: Callable[[str, object], None]
) -> None:
    name, graph = case
    with inputs_kept():
        found = checked(in_8_bits(name, graph, fp8), CHECKS)
    expect_clean([one for one in found if one.calibrated] if name == "padded" else found, record_property)


@pytest.mark.parametrize("graph", [LAYERS, WHOLE], ids=lambda graph: graph.impl)
def test_a_check_leaves_the_scales_of_fp8(graph: CudaGraph) -> None:
    """Uncaptured passes between the steps of a run do not change a single bit."""
    spec = in_8_bits("dense", graph, "delayed")
    spec = replace(spec, training=replace(spec.training, deterministic=True))
    plain, disturbed = (losses_of(spec, checks) for checks in (0, 2))
    assert plain == disturbed


def losses_of(spec: RunSpec, checks: int) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step. The ``checks`` steps after the capture are checked."""
    from launch.engines.megatron.engine import MegatronEngine

    device = torch.device("cuda", 0)
    engine = MegatronEngine(replace(spec, step_checks=checks), RankPlace(0, 1, device))
    try:
        source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
        found = []
        for step in range(spec.first_compared + 5):
            tokens = batch(source, spec, step, 0).to(device)
            if spec.graphed and 0 <= step - spec.first_compared < checks:
                check_step(engine.checkable_step(), step, tokens)
            result = engine.step(tokens)
            found.append((float(result.loss), float(result.grad_norm)))
        return found
    finally:
        engine.close()


@pytest.mark.parametrize("graph", [LAYERS, WHOLE], ids=lambda graph: graph.impl)
def test_a_stale_scale_is_found(graph: CudaGraph, record_property: Callable[[str, object], None]) -> None:
    """A scale moves to new memory after the capture, and the graph keeps the old one. With the new one, most numbers
    exceed the range of e4m3."""

    def move(engine: Any) -> None:
        (linear,) = (one for name, one in engine.chunks[0].named_modules() if name.endswith("layers.1.mlp.linear_fc2"))
        quantizer = linear.quantizers["scaling_fwd"][0]
        quantizer.scale = quantizer.scale * 2**8

    (found,) = checked(in_8_bits("dense", graph, "delayed"), 1, change=move)
    record_property("worst", worst([found]))
    assert any("layers.1.mlp.linear_fc2" in name for name in faults_of(found)), found


@HAS_OPTIMIZER_GRAPH
def test_a_stale_learning_rate_is_found(record_property: Callable[[str, object], None]) -> None:
    """After the capture the rate moves to other memory, so the graph keeps the rate of the step before."""

    def move(engine: Any) -> None:
        for group in engine._optimizer.param_groups:
            group["lr"] = group["lr"].clone()

    (found,) = checked(spec_of(MODELS["dense"], UPDATED), 1, change=move)
    record_property("worst", worst([found]))
    assert any(name.startswith("master weight of") for name in faults_of(found)), found


@pytest.mark.parametrize("graph", [LAYERS, WHOLE], ids=lambda graph: graph.impl)
def test_a_graph_that_reads_a_stale_copy_of_a_weight_is_found(
    graph: CudaGraph, record_property: Callable[[str, object], None]
) -> None:
    """The check also names the first layer that differs. ``local`` copies moved weights into its graphs, so it does not
    have this fault."""

    def move(engine: Any) -> None:
        (weight,) = (
            one
            for name, one in engine.chunks[0].named_parameters()
            if "layers.1" in name and "linear_qkv.weight" in name
        )
        weight.data = weight.data * 1.5

    (found,) = checked(spec_of(MODELS["dense"], graph), 1, change=move)
    (layers,) = checked(replace(spec_of(MODELS["dense"], graph), layer_check_steps=60), 1, change=move)
    record_property("worst", worst([found]))
    assert any("layers.1.self_attention" in name for name in faults_of(found)), found
    assert layers.first and layers.first[0].name == "output of decoder layer 1, micro-batch 0", layers


def test_local_graphs_are_named_for_the_first_norm(record_property: Callable[[str, object], None]) -> None:
    """0.16.1 has this known fault, and 0.19.2 does not."""
    found = checked(spec_of(MODELS["dense"], LOCAL), 3)
    record_property("worst", worst(found))
    if RELEASE == "0.19":
        assert not any(map(faults_of, found))
        return
    assert all("layers.0." in one.differences[0].name and "norm" in one.differences[0].name for one in found), found
    assert all(map(faults_of, found))


def test_attention_without_positions_is_named(record_property: Callable[[str, object], None]) -> None:
    found = checked(spec_of(YARN, CudaGraph("transformer_engine", ("attn",))), 2)
    record_property("worst", worst(found))
    assert all(any("self_attention" in name for name in faults_of(one)) for one in found), found


def test_rounded_inputs_are_found(record_property: Callable[[str, object], None]) -> None:
    """If this test fails, remove the row of launch.support that rejects fp32. 0.19.2 does not capture such layers."""
    spec = spec_of(MODELS["moe"], CudaGraph("transformer_engine", ("moe_router", "moe_preprocess")))
    if RELEASE == "0.19":
        with pytest.raises(CaptureError, match="Data types for parameters must match"):
            checked(spec, 1, "fp32")
        return
    found = checked(spec, 1, "fp32")
    record_property("worst", worst(found))
    assert all(map(faults_of, found)), found


def test_overwritten_gradients_are_named(record_property: Callable[[str, object], None]) -> None:
    found = checked(fused(spec_of(MODELS["dense"], CudaGraph("transformer_engine", ("attn", "mlp")))), 2)
    record_property("worst", worst(found))
    assert all(any("self_attention.linear_qkv" in name for name in faults_of(one)) for one in found), found
