"""Test the step check in engine megatron: replay and uncaptured code agree, a check changes nothing, and planted faults
are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch.contract.records.step_check import StepCheck
from launch.contract.spec import CudaGraph, Model, Parallelism, RunSpec
from launch.train.inspection.step_check import check_step
from tests.distributed import workers
from tests.numerics.checked_step import layer_results, out_of_memory
from tests.numerics.megatron.megatron_graphs_on_cpu import graphs_on_cpu
from tests.numerics.megatron.megatron_on_cpu import megatron_engine
from tests.numerics.megatron.test_megatron_graphs import (
    EVEN,
    HAS_OPTIMIZER_GRAPH,
    OVERLAPPED,
    PADDED,
    ROUTED,
    captured_optimizer,
    graph,
    packed,
    spec_of,
)
from tests.numerics.tiny import DENSE, batches

BALANCED = replace(EVEN, moe_aux_loss_coeff=0.01)
BIASED = replace(
    EVEN, moe_router_score_function="sigmoid", moe_router_normalize_topk=True, moe_router_enable_expert_bias=True
)
WHOLE, LAYERS, LOCAL = graph("full_iteration"), graph("transformer_engine"), graph("local")


def run_with_checks(spec: RunSpec, lacking: str = "") -> dict[str, Any]:
    """Return the results of a rank's run, with or without checks, and the findings of the checks. In the first check,
    memory is missing at the place ``lacking``."""
    if lacking:
        with graphs_on_cpu(spec.cuda_graph.impl):  # This imports Megatron-Core without its warnings.
            from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
            from megatron.core.transformer.transformer_layer import TransformerLayer

            from launch.engines.megatron.step_check import MegatronStep
        places = {
            "forward": (TransformerLayer, "forward"),
            "backward": (_ParamAndGradBucketGroup, "register_grad_ready"),
        }
        with out_of_memory(places[lacking], 0, MegatronStep):
            return run_with_checks(spec)
    found: list[StepCheck] = []
    results = []
    layers = set()
    with graphs_on_cpu(spec.cuda_graph.impl), megatron_engine(spec) as engine:
        for step, batch in enumerate(batches(spec, spec.parallelism.rank_in("dp", dist.get_rank()))):
            if step in spec.checked_steps:
                found.append(check_step(engine.checkable_step(), step, batch))
                layers = {layer.name for layer in engine.checkable_step().layers()}
            result = engine.step(batch)
            results.append((result.loss.item(), result.grad_norm.item()))
        weights = torch.cat([parameter.detach().flatten() for _, parameter in engine.named_parameters()])
        buffers = [buffer.clone() for chunk in engine.chunks for buffer in chunk.module.buffers()]
        stats = engine.graph_stats()
    return {
        "results": results, "weights": torch.cat([weights, *(buffer.flatten() for buffer in buffers)]),
        "proven": stats.proven, "layers": layers, "checks": [(one.step, one.tensors > 8, one.unequal, len(one.routing)) for one in found if not one.missing],
    }  # fmt: skip


def compare_runs(spec: RunSpec) -> None:
    ranks = spec.parallelism.world_size
    plain, checked = (
        workers(ranks).run(run_with_checks, one) if ranks > 1 else [run_with_checks(one)]
        for one in (spec, replace(spec, step_checks=2, layer_check_steps=spec.training.steps))
    )
    parts = [with_checks["layers"] for with_checks in checked]
    assert set().union(*parts) == layer_results(spec)
    assert spec.parallelism.pp == 1 or parts[0].isdisjoint(parts[1])
    for without, with_checks in zip(plain, checked, strict=True):
        last, first = spec.training.steps - 1, spec.first_compared
        assert with_checks["checks"] == [(first, True, 0, 0), (last, True, 0, 0)]
        assert with_checks["results"] == without["results"]
        assert with_checks["proven"] == without["proven"]
        assert torch.equal(with_checks["weights"], without["weights"])


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (replace(BIASED, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True), WHOLE),
        (DENSE, LAYERS),
        (BALANCED, graph("transformer_engine", *ROUTED)),
        (BALANCED, graph("transformer_engine", "attn")),
        (DENSE, LOCAL),
    ],
)
def test_checks_find_nothing_and_change_nothing(model: Model, settings: CudaGraph) -> None:
    compare_runs(spec_of(model, settings))


@pytest.mark.parametrize(("model", "settings"), [(BIASED, WHOLE), (BALANCED, graph("transformer_engine", *ROUTED[1:]))])
def test_checks_of_packed_sequences_find_nothing_and_change_nothing(model: Model, settings: CudaGraph) -> None:
    compare_runs(packed(spec_of(model, settings)))


@HAS_OPTIMIZER_GRAPH
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (BIASED, {}),
        (DENSE, {"precision": "bf16", "clip_grad": 0.5}),
        (DENSE, {"precision": "bf16", "gradient_precision": "bf16", "clip_grad": 0.5}),
    ],
    ids=str,
)
def test_checks_of_a_captured_optimizer_find_nothing_and_change_nothing(model: Model, changes: dict[str, Any]) -> None:
    compare_runs(captured_optimizer(spec_of(model, WHOLE), **changes))


@HAS_OPTIMIZER_GRAPH
@pytest.mark.parametrize("gather", [True, False])
def test_checks_of_a_captured_optimizer_on_two_ranks(gather: bool) -> None:
    layout = replace(OVERLAPPED, overlap_param_gather=gather)
    compare_runs(captured_optimizer(spec_of(replace(DENSE, vocab_size=32), WHOLE, layout), global_batch_size=8))


@pytest.mark.parametrize(
    ("place", "settings"),
    [
        ("forward", WHOLE),
        ("backward", LAYERS),
        ("forward", LOCAL),
        pytest.param("backward", WHOLE, marks=pytest.mark.exhaustive),
        pytest.param("forward", LAYERS, marks=pytest.mark.exhaustive),
        pytest.param("backward", LOCAL, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_goes_on_without_a_check_that_lacks_memory(settings: CudaGraph, place: str) -> None:
    spec = spec_of(DENSE, settings, replace(Parallelism(), overlap_grad_reduce=True))
    with_checks = run_with_checks(replace(spec, step_checks=2), place)
    without = run_with_checks(spec)
    assert with_checks["checks"] == [(spec.training.steps - 1, True, 0, 0)], "the second check had its memory"
    assert with_checks["results"] == without["results"] and with_checks["proven"] == without["proven"]
    assert torch.equal(with_checks["weights"], without["weights"])


@pytest.mark.parametrize(
    ("model", "training"),
    [(DENSE, {"recompute": "full"}), (PADDED, {"recompute": "selective", "recompute_modules": ("moe",)})],
    ids=["layers", "experts"],
)
def test_what_is_recomputed_counts_once(model: Model, training: dict[str, Any]) -> None:
    spec = spec_of(model, WHOLE)
    compare_runs(replace(spec, training=replace(spec.training, **training)))


@pytest.mark.parametrize(
    ("model", "settings", "layout"),
    [
        (EVEN, graph("transformer_engine", *ROUTED), Parallelism(pp=2)),
        (replace(PADDED, vocab_size=32), LOCAL, Parallelism(pp=2)),
        (replace(DENSE, vocab_size=32), WHOLE, OVERLAPPED),
        (replace(DENSE, vocab_size=32), LAYERS, OVERLAPPED),
    ],
)
def test_checks_on_two_ranks(model: Model, settings: CudaGraph, layout: Parallelism) -> None:
    spec = spec_of(model, settings, layout)
    compare_runs(replace(spec, training=replace(spec.training, global_batch_size=4 * layout.dp)))


@contextmanager
def at_first_check(spec: RunSpec, dp_rank: int = 0) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield an engine that has captured, and the batch of its first check."""
    spec = replace(spec, step_checks=1, layer_check_steps=spec.training.steps)
    with graphs_on_cpu(spec.cuda_graph.impl), megatron_engine(spec) as engine:
        given = batches(spec, dp_rank)
        for _ in range(spec.first_compared):
            engine.step(next(given))
        yield engine, next(given)


