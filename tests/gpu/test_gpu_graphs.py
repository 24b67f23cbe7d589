"""On a GPU, test that every graph implementation computes the same as uncaptured code, and really replays its graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from launch.contract.errors import ReplayError
from launch.contract.records.probe import PROBED_STEPS
from launch.contract.spec import CudaGraph, Data, Model, Placement, RunSpec, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine, build
from launch.train.data_loader import batch, open_source
from launch.train.telemetry.profiler import probe
from orchestrator.rules import refusals
from tests.gpu.test_gpu_eager import GPT_OSS, MOE, PADDED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
]
STEPS = 8
DENSE = Model()
SHARED = replace(MOE, moe_shared_expert_ffn_hidden_size=64, moe_router_enable_expert_bias=True,
                 moe_router_score_function="sigmoid")  # fmt: skip
WHOLE: list[tuple[Model, CudaGraph]] = [
    (model, CudaGraph("full_iteration", optimizer=optimizer))
    for model in (DENSE, MOE, PADDED, GPT_OSS, SHARED)
    for optimizer in (False, True)
]
SCOPES = ((), ("attn",), ("moe",), ("moe_router",), ("attn", "moe_router", "moe_preprocess"))
LAYERS = [
    (model, CudaGraph(impl, scope))
    for impl in ("torch", "transformer_engine")
    for model in (MOE, SHARED, GPT_OSS)
    for scope in SCOPES
] + [(DENSE, CudaGraph(impl, scope)) for impl in ("torch", "transformer_engine") for scope in ((), ("attn", "mlp"))]


def spec_of(model: Model, graph: CudaGraph, **training: Any) -> RunSpec:
    settings = {"steps": STEPS, "global_batch_size": 6, "micro_batch_size": 2, "precision": "bf16",
                "sequence_length": 64, "deterministic": True}  # fmt: skip
    return RunSpec(
        model=model,
        training=Training(**settings | training),
        cuda_graph=graph,
        placement=Placement(device="cuda"),
        data=Data(kind="synthetic"),
    )


def trained(spec: RunSpec) -> tuple[TorchNativeEngine, list[tuple[float, float]], torch.Tensor]:
    """Return the engine after its steps, each step's loss and gradient norm, and the masters."""
    device = torch.device("cuda", 0)
    engine = build(spec, RankPlace(0, 1, device))
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    results = [engine.step(batch(source, spec, step, 0).to(device)) for step in range(spec.training.steps)]
    return engine, [(r.loss.item(), r.grad_norm.item()) for r in results], engine.flat_parameters.weights.clone()


def name(case: tuple[Model, CudaGraph]) -> str:
    models = {id(DENSE): "dense", id(MOE): "moe", id(PADDED): "padded", id(GPT_OSS): "gpt-oss", id(SHARED): "shared"}
    return f"{models[id(case[0])]}, {case[1].label}"


DROPPED = replace(MOE, attention_dropout=0.1, hidden_dropout=0.1)
OF_DROPPED = [graph for model, graph in (*WHOLE, *LAYERS) if model is MOE]


@pytest.mark.parametrize("graph", OF_DROPPED, ids=lambda graph: graph.label)
def test_replays_draw_what_uncaptured_code_draws(graph: CudaGraph) -> None:
    """Results are equal bit for bit: neither warm-up passes nor the capture advance the generator, and each replay
    draws new numbers."""
    _, expected, expected_weights = trained(spec_of(DROPPED, CudaGraph("none")))
    _, without, _ = trained(spec_of(MOE, CudaGraph("none")))
    engine, found, weights = trained(spec_of(DROPPED, graph))
    assert found == expected != without
    assert torch.equal(weights, expected_weights)
    assert engine.graph_stats().proven


@pytest.mark.parametrize("case", [*WHOLE, *LAYERS], ids=name)
def test_replays_compute_what_uncaptured_code_computes(case: tuple[Model, CudaGraph]) -> None:
    """Results are equal bit for bit, over three distinct micro-batches per step. Each step takes the expected number of
    launches."""
    model, graph = case
    _, expected, expected_weights = trained(spec_of(model, CudaGraph("none")))
    engine, found, weights = trained(spec_of(model, graph))
    assert found == expected
    assert torch.equal(weights, expected_weights)
    stats = engine.graph_stats()
    assert stats.proven, stats
    tokens = torch.zeros(3, 2, 65, dtype=torch.int64, device="cuda")
    seen = probe(engine.step, [tokens] * PROBED_STEPS).probe
    assert seen.graph_launches == stats.launches_per_step > 0, (seen, stats)
    assert 0 < seen.computing_ms == seen.busy_ms
    assert seen.host_ms, "the host waits for nothing in a step"
    engine.close()


