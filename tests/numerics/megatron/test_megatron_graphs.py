"""Test which steps Megatron-Core's graphs take over, how they are counted, and what remains after closing.
tests/gpu/test_gpu_megatron_graphs.py tests that graphs compute the same as eager code. Here graphs are imitated."""

from __future__ import annotations

import importlib
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from launch.contract.errors import CaptureError, EnvironmentFault, ReplayError
from launch.contract.plan import Reason
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import CudaGraph, Data, Model, Parallelism, Placement, RunSpec
from launch.megatron_config.determinism import settle_determinism
from launch.support import megatron
from orchestrator.rules import refusals
from tests.distributed import RankError, workers
from tests.megatron_release import RELEASE
from tests.numerics.megatron.fused_gradients_on_cpu import gradients_fused
from tests.numerics.megatron.megatron_graphs_on_cpu import train_graphed, train_with_own_local_graphs
from tests.numerics.megatron.megatron_on_cpu import cpu_as_cuda, train_megatron
from tests.numerics.tiny import CPU, DENSE, GPT_OSS, MOE, make_spec

STEPS, WARMUP, MICRO_BATCHES = 4, 1, 2
EVEN = replace(MOE, vocab_size=32)
MIXED = replace(EVEN, moe_layer_freq=2)
PADDED = replace(EVEN, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
SHARED = replace(EVEN, moe_shared_expert_ffn_hidden_size=12)
SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
HAS_OPTIMIZER_GRAPH = pytest.mark.skipif(RELEASE == "0.16", reason="it has no graph of the optimizer")
ROUTED = ("attn", "moe_router", "moe_preprocess")


def graph(impl: Any, *scope: str) -> CudaGraph:
    return CudaGraph(impl, scope, WARMUP)


LAYERS: dict[str, tuple[Model, CudaGraph, int]] = {
    # The model, the graphs, and the number of layers that have graphs.
    "attention": (DENSE, graph("transformer_engine", "attn"), 2),
    "whole layers": (DENSE, graph("transformer_engine"), 2),
    "dense layers among others": (MIXED, graph("transformer_engine", "mlp"), 1),
    "routers among dense layers": (MIXED, graph("transformer_engine", "moe_router"), 1),
    "attention, routers and preprocessing": (SHARED, graph("transformer_engine", *ROUTED), 2),
    "experts": (PADDED, graph("transformer_engine", "attn", "moe"), 2),
    "local": (DENSE, graph("local"), 2),
    "local, by a part": (PADDED, graph("local", "attn"), 2),
}
STAGES: dict[str, tuple[Model, CudaGraph, Parallelism, tuple[int, ...]]] = {
    # The model, the graphs, the layout, and for each rank the number of layers that have graphs.
    "stages": (EVEN, graph("transformer_engine", *ROUTED), Parallelism(pp=2), (1, 1)),
    "a stage without any": (MIXED, graph("transformer_engine", "mlp"), Parallelism(pp=2), (0, 1)),
    "virtual stages": (
        replace(DENSE, num_layers=4, vocab_size=32), graph("transformer_engine", "attn"),
        Parallelism(pp=2, vpp=2, schedule="interleaved"), (2, 2),
    ),
    "stages, local": (replace(DENSE, vocab_size=32), graph("local"), Parallelism(pp=2), (1, 1)),
}  # fmt: skip


def spec_of(model: Model, settings: CudaGraph, parallelism: Parallelism = Parallelism()) -> RunSpec:  # noqa: B008 (frozen)
    spec = make_spec(model, steps=STEPS, global_batch_size=2 * MICRO_BATCHES, micro_batch_size=2, seed=4)
    return replace(spec, cuda_graph=settings, parallelism=parallelism)


def eager(spec: RunSpec) -> RunSpec:
    return replace(spec, cuda_graph=CudaGraph(warmup_steps=WARMUP))


_EAGER: dict[str, dict[str, Any]] = {}


def train_eagerly(spec: RunSpec) -> dict[str, Any]:
    """Return the results of an eager training. Many tests compare with the same one."""
    key = repr(eager(spec))
    if key not in _EAGER:
        _EAGER[key] = train_megatron(eager(spec))
    return _EAGER[key]


def kinds(capture_step: int) -> list[str]:
    return ["warmup"] * capture_step + ["capture"] + ["steady"] * (STEPS - capture_step - 1)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_from_graphs_once_they_are_captured(name: str) -> None:
    model, settings, layers = LAYERS[name]
    spec = spec_of(model, settings)
    found, expected = train_graphed(spec), train_eagerly(spec)
    assert found["capture_step"] == (0 if settings.impl == "local" else WARMUP)
    assert found["kind"] == kinds(found["capture_step"])
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=0, atol=0)
    torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=1e-6, atol=0)
    stats = GraphStats(**found["graph_stats"])
    assert stats.proven
    assert stats.graphs == 2 * layers
    assert stats.replays == layers * MICRO_BATCHES * (STEPS - 1 - found["capture_step"])
    assert stats.launches_per_step == 2 * layers * MICRO_BATCHES
    assert stats.effective_scope == (() if settings.impl == "local" else settings.scope)
    assert 0 < stats.capture_seconds < 60
    assert found["left"] == 0


