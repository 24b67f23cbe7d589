"""On a GPU, test engine torch_native in 8 bits: it trains, every graph implementation computes the same, and step checks are
right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from launch.contract.spec import CudaGraph, Data, Model, Parallelism, Placement, RunSpec, Training
from launch.engines.fp8_scales import fp8_scales
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine, build
from launch.train.data_loader import batch, open_source
from launch.train.inspection.step_check import check_step
from orchestrator.rules import refusals
from tests.gpu.test_gpu_eager import GPT_OSS, MOE
from tests.gpu.test_gpu_graph_layouts import train_all
from tests.gpu.test_gpu_step_check import check_steps, checked_spec, expect_clean, train, worst
from tests.numerics.checked_step import faults_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
]
STEPS = 20
FP8 = ("delayed", "current")
CAPACITY = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
MODELS = {
    "dense": Model(hidden_size=128, kv_channels=32, num_query_groups=2, qk_layernorm=True),
    "moe": MOE,
    "padded": replace(MOE, **CAPACITY, moe_shared_expert_ffn_hidden_size=64),
    "gpt-oss": GPT_OSS,
    "padded gpt-oss": replace(GPT_OSS, **CAPACITY),
}
EAGER = CudaGraph("none")
ROUTED = ("attn", "moe_router", "moe_preprocess")
WHOLE = [CudaGraph("full_iteration"), CudaGraph("full_iteration", optimizer=True)]
LAYERS = [CudaGraph("torch"), CudaGraph("transformer_engine")]
CASES = [
    *(("dense", graph) for graph in (*WHOLE, *LAYERS)),
    *(("dense", CudaGraph(impl, scope)) for impl in ("torch", "transformer_engine") for scope in (("attn",), ("mlp",))),
    *(("padded", graph) for graph in (*WHOLE, *LAYERS)),
    *(("padded", CudaGraph(impl, ("moe",))) for impl in ("torch", "transformer_engine")),
    *((name, CudaGraph(impl, ROUTED)) for name in ("moe", "gpt-oss") for impl in ("torch", "transformer_engine")),
    *(("padded gpt-oss", graph) for graph in (WHOLE[0], *LAYERS)),
]  # fmt: skip
Trained = tuple[list[tuple[float, float]], torch.Tensor, list[torch.Tensor]]


def spec_of(name: str, graph: CudaGraph, fp8: Any, **training: Any) -> RunSpec:
    """Return a deterministic spec with steps of two micro-batches."""
    settings = {"steps": STEPS, "global_batch_size": 4, "micro_batch_size": 2, "precision": "bf16",
                "sequence_length": 64, "deterministic": True, "learning_rate": 1e-3}  # fmt: skip
    spec = RunSpec(
        model=MODELS[name], training=Training(**settings | {"fp8": fp8} | training), cuda_graph=graph,
        placement=Placement(device="cuda"), data=Data(kind="text"),
    )  # fmt: skip
    assert refusals(spec) == ()
    return spec


def scales_of(engine: TorchNativeEngine) -> list[torch.Tensor]:
    return fp8_scales(module for chunk in engine.chunks for module in chunk.modules())


def trained(spec: RunSpec) -> Trained:
    """Return each step's loss and gradient norm, the masters, and the scales."""
    device = torch.device("cuda", 0)
    engine = build(spec, RankPlace(0, 1, device))
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    results = [engine.step(batch(source, spec, step, 0).to(device)) for step in range(spec.training.steps)]
    assert engine.graph_stats().proven or not spec.graphed, engine.graph_stats()
    steps = [(result.loss.item(), result.grad_norm.item()) for result in results]
    weights, scales = engine.flat_parameters.weights.clone(), [scale.clone() for scale in scales_of(engine)]
    engine.close()
    return steps, weights, scales


@cache
def eager(name: str, fp8: str, caching: bool) -> Trained:
    return trained(spec_of(name, EAGER, fp8, fp8_weight_caching=caching))


def named(case: tuple[str, CudaGraph]) -> str:
    return f"{case[0]}, {case[1].label}"


def expect_equal(found: Trained, expected: Trained) -> None:
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    assert len(found[2]) == len(expected[2]) and all(map(torch.equal, found[2], expected[2]))


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("name", MODELS)
def test_8_bits_train_near_bfloat16_and_not_the_same(name: str, fp8: str) -> None:
    steps, _, scales = eager(name, fp8, True)
    expected, _, _ = trained(spec_of(name, EAGER, "none"))
    losses, others = (torch.tensor([loss for loss, _ in one]) for one in (steps, expected))
    assert losses[-1] < losses[0] - 0.5, losses
    torch.testing.assert_close(losses, others, rtol=0, atol=0.2)
    assert not torch.equal(losses, others)
    moved = [scale for scale in scales[::2] if (scale != 1).any()]
    assert len(moved) == len(scales[::2]) and bool(scales) == (fp8 == "delayed")


