"""On a GPU, test that step checks of torch_native find nothing in right graphs, and find a planted fault in their first
check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from launch.contract.records.step_check import StepCheck
from launch.contract.spec import CudaGraph, Model, RunSpec
from launch.engines import torch_native
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine, build
from launch.engines.torch_native.optim import adamw, fused_kernels
from launch.train.data_loader import batch, open_source
from launch.train.inspection import check_memory, step_check
from launch.train.inspection.step_check import check_step
from orchestrator.rules import violations
from tests.gpu.test_gpu_eager import GPT_OSS, MOE
from tests.gpu.test_gpu_graphs import SHARED, spec_of
from tests.numerics.checked_step import (
    faults_of,
    flipped_exponent_bit,
    other_weight,
    overwritten_microbatch,
    weigh_sample,
)
from tests.presets import preset

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
CHECKS = 15
DENSE = Model(num_layers=2, hidden_size=128, kv_channels=32, num_query_groups=2, qk_layernorm=True)
ROUTED = ("attn", "moe_router", "moe_preprocess")
FOR_FAULTS = {"bf16": MOE, "fp32": DENSE}
"""In fp32, a product of experts waits for the host, so no graph can capture it."""
MODELS = {"dense": DENSE, "moe": MOE, "gpt-oss": GPT_OSS, "shared": SHARED}
GRAPHS = {
    "whole": CudaGraph("full_iteration"),
    "whole, optimizer": CudaGraph("full_iteration", optimizer=True),
    "torch, layers": CudaGraph("torch"),
    "torch, parts": CudaGraph("torch", ROUTED),
    "te, layers": CudaGraph("transformer_engine"),
    "te, parts": CudaGraph("transformer_engine", ROUTED),
}
Trained = tuple[TorchNativeEngine, Callable[[int], torch.Tensor]]


def checked_spec(model: Model, graph: CudaGraph, **training: Any) -> RunSpec:
    """Return a spec that is not deterministic. It has steps of eight micro-batches, and a learning rate that visibly
    changes weights."""
    settings = {
        "steps": 60,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "deterministic": False,
        "learning_rate": 3e-3,
    }
    return replace(spec_of(model, graph, **settings | training), step_checks=CHECKS)


def train(spec: RunSpec, fault: Callable[[TorchNativeEngine], AbstractContextManager[Any]] | None = None) -> Trained:
    """Train to the first check. Only the capture has ``fault``."""
    device = torch.device("cuda", 0)
    engine = build(spec, RankPlace(0, 1, device))
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)

    def tokens(step: int) -> torch.Tensor:
        return batch(source, spec, step, 0).to(device)

    for step in range(spec.first_compared):
        if fault and step == engine.capture_step:
            with fault(engine):
                engine.step(tokens(step))
        else:
            engine.step(tokens(step))
    return engine, tokens


def check_steps(trained: Trained, count: int) -> list[StepCheck]:
    engine, tokens = trained
    found = []
    for step in range(engine._step, engine._step + count):
        found.append(check_step(engine.checkable_step(), step, tokens(step)))
        engine.step(tokens(step))
    assert engine.graph_stats().proven, engine.graph_stats()
    engine.close()
    return found


def worst(found: list[StepCheck]) -> float:
    """Return the largest difference in units of its noise."""
    tensors = (row.difference / row.noise for one in found for row in one.differences)
    return max((*tensors, *(row.gap / row.noise for one in found for row in one.routing if row.gap)), default=0.0)


def expect_clean(found: list[StepCheck], record_property: Callable[[str, object], None]) -> None:
    record_property("checks", len(found))
    record_property("unequal", sum(bool(one.unequal or one.routing) for one in found))
    record_property("worst", worst(found))
    record_property("seconds", sum(one.seconds for one in found) / max(len(found), 1))
    assert all(one.calibrated for one in found)
    assert [faults_of(one) for one in found] == [[]] * len(found), found


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("compile", ["none", "elementwise"])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("model", MODELS)
def test_right_graphs_are_clean(
    model: str, graph: str, compile: str, precision: str, record_property: Callable[[str, object], None]
) -> None:
    spec = checked_spec(MODELS[model], GRAPHS[graph], compile=compile, precision=precision)
    if reasons := violations(spec):
        pytest.skip(reasons[0].text)
    expect_clean(check_steps(train(spec), CHECKS), record_property)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("impl", ["torch_compile", "full_iteration"])
def test_models_that_are_compiled_whole_are_clean(
    impl: Any, model: str, precision: str, record_property: Callable[[str, object], None]
) -> None:
    """Nothing can perturb a part of compiled code. So its results have equal bits here, or they are not judged."""
    spec = checked_spec(MODELS[model], CudaGraph(impl), compile="whole", precision=precision)
    if reasons := violations(spec):
        pytest.skip(reasons[0].text)
    found = check_steps(train(spec), CHECKS)
    record_property("calibrated", sum(one.calibrated for one in found))
    record_property("equal", sum(one.unequal == 0 for one in found))
    expect_clean([one for one in found if one.calibrated], record_property)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("is_full", [False, True], ids=["state on the GPU", "state on the host"])
def test_a_check_changes_nothing(graph: str, is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, norms and weights of a deterministic run are equal bit for bit."""
    if is_full:
        monkeypatch.setattr(step_check, "missing_bytes", lambda needed, device: needed)
    spec = checked_spec(SHARED, GRAPHS[graph], deterministic=True)
    results = []
    for checks in (0, 3):
        engine, tokens = train(spec)
        found = []
        for step in range(engine._step, engine._step + 4):
            if step - engine._step < checks:
                check_step(engine.checkable_step(), step, tokens(step))
            result = engine.step(tokens(step))
            found.append((result.loss.item(), result.grad_norm.item()))
        results.append((found, engine.flat_parameters.weights.clone()))
        engine.close()
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(
    "training",
    [{}, {"compile": "elementwise"}, {"precision": "fp32"}, {"optimizer_precision": "lean"}],
    ids=["masters", "fused", "fp32", "lean"],
)
def test_checks_of_an_optimizer_in_shares(training: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are clean and change nothing. A wrong learning rate in a share is found by the check that compares this share."""
    for module in (adamw, fused_kernels):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", 100_000)
    monkeypatch.setattr(torch_native.step_check, "COMPARED_BYTES", 1)
    spec = checked_spec(DENSE, GRAPHS["whole, optimizer"], deterministic=True, **{"precision": "bf16"} | training)
    kept = []
    for checks in (0, 4):
        engine, tokens = train(replace(spec, step_checks=3))
        for step in engine._checked_steps[0], *range(engine._step + 1, engine._step + 4):
            if checks:
                found = check_step(engine.checkable_step(), step, tokens(step))
                assert (found.unequal, found.left_out > 8) == (0, True), found
            engine.step(tokens(step))
        state = (*engine.flat_parameters.stored_weights(), *engine._optimizer.state())
        kept.append([tensor.clone() for tensor in state])
        engine.close()
    assert all(torch.equal(*pair) for pair in zip(*kept, strict=True))
    (found,) = check_steps(train(replace(spec, step_checks=3), frozen_rate), 1)
    assert any(name.startswith("weight of 0.") for name in faults_of(found)), found


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_outputs_of_layers_are_clean_and_name_the_first_that_differs(
    graph: str, precision: str, record_property: Callable[[str, object], None]
) -> None:
    """Each replay writes them again. The weight moves to new memory after the capture, and the graph keeps the old one."""
    spec = replace(checked_spec(MOE, GRAPHS[graph], precision=precision), layer_check_steps=60)
    if reasons := violations(spec):
        pytest.skip(reasons[0].text)
    engine, tokens = train(spec)
    clean = check_step(engine.checkable_step(), engine._step, tokens(engine._step))
    expect_clean([clean], record_property)
    layers = MOE.num_layers + 2
    assert len(list(engine.checkable_step().layers())) == 2 * layers * spec.num_microbatches
    weight = dict(engine.chunks[0].named_parameters())["layers.1.attention.qkv.weight"]
    weight.data = weight.data * 1.5
    (found,) = check_steps((engine, tokens), 1)
    assert found.first and found.first[0].name == "output of decoder layer 1, micro-batch 0"


@pytest.mark.parametrize("optimizer", [False, True], ids=["gradients", "captured optimizer"])
def test_the_first_check_of_5_b_parameters_is_cheap(
    optimizer: bool, record_property: Callable[[str, object], None]
) -> None:
    """Time and memory include everything that the check needs. A captured optimizer's state of 70 GB is compared in shares."""
    graph = CudaGraph("full_iteration", optimizer=optimizer)
    large: Any = {"global_batch_size": 2, "sequence_length": 2048, "learning_rate": 3e-4, "compile": "elementwise"}
    spec = checked_spec(preset("qwen3_8l"), graph, **large)
    engine, tokens = train(spec)
    device = torch.device("cuda", 0)
    seconds = []
    for step in range(engine._step, engine._step + 3):
        given, free = tokens(step), check_memory._free_memory()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        begun, held = time.perf_counter(), torch.cuda.memory_allocated(device)
        found = check_step(engine.checkable_step(), step, given)
        seconds.append(time.perf_counter() - begun)
        record_property("GiB on the GPU", (torch.cuda.max_memory_allocated(device) - held) / 2**30)
        record_property("GiB on the host", (free - check_memory._free_memory()) / 2**30)
        record_property("result", (found.seconds, found.tensors, found.unequal, worst([found]), found.missing))
        engine.step(given)
    engine.close()
    record_property("seconds", seconds)
    assert faults_of(found) == []
    assert found.tensors and max(seconds) < 10, seconds
    assert (found.left_out > 0) is optimizer


@contextmanager
def frozen_rate(engine: TorchNativeEngine) -> Iterator[None]:
    """Let the graph read a copy of the learning rate that is 2% off."""
    with mock.patch.object(engine._optimizer, "_rate", engine._optimizer._rate * 1.02):
        yield


FAULTS: dict[str, tuple[Callable[[TorchNativeEngine], AbstractContextManager[Any]], str]] = {
    "a lost sample": (weigh_sample(0.0), "gradient of 0.head.weight"),
    "a sample weighted 0.7": (weigh_sample(0.7), "gradient of 0.head.weight"),
    "an overwritten micro-batch": (overwritten_microbatch, "loss of micro-batch 4"),
    "a stale weight": (
        other_weight("layers.1.attention_norm.weight", lambda weight: weight.mul_(1.5)),
        "gradient of 0.layers.1.attention.qkv.weight",
    ),
    "a flipped exponent bit": (flipped_exponent_bit, "gradient of 0.layers."),
    "a frozen scalar": (frozen_rate, "weight of 0.layers.1.mlp.down"),
    "an expert's tokens dropped": (
        other_weight("layers.1.mlp.down", lambda weight: weight[0].zero_()),
        "gradient of 0.layers.1.mlp.router.weight",
    ),
}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_capture_is_found_and_named(
    name: str, precision: str, record_property: Callable[[str, object], None]
) -> None:
    fault, tensor = FAULTS[name]
    if precision == "fp32" and "expert" in name:
        pytest.skip("the model for fp32 has no experts")
    spec = checked_spec(FOR_FAULTS[precision], CudaGraph("full_iteration", optimizer=True), precision=precision)
    (found,) = check_steps(train(spec, fault), 1)
    record_property("worst", worst([found]))
    assert found.calibrated and any(name.startswith(tensor) for name in faults_of(found)), found


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_batch_that_is_not_copied_is_found(precision: str, record_property: Callable[[str, object], None]) -> None:
    engine, tokens = train(checked_spec(FOR_FAULTS[precision], CudaGraph("full_iteration"), precision=precision))
    static: Any = engine._runner._static  # type: ignore[union-attr]
    engine._runner._static = (static[0].clone(), *static[1:])  # type: ignore[union-attr]
    (found,) = check_steps((engine, tokens), 1)
    record_property("worst", worst([found]))
    assert found.calibrated and "gradient of 0.head.weight" in faults_of(found)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_that_reads_a_stale_copy_of_a_weight_is_found(
    graph: str, precision: str, record_property: Callable[[str, object], None]
) -> None:
    """The weight moves to new memory after the capture. The graph and an optimizer in it keep the old one."""
    spec = checked_spec(FOR_FAULTS[precision], GRAPHS[graph], precision=precision)
    if violations(spec):
        pytest.skip("a dense model has no router")
    engine, tokens = train(spec)
    weight = dict(engine.chunks[0].named_parameters())["layers.1.attention.qkv.weight"]
    weight.data = weight.data * 1.5
    (found,) = check_steps((engine, tokens), 1)
    record_property("worst", worst([found]))
    assert found.calibrated and any("layers.1.attention" in name for name in faults_of(found))


@pytest.mark.parametrize("graph", ["whole", "torch, layers", "te, layers"])
@pytest.mark.parametrize("frozen", [False, True], ids=["registered", "frozen"])
def test_random_numbers_of_a_graph(graph: str, frozen: bool, record_property: Callable[[str, object], None]) -> None:
    """Dropout draws the same numbers as uncaptured code does from the same state. A mask that is drawn only at the
    capture is found."""
    masks: list[torch.Tensor] = []

    def drop(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        if frozen and torch.cuda.is_current_stream_capturing():
            masks.append(torch.ones_like(output) if not masks else masks[0])
            return output * masks[0]
        return torch.nn.functional.dropout(output, 0.1)

    spec = checked_spec(DENSE, GRAPHS[graph])
    device = torch.device("cuda", 0)
    engine = build(spec, RankPlace(0, 1, device))
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    handles = [layer.mlp.register_forward_hook(drop) for layer in engine.chunks[0].named_layers().values()]

    def tokens(step: int) -> torch.Tensor:
        return batch(source, spec, step, 0).to(device)

    for step in range(spec.first_compared):
        engine.step(tokens(step))
    found = check_steps((engine, tokens), 2)
    for handle in handles:
        handle.remove()
    record_property("worst", worst(found))
    assert any(faults_of(one) for one in found) is frozen, found