@pytest.mark.parametrize("name", STAGES)
def test_each_micro_batch_in_a_pipeline_has_graphs_of_its_own(name: str) -> None:
    model, settings, parallelism, layers = STAGES[name]
    spec = spec_of(model, settings, parallelism)
    expected = train_eagerly(replace(spec, parallelism=Parallelism()))
    for found, count in zip(workers(2).run(train_graphed, spec), layers, strict=True):
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=5e-6, atol=0)
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=2e-5, atol=0)
        stats = GraphStats(**found["graph_stats"])
        assert found["kind"] == kinds(settings.capture_step)
        assert stats.graphs == 2 * count * MICRO_BATCHES
        assert stats.replays == stats.expected_replays == count * MICRO_BATCHES * (STEPS - 1 - settings.capture_step)
        assert stats.proven is (count > 0)
        assert found["left"] == 0


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
def test_0_19_captures_no_local_graphs_of_a_pipelines_micro_batches(pp: int, micro_batches: int) -> None:
    """The last stage's first backward pass comes before its second forward pass, which reads the same rotary embeddings. If this
    test fails, remove the rule ``megatron.local_pipeline``, and let tests/gpu/test_gpu_megatron_layouts.py run these cells."""
    spec = spec_of(replace(DENSE, vocab_size=32), graph("local"), Parallelism(pp=pp))
    spec = replace(spec, training=replace(spec.training, global_batch_size=2 * micro_batches))
    spec = replace(spec, engine="megatron", megatron_core=RELEASE)
    refused = [rule.id for rule in megatron.RULES if rule.id == "megatron.local_pipeline" and rule.judge(spec)]
    assert bool(refused) is (RELEASE == "0.19" and pp > 1 and micro_batches > 1)
    if refused:
        with pytest.raises(RankError, match="refused to capture in step 0: assert fwd_buffer_reuse_ref_count == 0"):
            workers(pp).run(train_with_own_local_graphs, spec)
    else:
        for found in workers(pp).run(train_with_own_local_graphs, spec):
            assert GraphStats(**found["graph_stats"]).graphs == 2 * (2 // pp) * (micro_batches if pp > 1 else 1)


OVERLAPPED = Parallelism(dp=2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)


CONTEXT = Parallelism(cp=2)
TENSORS = Parallelism(tp=2, etp=2, sequence_parallel=True)


@pytest.mark.parametrize("parallelism", [OVERLAPPED, CONTEXT, TENSORS], ids=["overlapped", "cp", "tp, etp"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(graph("transformer_engine"), marks=EXHAUSTIVE),
        graph("transformer_engine", *ROUTED),
        graph("local"),
        graph("full_iteration"),
    ],
    ids=str,
)
def test_graphs_on_ranks_that_exchange_more_than_gradients(settings: CudaGraph, parallelism: Parallelism) -> None:
    """Exchanges overlap here. A graph has no hooks, so its replacement for a layer must call them. Otherwise each rank
    would continue with only its own part of the weights updated."""
    spec = spec_of(EVEN if settings.scope else replace(DENSE, vocab_size=32), settings, parallelism)
    spec = replace(spec, training=replace(spec.training, global_batch_size=2 * MICRO_BATCHES * parallelism.dp))
    expected = train_eagerly(replace(spec, parallelism=Parallelism()))
    for found in workers(2).run(train_graphed, spec):
        assert found["kind"] == kinds(settings.capture_step)
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=5e-6, atol=0)
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=2e-5, atol=0)
        assert found["left"] == 0