@pytest.mark.parametrize("name", MODELS)
def test_casts_of_weights_in_every_microbatch(name: str) -> None:
    """With current scaling they have the same bits as those of the first microbatch. With delayed scaling their scales move."""
    expect_equal(eager(name, "current", False), eager(name, "current", True))
    assert eager(name, "delayed", False)[0] != eager(name, "delayed", True)[0]


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "cast again"])
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_replays_compute_what_uncaptured_code_computes(case: tuple[str, CudaGraph], fp8: str, caching: bool) -> None:
    """Results are equal bit for bit, and so are the scales."""
    name, graph = case
    expect_equal(trained(spec_of(name, graph, fp8, fp8_weight_caching=caching)), eager(name, fp8, caching))


@pytest.mark.parametrize("graph", [*WHOLE[:1], *LAYERS], ids=lambda graph: graph.label)
def test_with_the_attention_of_transformer_engine(graph: CudaGraph) -> None:
    specs = [spec_of("dense", one, "delayed", attention_backend="transformer_engine") for one in (EAGER, graph)]
    first, second = map(trained, specs)
    expect_equal(second, first)


@pytest.mark.parametrize("graph", [*WHOLE[:1], *LAYERS], ids=lambda graph: graph.label)
def test_with_recomputed_attention_and_compiled_kernels(graph: CudaGraph) -> None:
    settings = {"recompute": "selective", "compile": "elementwise"}
    first, second = (trained(spec_of("padded", one, "delayed", **settings)) for one in (EAGER, graph))
    expect_equal(second, first)


LAYOUTS = {
    "pp2, 1f1b": ("dense", Parallelism(pp=2), (WHOLE[0], *LAYERS)),
    "pp2, interleaved": ("padded", Parallelism(pp=2, vpp=2, schedule="interleaved"), (WHOLE[0], *LAYERS)),
    "tp2": ("padded", Parallelism(tp=2, ep=2, sequence_parallel=True), (WHOLE[0], *LAYERS)),
    "ep2": ("moe", Parallelism(ep=2, dp=2, distributed_optimizer=True), [CudaGraph("transformer_engine", ROUTED)]),
}


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize(("name", "parallelism", "graphs"), LAYOUTS.values(), ids=LAYOUTS)
def test_two_gpus_replay_what_they_compute(
    name: str, parallelism: Parallelism, graphs: list[CudaGraph], fp8: Any, tmp_path: Path
) -> None:
    found = torch.cuda.device_count()
    assert found >= 2, f"2 GPUs are needed, and this host has {found}: deselect with -k 'not two'"
    spec = replace(
        spec_of(name, EAGER, fp8, global_batch_size=16), model=replace(MODELS[name], num_layers=4),
        parallelism=parallelism, placement=Placement(device="cuda", ranks_per_node=2),
    )  # fmt: skip
    specs = [replace(spec, cuda_graph=graph) for graph in (EAGER, EAGER, *graphs)]
    assert [refusals(one) for one in specs] == [()] * len(specs)
    mp.spawn(train_all, args=(specs, tmp_path), nprocs=2)
    for rank in range(2):
        first, *others = torch.load(tmp_path / f"rank{rank}.pt")
        for graph, other in zip((EAGER, *graphs), others, strict=True):
            assert other["steps"] == first["steps"], graph.label
            assert torch.equal(other["weights"], first["weights"]), graph.label


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("graph", [*WHOLE, *LAYERS], ids=lambda graph: graph.label)
@pytest.mark.parametrize("name", ["dense", "padded"])
def test_right_graphs_are_clean(
    name: str, graph: CudaGraph, fp8: str, record_property: Callable[[str, object], None]
) -> None:
    found = check_steps(train(checked_spec(MODELS[name], graph, fp8=fp8)), 5)
    expect_clean([one for one in found if one.calibrated], record_property)
    assert any(one.calibrated for one in found)


@pytest.mark.parametrize("graph", [WHOLE[0], *LAYERS], ids=lambda graph: graph.label)
def test_a_check_changes_nothing(graph: CudaGraph) -> None:
    """Losses and norms, which depend on the scales, are equal bit for bit."""
    spec = checked_spec(MODELS["dense"], graph, fp8="delayed", deterministic=True)
    results = []
    for checks in (0, 3):
        engine, tokens = train(spec)
        found = []
        for step in range(engine._step, engine._step + 4):
            if step - engine._step < checks:
                check_step(engine.checkable_step(), step, tokens(step))
            result = engine.step(tokens(step))
            found.append((result.loss.item(), result.grad_norm.item()))
        results.append(found)
        engine.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("graph", [WHOLE[0], *LAYERS], ids=lambda graph: graph.label)
def test_a_stale_scale_is_found(graph: CudaGraph, record_property: Callable[[str, object], None]) -> None:
    """A scale moves to new memory after the capture, and the graph keeps the old one. With the new one, most numbers exceed the
    range of e4m3."""
    engine, tokens = train(checked_spec(MODELS["dense"], graph, fp8="delayed"))
    step = engine._step
    engine.step(tokens(step))
    (linear,) = (one for name, one in engine.chunks[0].named_modules() if name == "layers.1.mlp.down")
    quantizer = linear.quantizers["scaling_fwd"][0]
    quantizer.scale = quantizer.scale * 2**8
    found = check_step(engine.checkable_step(), step + 1, tokens(step + 1))
    engine.close()
    record_property("worst", worst([found]))
    assert any("layers.1.mlp.down" in fault for fault in faults_of(found)), found