def check(engine: Any, batch: torch.Tensor, fault: AbstractContextManager[Any]) -> StepCheck:
    """Check a step in which only the replay has ``fault``."""
    replay = engine._runner.replay

    def faulty(batch: torch.Tensor) -> Any:
        with fault:
            return replay(batch)

    with mock.patch.object(engine._runner, "replay", faulty):
        return check_step(engine.checkable_step(), engine._step, batch)


def faults_of(found: StepCheck) -> list[str]:
    return [row.name for row in (*found.differences, *found.routing) if row.is_fault]


def check_with_fault_on_rank_1(spec: RunSpec) -> tuple[int, list[str]]:
    """Return how many results of a clean check differ, and the faults of one in which rank 1 reads a stale weight."""
    rank = dist.get_rank()
    with at_first_check(spec, spec.parallelism.rank_in("dp", rank)) as (engine, batch):
        clean = check(engine, batch, nullcontext())
        names = dict(engine.chunks[-1].module.named_parameters())
        norm = next(name for name in names if name.endswith("input_layernorm.weight"))
        stale = other_weight(engine, norm, lambda weight: weight.mul_(1.5), chunk=-1)
        found = check(engine, batch, stale if rank == 1 else nullcontext())
    return clean.unequal, faults_of(found)


LAYOUTS = {
    "tp": (DENSE, WHOLE, Parallelism(tp=2, sequence_parallel=True)),
    "pp": (DENSE, LOCAL, Parallelism(pp=2)),
    "vpp": (
        replace(DENSE, num_layers=4),
        graph("transformer_engine", "attn"),
        Parallelism(pp=2, vpp=2, schedule="interleaved"),
    ),
    "dp and ep": (EVEN, graph("transformer_engine", *ROUTED), Parallelism(dp=2, ep=2, distributed_optimizer=True)),
    "dp": (DENSE, LOCAL, Parallelism(dp=2)),
    # Overlapped gathers would replace the stale weight.
    "dp, overlapped": (DENSE, WHOLE, replace(OVERLAPPED, overlap_param_gather=False)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_checks_of_several_ranks_are_clean_and_find_a_fault_of_one(name: str) -> None:
    """With three micro-batches on each rank."""
    model, settings, layout = LAYOUTS[name]
    spec = spec_of(replace(model, vocab_size=32), settings, layout)
    samples = 3 * spec.training.micro_batch_size * layout.dp if layout.vpp == 1 else 4 * spec.training.micro_batch_size
    spec = replace(spec, training=replace(spec.training, global_batch_size=samples))
    found = workers(layout.world_size).run(check_with_fault_on_rank_1, spec)
    assert [unequal for unequal, _ in found] == [0] * layout.world_size
    assert any(".self_attention." in fault for fault in found[1][1]), found


def first_of(found: StepCheck) -> str:
    return found.first[0].name if found.first else ""


@contextmanager
def other_weight(engine: Any, name: str, change: Callable[[torch.Tensor], object], chunk: int = 0) -> Iterator[None]:
    """Let the graph read another copy of a weight."""
    weight = dict(engine.chunks[chunk].module.named_parameters())[name].data
    kept = weight.clone()
    change(weight)
    yield
    weight.copy_(kept)


@contextmanager
def other_rates(engine: Any) -> Iterator[None]:
    """The graph of the optimizer reads other learning rates, 2% off."""
    with ExitStack() as others:
        for group in engine._optimizer.param_groups:
            others.enter_context(mock.patch.dict(group, lr=group["lr"] * 1.02))
        yield


def lost_microbatch(engine: Any) -> AbstractContextManager[Any]:
    """Let the second micro-batch add nothing to gradients."""
    objective, calls = engine._schedule._objective, iter((1.0, 0.0))

    def weighted(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, reported = objective(losses)
        return loss * next(calls), reported

    return mock.patch.object(engine._schedule, "_objective", weighted)


NORM, PROJECTION = (f"decoder.layers.1.{name}.weight" for name in ("input_layernorm", "self_attention.linear_proj"))


@pytest.mark.parametrize(
    ("model", "settings"), [(DENSE, WHOLE), (BALANCED, graph("transformer_engine", *ROUTED)), (DENSE, LOCAL)]
)
def test_planted_faults_are_found_and_named(model: Model, settings: CudaGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    # A lost micro-batch changes 38 results. Which of them are the worst depends on the rounding of this CPU.
    for module in ("launch.contract.records.step_check", "launch.train.inspection.step_check"):
        monkeypatch.setattr(f"{module}.MOST_DIFFERENCES", 100)
    with at_first_check(spec_of(model, settings)) as (engine, batch):
        clean = check(engine, batch, nullcontext())
        assert (clean.unequal, clean.routing) == (0, ())
        lost = check(engine, batch, lost_microbatch(engine))
        assert lost.calibrated and {"gradient norm", f"gradient of 0.{PROJECTION}"} <= set(faults_of(lost))
        assert "loss of micro-batch 1" not in faults_of(lost)
        assert first_of(lost) == "gradient of the output of the final norm, micro-batch 1"
        stale = check(engine, batch, other_weight(engine, NORM, lambda weight: weight.mul_(1.01)))
        # The check lists the largest differences. Which gradients of the layer are among them, rounding decides.
        assert stale.calibrated and any(name.startswith("gradient of 0.decoder.layers.1.") for name in faults_of(stale))
        assert first_of(stale) == "output of decoder layer 1, micro-batch 0"


@HAS_OPTIMIZER_GRAPH
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}], ids=str)
def test_a_learning_rate_of_an_earlier_step_is_found(changes: dict[str, Any]) -> None:
    spec = captured_optimizer(spec_of(DENSE, WHOLE), learning_rate=0.01, **changes)
    with at_first_check(spec) as (engine, batch):
        clean = check(engine, batch, nullcontext())
        assert (clean.unequal, clean.routing) == (0, ())
        found = check(engine, batch, other_rates(engine))
        assert any(name.startswith("master weight of" if changes else "weight of") for name in faults_of(found))


def scale_inputs(linear: Any) -> Any:
    """Let ``linear`` quantize its inputs to fp8 with delayed scaling, as Transformer Engine does. Return the scale's state."""
    state = SimpleNamespace(scale=torch.ones(1), amax_history=torch.zeros(4))
    linear.fp8_meta = {"scaling_fwd": state}

    def quantize(module: Any, inputs: Any) -> Any:
        x = inputs[0]
        with torch.no_grad():
            scaled = (x * state.scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / state.scale
            state.amax_history.copy_(torch.cat((x.abs().max().view(1), state.amax_history[:-1])))
            state.scale.copy_(448 / state.amax_history.max())
        return x + (scaled - x).detach(), *inputs[1:]

    linear.register_forward_pre_hook(quantize)
    return state


def test_a_stale_scale_of_fp8_is_found_and_scales_are_restored() -> None:
    spec = replace(spec_of(DENSE, WHOLE), step_checks=1)
    with graphs_on_cpu("full_iteration"), megatron_engine(spec) as engine:
        state = scale_inputs(engine.chunks[0].module.get_submodule("decoder.layers.1.self_attention.linear_proj"))
        given = batches(spec)
        for _ in range(spec.first_compared):
            engine.step(next(given))
        batch, before = next(given), (state.scale.clone(), state.amax_history.clone())

        @contextmanager
        def stale() -> Iterator[None]:
            state.scale.mul_(256)
            yield

        assert check(engine, batch, nullcontext()).unequal == 0
        found = check(engine, batch, stale())
        assert found.calibrated and f"gradient of 0.{PROJECTION}" in faults_of(found)
        assert torch.equal(state.scale, before[0]) and torch.equal(state.amax_history, before[1]) and state.scale != 1


def test_a_frozen_dropout_mask_is_found() -> None:
    """A generator that the graph does not register gives each replay the same numbers."""

    def frozen(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) >= p) / (1 - p)

    with at_first_check(spec_of(replace(DENSE, hidden_dropout=0.1), WHOLE)) as (engine, batch):
        assert check(engine, batch, nullcontext()).unequal == 0
        found = check(engine, batch, mock.patch.object(torch.nn.functional, "dropout", frozen))
        assert found.calibrated and f"gradient of 0.{PROJECTION}" in faults_of(found)
        assert first_of(found) == "output of the embedding, micro-batch 0"


def test_tokens_between_two_experts_are_repeated() -> None:
    """Two experts have nearly equal scores, and the graph rounds one of them up. If scores are far apart, the router is
    at fault."""
    router = "decoder.layers.1.mlp.router.weight"
    with at_first_check(spec_of(BALANCED, graph("transformer_engine", *ROUTED))) as (engine, batch):
        weight = dict(engine.chunks[0].module.named_parameters())[router].data
        weight[1] = weight[0]
        found = check(engine, batch, other_weight(engine, router, lambda weight: weight[1].mul_(1 + 2**-22)))
        assert sum(row.tokens for row in found.routing) > 3 and found.calibrated
        assert faults_of(found) == []
        found = check(engine, batch, other_weight(engine, router, lambda weight: weight[2].neg_()))
        assert any(row.is_fault and row.name.startswith("router of layer 2") for row in found.routing)


@contextmanager
def dropping(drop: Callable[..., Any]) -> Iterator[None]:
    """Let the graph choose the tokens of an expert with ``drop``: Megatron-Core's function, weights, chosen experts."""
    from launch.engines.megatron import observed_router

    own = observed_router.DROP_TOKENS

    def choose(weights: torch.Tensor, chosen: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept = drop(weights, chosen, partial(own, **settings))
        return weights * kept, kept

    with mock.patch.object(observed_router, "DROP_TOKENS", choose):
        yield


def round_otherwise(weights: torch.Tensor, chosen: torch.Tensor, own: Callable[..., Any]) -> torch.Tensor:
    rounding = torch.rand(weights.shape, generator=torch.Generator().manual_seed(1))
    kept: torch.Tensor = own(weights * (1 + 2e-7 * rounding), chosen)[1]
    return kept


def keep_the_lightest(weights: torch.Tensor, chosen: torch.Tensor, own: Callable[..., Any]) -> torch.Tensor:
    kept: torch.Tensor = own((1 - weights) * chosen, chosen)[1]
    return kept


@pytest.mark.parametrize("settings", [WHOLE, graph("transformer_engine", "moe"), LOCAL])
def test_tokens_that_exceed_the_capacity_are_repeated(settings: CudaGraph) -> None:
    """All tokens are equal, so rounding decides which ones exceed the capacity. If weights differ, the router is at fault."""
    with at_first_check(spec_of(replace(PADDED, moe_aux_loss_coeff=0.01), settings)) as (engine, batch):
        assert check(engine, batch, nullcontext()).unequal == 0
        found = check(engine, torch.zeros_like(batch), dropping(round_otherwise))
        assert sum(row.tokens for row in found.routing) > 3 and found.calibrated
        assert (found.unequal, faults_of(found)) == (0, [])
        found = check(engine, batch, dropping(keep_the_lightest))
        assert {row.name for row in found.routing if row.is_fault} == {
            f"router of layer {layer}, call {call}" for layer in (1, 2) for call in (0, 1)
        }
        found = check(engine, batch, lost_microbatch(engine))
        assert found.calibrated and "gradient norm" in faults_of(found)


@contextmanager
def hidden_choices() -> Iterator[None]:
    """Let routers hide their choices, as those in a fused kernel do."""
    with mock.patch("launch.engines.megatron.engine.observe_routers", lambda chunks, config: None):
        yield


def test_hidden_choices_are_not_judged() -> None:
    with hidden_choices(), at_first_check(spec_of(PADDED, WHOLE)) as (engine, batch):
        found = check(engine, batch, other_weight(engine, NORM, lambda weight: weight.mul_(1 + 2**-18)))
        assert found.unequal > 0 and not found.calibrated
        assert faults_of(found) == []


def check_with_late_rounding(spec: RunSpec) -> tuple[int, bool, list[str]]:
    """Return what a check finds if the graph of the second rank rounds differently, and the first one hides choices."""
    with nullcontext() if dist.get_rank() else hidden_choices(), at_first_check(spec) as (engine, batch):
        norm = next(name for name, _ in engine.chunks[0].module.named_parameters() if name.endswith("layernorm.weight"))
        other = other_weight(engine, norm, lambda weight: weight.mul_(1 + 2**-18))
        found = check(engine, batch, other if dist.get_rank() else nullcontext())
    return found.unequal, found.calibrated, faults_of(found)


def test_a_stage_that_hides_choices_and_one_without_routers_agree() -> None:
    """Only the first stage has a router. All stages run the same passes, and none is judged."""
    spec = spec_of(replace(EVEN, moe_layer_freq=2), graph("transformer_engine", "attn"), Parallelism(pp=2))
    for unequal, calibrated, faults in workers(2).run(check_with_late_rounding, spec):
        assert (unequal > 0, calibrated, faults) == (True, False, [])