def test_a_whole_step_over_stages_is_captured_where_no_transfer_waits_for_the_device() -> None:
    spec = spec_of(replace(DENSE, vocab_size=32), graph("full_iteration"), Parallelism(pp=2, batch_p2p_sync=False))
    expected = train_eagerly(replace(spec, parallelism=Parallelism()))
    ranks = workers(2)
    for found in ranks.run(train_graphed, spec):
        assert found["kind"] == kinds(WARMUP)
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=5e-6, atol=0)
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=2e-5, atol=0)
        assert GraphStats(**found["graph_stats"]).proven and found["left"] == 0
    with pytest.raises(RankError, match="not permitted when stream is capturing"):
        ranks.run(train_graphed, replace(spec, parallelism=Parallelism(pp=2)))


@pytest.mark.parametrize(
    "scope", [pytest.param(("attn",), marks=EXHAUSTIVE), pytest.param(ROUTED[1:], marks=EXHAUSTIVE), ROUTED], ids=str
)
def test_graphs_beside_the_exchange_of_tokens(scope: tuple[str, ...]) -> None:
    """Micro-batches overlap, and each has its own graphs although there is no pipeline."""
    layout = Parallelism(dp=2, ep=2, overlap_moe_expert_parallel_comm=True)
    spec = spec_of(EVEN, graph("transformer_engine", *scope), layout)
    spec = replace(spec, training=replace(spec.training, precision="bf16", global_batch_size=4 * MICRO_BATCHES))
    ranks = workers(2)
    for found, expected in zip(ranks.run(train_graphed, spec), ranks.run(train_megatron, eager(spec)), strict=True):
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=5e-6, atol=0)
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=2e-5, atol=0)
        stats = GraphStats(**found["graph_stats"])
        assert stats.proven
        assert stats.graphs == stats.launches_per_step == 2 * 2 * MICRO_BATCHES
        assert found["left"] == 0


def test_a_whole_step_is_captured_behind_the_warm_up() -> None:
    """Capture it twice, since Megatron-Core keeps the graph in a class."""
    spec = spec_of(PADDED, graph("full_iteration"))
    expected = train_eagerly(spec)
    for _ in range(2):
        found = train_graphed(spec)
        assert (found["capture_step"], found["kind"]) == (WARMUP, kinds(WARMUP))
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=0, atol=0)
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=1e-6, atol=0)
        stats = GraphStats(**found["graph_stats"])
        assert (stats.graphs, stats.launches_per_step, stats.replays) == (1, 1, STEPS - 1 - WARMUP)
        assert stats.proven
        assert stats.effective_scope == ("forward_backward",)
        assert found["left"] == 0


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (DENSE, graph("transformer_engine", "mlp")),
        (EVEN, graph("transformer_engine", *ROUTED[1:])),
        (PADDED, graph("transformer_engine", "moe")),
        (PADDED, graph("full_iteration")),
    ],
    ids=["mlp", "routers", "experts", "whole step"],
)
def test_graphs_of_packed_sequences_without_attention_and_of_whole_steps(model: Model, settings: CudaGraph) -> None:
    """Each step has other borders of documents, which a graph of the whole step reads from its static batch.

    A rule rejects whole steps with 0.16, which fail on a GPU and not in this imitation.
    """
    spec = packed(spec_of(model, settings))
    fails_on_gpus = RELEASE == "0.16" and settings.implementation.extent == "step"
    assert [reason.rule for reason in megatron_rules(spec)] == ["capture.packed_whole_step"] * fails_on_gpus
    found, expected = train_graphed(spec), train_megatron(eager(spec))
    assert found["kind"] == kinds(WARMUP)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=0, atol=0)
    torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=1e-6, atol=0)
    assert GraphStats(**found["graph_stats"]).proven and found["left"] == 0
    unpacked = train_megatron(replace(eager(spec), data=replace(spec.data, packed_sequences=False, max_documents=None)))
    assert (found["loss"] - unpacked["loss"]).abs().min() > 1e-4


def test_megatron_core_replays_no_attention_of_packed_sequences() -> None:
    """A rule rejects it for this reason. A release that takes packed sequences needs no such rule."""
    spec = packed(spec_of(DENSE, graph("transformer_engine", "attn")))
    assert [reason.rule for reason in megatron_rules(spec)] == ["capture.packed_sequences"]
    with pytest.raises((AssertionError, CaptureError), match="CUDA graph accepts only Tensor inputs"):
        train_graphed(spec)