@pytest.mark.parametrize("compile", ["none", "elementwise"])
@pytest.mark.parametrize("model", [DENSE, MOE, GPT_OSS], ids=["dense", "moe", "gpt-oss"])
def test_whole_steps_on_packed_sequences_have_the_masks_of_their_own_documents(model: Model, compile: str) -> None:
    """The documents are lines of Python's standard library, so every step has other borders. Results are equal bit for bit."""
    graph = CudaGraph("full_iteration", optimizer=True)
    settings = {"sequence_length": 256, "global_batch_size": 4, "learning_rate": 1e-3, "deterministic": False}
    documents = Data("text", eod_token=10, packed_sequences=True)
    spec = replace(spec_of(model, graph, compile=compile, **settings), data=documents)
    assert refusals(spec) == ()
    _, expected, _ = trained(replace(spec, cuda_graph=CudaGraph("none")))
    _, unpacked, _ = trained(
        replace(spec, cuda_graph=CudaGraph("none"), data=replace(documents, packed_sequences=False))
    )
    engine, found, _ = trained(spec)
    assert found == expected != unpacked
    assert engine.graph_stats().proven, engine.graph_stats()
    engine.close()


@pytest.mark.parametrize(
    ("graph", "training"),
    [
        (CudaGraph("full_iteration"), {"recompute": "full"}),
        (CudaGraph("full_iteration"), {"recompute": "selective"}),
        (CudaGraph("torch", ("attn",)), {"recompute": "selective"}),
        (CudaGraph("transformer_engine"), {"recompute": "selective"}),
        (CudaGraph("full_iteration"), {"attention_backend": "transformer_engine"}),
        (CudaGraph("torch", ("attn",)), {"attention_backend": "transformer_engine"}),
        (CudaGraph("transformer_engine", ("attn",)), {"attention_backend": "transformer_engine"}),
    ],
    ids=lambda value: value.label if isinstance(value, CudaGraph) else " ".join(map(str, value.values())),
)
@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_what_is_recomputed_or_attended_otherwise_is_so_in_a_graph(
    model: Model, graph: CudaGraph, training: dict[str, Any]
) -> None:
    """Results are equal bit for bit, as with the engine's own attention that keeps its results."""
    _, expected, expected_weights = trained(spec_of(model, CudaGraph("none"), **training))
    engine, found, weights = trained(spec_of(model, graph, **training))
    assert found == expected
    assert torch.equal(weights, expected_weights)
    assert engine.graph_stats().proven, engine.graph_stats()
    engine.close()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_compiled_in_graphs_computes_what_it_computes_without(model: Model, micro_batches: int) -> None:
    spec = spec_of(model, CudaGraph("torch_compile"), global_batch_size=2 * micro_batches)
    engine, found, _ = trained(spec)
    eager = trained(replace(spec, cuda_graph=CudaGraph("none")))[1]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in eager], abs=2e-2)
    tokens = torch.zeros(micro_batches, 2, 65, dtype=torch.int64, device="cuda")
    seen = probe(engine.step, [tokens] * PROBED_STEPS).probe
    stats = engine.graph_stats()
    assert stats.proven and seen.graph_launches == stats.launches_per_step > 0, (seen, stats)
    engine.close()


@pytest.mark.parametrize(
    "graph",
    [CudaGraph("torch_compile"), CudaGraph("full_iteration"), CudaGraph("full_iteration", optimizer=True)],
    ids=lambda graph: graph.label,
)
@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_graphs_of_a_compiled_model_compute_what_it_computes_without(
    model: Model, graph: CudaGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are equal bit for bit over 100 steps. The eager run is compiled in the same way, including accumulation."""
    monkeypatch.setattr("launch.engines.torch_native.optim.accumulation.LEAST_FUSED_ELEMENTS", 1)
    spec = spec_of(model, graph, steps=100, compile="whole")
    eager = replace(spec, cuda_graph=CudaGraph("none"))
    twin, expected, expected_weights = trained(eager)
    engine, found, weights = trained(spec)
    assert found == expected
    assert torch.equal(weights, expected_weights)
    assert torch.equal(engine.flat_parameters.gradients, twin.flat_parameters.gradients), "of the last step"
    assert twin.graph_stats().recompilations == 0
    (plain,) = trained(replace(eager, training=replace(eager.training, compile="none", steps=1)))[1]
    assert plain != expected[0], "the eager run is compiled from its first step on"
    assert plain[0] == pytest.approx(expected[0][0], abs=2e-2)
    tokens = torch.zeros(3, 2, 65, dtype=torch.int64, device="cuda")
    seen = probe(engine.step, [tokens] * PROBED_STEPS).probe
    stats = engine.graph_stats()
    assert stats.proven and seen.graph_launches == stats.launches_per_step > 0, (seen, stats)
    engine.close()


@pytest.mark.parametrize("impl", ["full_iteration", "torch"])
def test_another_shape_is_refused_with_both(impl: str) -> None:
    engine, _, _ = trained(spec_of(DENSE, CudaGraph(impl)))  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match=r"shape .*(63|64).* captured with .*(64|65)"):
        engine.step(torch.zeros(3, 2, 64, dtype=torch.int64, device="cuda"))
    engine.close()


def test_a_capture_changes_nothing() -> None:
    """The capture step and all steps before it equal uncaptured ones: no batch is consumed, and no state changes."""
    for graph in (CudaGraph("full_iteration", optimizer=True), CudaGraph("torch"), CudaGraph("transformer_engine")):
        spec = spec_of(SHARED, graph)
        state = torch.cuda.get_rng_state()
        _, found, _ = trained(spec)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert (
            found[: graph.warmup_steps + 1] == trained(spec_of(SHARED, CudaGraph("none")))[1][: graph.warmup_steps + 1]
        )