def packed(spec: RunSpec) -> RunSpec:
    training = replace(spec.training, sequence_length=32, micro_batch_size=1, global_batch_size=MICRO_BATCHES)
    data = Data(kind="synthetic", packed_sequences=True, eod_token=3, max_documents=6)
    return replace(spec, training=training, data=data)


def megatron_rules(spec: RunSpec) -> tuple[Reason, ...]:
    training = replace(spec.training, precision="bf16", steps=8)
    return refusals(replace(spec, engine="megatron", training=training, placement=Placement(device="cuda")))


def captured_optimizer(spec: RunSpec, **changes: Any) -> RunSpec:
    training = replace(spec.training, capturable_optimizer=True, **changes)
    return replace(spec, training=training, cuda_graph=replace(spec.cuda_graph, optimizer=True))


@HAS_OPTIMIZER_GRAPH
@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16"}, {"precision": "bf16", "gradient_precision": "bf16"}], ids=str
)
def test_the_optimizer_runs_from_a_graph_with_the_rate_of_each_step(changes: dict[str, Any]) -> None:
    """Twice, since Megatron-Core keeps the graph in a class. Its replays keep what numbers the host gave to the capture."""
    spec = captured_optimizer(spec_of(PADDED, graph("full_iteration")), learning_rate=0.1, clip_grad=0.5, **changes)
    expected = train_eagerly(spec)
    for _ in range(2):
        found = train_graphed(spec)
        assert found["kind"] == kinds(WARMUP)
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=0, atol=0)
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=1e-6, atol=0)
        assert expected["grad_norm"].min() > 0.5, "so that gradients are clipped"
        for name, weight in expected["after"].items():
            assert not torch.equal(weight, expected["before"][name])
            torch.testing.assert_close(found["after"][name], weight, rtol=0, atol=0)
        assert found["choices"]["gradient norm and clipping"] == "PyTorch"
        stats = GraphStats(**found["graph_stats"])
        assert (stats.graphs, stats.launches_per_step, stats.replays) == (2, 2, 2 * (STEPS - 1 - WARMUP))
        assert stats.proven and stats.effective_scope == ("forward_backward", "optimizer")
        assert found["left"] == 0


@HAS_OPTIMIZER_GRAPH
@pytest.mark.parametrize("fault", ["rates", "norm"])
def test_why_rates_and_the_norm_are_on_the_device(fault: str) -> None:
    """A number of the host stays that of the capture, and Megatron-Core reads the norm on the host without these kernels."""
    from launch.engines.megatron import engine

    spec = captured_optimizer(spec_of(DENSE, graph("full_iteration")), learning_rate=0.1)
    if fault == "norm":
        with (
            mock.patch.object(engine, "norm_on_device", lambda: nullcontext("none")),
            pytest.raises(RuntimeError, match="not permitted"),
        ):
            train_graphed(spec)
        return
    with mock.patch.object(engine, "move_rates", lambda *_: None):
        found, expected = train_graphed(spec), train_megatron(eager(spec))
    last = slice(WARMUP + 2, None)  # an update shows in the next step's loss
    assert torch.equal(found["loss"][: WARMUP + 2], expected["loss"][: WARMUP + 2])
    assert (found["loss"] - expected["loss"])[last].abs().min() > 1e-5


@HAS_OPTIMIZER_GRAPH
@pytest.mark.parametrize(
    "parallelism",
    [OVERLAPPED, replace(OVERLAPPED, overlap_param_gather=False), Parallelism(dp=2, ep=2, distributed_optimizer=True)],
    ids=["overlapped", "gathered", "ep"],
)
def test_a_graph_of_the_optimizer_exchanges_what_ranks_share(parallelism: Parallelism) -> None:
    spec = captured_optimizer(spec_of(PADDED, graph("full_iteration"), parallelism), learning_rate=0.01)
    spec = replace(spec, training=replace(spec.training, global_batch_size=2 * MICRO_BATCHES * parallelism.dp))
    expected = workers(2).run(train_megatron, eager(spec))
    for found, plain in zip(workers(2).run(train_graphed, spec), expected, strict=True):
        torch.testing.assert_close(found["loss"], plain["loss"], rtol=0, atol=0)
        torch.testing.assert_close(found["grad_norm"], plain["grad_norm"], rtol=1e-6, atol=0)
        assert GraphStats(**found["graph_stats"]).proven and found["left"] == 0


def test_megatron_core_captures_a_yarn_models_attention_without_positions() -> None:
    """launch.support rejects it for this reason."""
    calm = replace(GPT_OSS, init_std=0.4)
    spec = spec_of(calm, graph("transformer_engine", "attn"))
    found, expected = train_graphed(spec)["loss"], train_megatron(eager(spec))["loss"]
    torch.testing.assert_close(found[:WARMUP], expected[:WARMUP], rtol=0, atol=0)
    assert (found[WARMUP] - expected[WARMUP]).abs() > 1e-3
    mended = train_graphed(replace(spec, cuda_graph=replace(spec.cuda_graph, mend=("yarn_positions",))))
    torch.testing.assert_close(mended["loss"], expected, rtol=0, atol=0)
    assert mended["choices"]["mended"] == "yarn_positions"


@pytest.mark.parametrize(
    "layout",
    [pytest.param(Parallelism(pp=2), marks=SLOW), Parallelism(tp=2, ep=2, sequence_parallel=True)],
    ids=["pp", "tp, ep"],
)
def test_a_yarn_models_attention_is_captured_with_its_positions_on_ranks_too(layout: Parallelism) -> None:
    calm = replace(GPT_OSS, init_std=0.4, vocab_size=32, num_layers=4)
    settings = replace(graph("transformer_engine", *ROUTED), mend=("yarn_positions",))
    spec = spec_of(calm, settings, layout)
    for found, expected in zip(
        workers(2).run(train_graphed, spec), workers(2).run(train_megatron, eager(spec)), strict=True
    ):
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=0, atol=0)
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("scope", [(), ("attn",), ("attn", "mlp")], ids=str)
def test_transformer_engine_captures_fused_gradients_for_the_first_micro_batch(scope: tuple[str, ...]) -> None:
    """Each replay overwrites those of the micro-batch before, and the mend lets it add."""
    spec = spec_of(DENSE, graph("transformer_engine", *scope))
    spec = replace(spec, training=replace(spec.training, gradient_accumulation_fusion=True))
    mended = replace(spec, cuda_graph=replace(spec.cuda_graph, mend=("fused_gradients",)))
    with gradients_fused():
        expected, released, found = train_megatron(eager(spec)), train_graphed(spec), train_graphed(mended)
    norms, replayed = expected["grad_norm"], slice(WARMUP, None)
    assert ((released["grad_norm"] - norms) / norms)[replayed].abs().min() > 0.01
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=0, atol=0)
    torch.testing.assert_close(found["grad_norm"], norms, rtol=1e-6, atol=0)
    assert found["choices"]["mended"] == "fused_gradients"


def test_every_mend_has_its_fault() -> None:
    from launch.engines.megatron.mends import MENDS

    assert tuple(MENDS) == megatron.MENDS


def test_megatron_core_recomputes_attention_by_a_function_that_layers_are_not_captured_with() -> None:
    """launch.support rejects this combination, because both ways to capture a layer call torch.autograd.grad."""
    with cpu_as_cuda():
        from megatron.core.tensor_parallel.random import checkpoint

        x = torch.ones(2, requires_grad=True)
        checkpoint(torch.sin, False, x).sum().backward()
        assert x.grad is not None
        with pytest.raises(RuntimeError, match=r"not compatible with \.grad\(\)"):
            torch.autograd.grad(checkpoint(torch.sin, False, x).sum(), x)


SETTINGS = {
    # The spelling of this program, and the final settings in the release.
    graph("none"): ("none", []),
    graph("transformer_engine"): ("transformer_engine", []),
    graph("transformer_engine", "attn", "moe_router"): ("transformer_engine", ["attn", "moe_router"]),
    graph("local"): ("local", []),
    graph("local", "attn"): ("local", ["attn"]),
    graph("full_iteration"): ("local", ["full_iteration"]) if RELEASE == "0.16" else ("full_iteration", []),
}


def test_megatron_core_gives_a_norm_that_a_graph_recomputes_no_gradient() -> None:
    """launch.support rejects it for this reason: the gradient goes to the parameter, and not to the capture."""
    with cpu_as_cuda():
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
        from megatron.core.transformer import cuda_graphs

        norm, linear, x = torch.nn.RMSNorm(2), torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        recomputed = CheckpointWithoutOutput()
        output = linear(recomputed.checkpoint(norm, x)).sum()
        recomputed.discard_output_and_register_recompute(output)
        cuda_graphs._set_capture_start()
        of_input, of_norm = torch.autograd.grad(output, [x, norm.weight], allow_unused=True)
        cuda_graphs._set_capture_end()
    assert of_input is not None and of_norm is None
    assert norm.weight.grad is not None


def test_local_builds_no_layer_for_mlp_alone() -> None:
    """The rules reject it for this reason."""
    with pytest.raises(AttributeError, match="is_moe_layer"):
        train_graphed(spec_of(DENSE, graph("local", "mlp")))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_megatron_core_takes_the_settings_as_they_are_meant(settings: CudaGraph) -> None:
    with cpu_as_cuda():
        from launch.engines.megatron.model import make_config

        config = make_config(spec_of(EVEN, settings), "local", CPU)
    scope = config.cuda_graph_scope if RELEASE == "0.16" else config.cuda_graph_modules
    assert (config.cuda_graph_impl, [part.name for part in scope]) == SETTINGS[settings]
    assert settings.impl == "none" or config.cuda_graph_warmup_steps == WARMUP


# --- counting, over a capture of this file's own --------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core warns about missing features without Transformer Engine.
        importlib.import_module("launch.engines.megatron.engine")


def graphed(spec: RunSpec, replayed: int = 3, works: bool = True, refusal: str = "") -> Any:
    """Return a runner whose graphs replay a given number of times per step."""
    from launch.engines.megatron.graphs.megatron_capture import MegatronCapture

    class Passes(MegatronCapture):
        mechanism = "none"
        is_captured = False

        def run_capture_step(self, batch: torch.Tensor) -> torch.Tensor:
            assert not refusal, refusal
            self.is_captured = works
            self.graphs, self.replays_per_step = 2, 3
            return torch.zeros(())

        def close(self) -> None:
            self.is_captured = False

    class Schedule:
        def run(self, batch: torch.Tensor) -> torch.Tensor:
            for _ in range(replayed if steps.is_captured else 0):
                replay()
            return torch.zeros(())

    steps = Passes(spec, Schedule(), None)  # type: ignore[arg-type]
    replay = steps.counter.counting(lambda: None)
    return steps


BATCH = torch.zeros(4, 2, 9, dtype=torch.int64)
ATTENTION = spec_of(EVEN, graph("transformer_engine", "attn"))


@pytest.mark.parametrize(("replayed", "proven"), [(3, True), (2, False), (4, False)])
def test_replay_is_proven_by_counting(replayed: int, proven: bool) -> None:
    steps = graphed(ATTENTION, replayed)
    assert [steps.run(step, BATCH)[1] for step in range(STEPS)] == kinds(WARMUP)
    stats = steps.stats()
    assert (stats.replays, stats.expected_replays) == (2 * replayed, 6)
    assert stats.proven is proven


def test_a_batch_of_another_shape_is_refused_with_both() -> None:
    steps = graphed(ATTENTION)
    for step in range(STEPS):
        steps.run(step, BATCH)
    with pytest.raises(ReplayError, match=r"the batch has shape \(4, 2, 8\), but was captured with \(4, 2, 9\)"):
        steps.run(STEPS, BATCH[..., :-1])


def test_a_capture_that_comes_to_nothing_is_an_error() -> None:
    steps = graphed(ATTENTION, works=False)
    with pytest.raises(CaptureError, match=r"impl=transformer_engine, scope=\[attn\] .*captured nothing in step 1"):
        for step in range(STEPS):
            steps.run(step, BATCH)


def test_what_megatron_core_asserts_in_a_capture_is_said_with_the_settings() -> None:
    steps = graphed(spec_of(EVEN, graph("local")), refusal="Option cuda_graph_impl=local not enabled.")
    with pytest.raises(CaptureError, match=r"impl=local, scope=\[\] .* refused .* in step 0: Option .* not enabled"):
        steps.run(0, BATCH)


def test_transformer_engine_is_kept_from_kernels_without_an_order() -> None:
    environment = {"NCCL_ALGO": "Tree"}
    assert (
        settle_determinism(environment) == environment == {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Tree"}
    )
    assert settle_determinism({})["NCCL_ALGO"] == "Ring"
    with pytest.raises(EnvironmentFault, match=r"ALGO=1 with training\.deterministic=true: set it to 0"):
        settle_determinism({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"})
