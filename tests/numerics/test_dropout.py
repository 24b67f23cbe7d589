"""Test dropout on a CPU: what it drops, that seeds and layouts decide the numbers, and that graphs and recomputation
draw the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from launch.contract.spec import CudaGraph, GraphImpl, Model, Parallelism, RunSpec
from launch.engines.protocol import RankPlace
from launch.engines.random_states import random_states_kept
from launch.engines.torch_native.decoder import drop
from launch.engines.torch_native.engine import TorchNativeEngine, seed_of_draws
from launch.engines.torch_native.graphs.layer_callables import TorchCallables, TransformerEngineCallables
from tests.distributed import workers
from tests.numerics.checked_step import check, engine_of, faults_of, spec_of, train_to_first_check
from tests.numerics.graphed_callables_on_cpu import graphs_on_cpu
from tests.numerics.megatron.megatron_graphs_on_cpu import train_graphed
from tests.numerics.megatron.megatron_on_cpu import cpu_as_cuda, train_megatron
from tests.numerics.megatron.test_megatron_graphs import eager, graph
from tests.numerics.megatron.test_megatron_graphs import spec_of as megatron_spec_of
from tests.numerics.megatron.test_megatron_step_check import compare_runs
from tests.numerics.parallel import layouts
from tests.numerics.tiny import CPU, DENSE, MOE, make_spec, train

HIDDEN, ATTENTION = replace(MOE, hidden_dropout=0.2), replace(MOE, attention_dropout=0.2)
BOTH = replace(HIDDEN, attention_dropout=0.2)
ROUTED = ("attn", "moe_router", "moe_preprocess")
LAYER_IMPLS: tuple[GraphImpl, ...] = ("torch", "transformer_engine")


def results(spec: RunSpec) -> list[tuple[float, float]]:
    with graphs_on_cpu():
        engine = engine_of(spec)
        steps = train(engine, spec)
    engine.close()
    return [(step.loss.item(), step.grad_norm.item()) for step in steps]


def test_dropped_elements_are_zero_and_others_keep_the_mean() -> None:
    torch.manual_seed(3)
    dropped = drop(torch.ones(100_000), 0.2)
    assert set(dropped.tolist()) == {0.0, 1.25}
    assert abs((dropped == 0).float().mean().item() - 0.2) < 0.01  # The tolerance is eight standard deviations.
    x = torch.ones(2)
    assert drop(x, 0.0) is x


@pytest.mark.parametrize("model", [HIDDEN, ATTENTION])
def test_the_seed_decides_what_is_dropped(model: Model) -> None:
    found = results(make_spec(model))
    assert results(make_spec(model)) == found != results(make_spec(MOE))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [DENSE, MOE])
def test_both_engines_drop_the_same_elements(model: Model) -> None:
    """With one sequence per micro-batch, both draw in the same order. In Megatron-Core, attention draws from the
    tracker."""
    spec = make_spec(replace(model, hidden_dropout=0.2, moe_router_normalize_topk=True), micro_batch_size=1, steps=3)
    theirs = train_megatron(replace(spec, engine="megatron"))
    own = train(TorchNativeEngine(spec, RankPlace(0, 1, CPU)), spec)
    torch.testing.assert_close(torch.stack([step.loss for step in own]), theirs["loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.stack([step.grad_norm for step in own]), theirs["grad_norm"], rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore")
def test_megatron_drops_probabilities_of_attention() -> None:
    plain, dropped = (
        train_megatron(replace(make_spec(model, steps=2), engine="megatron"))["loss"]
        for model in (DENSE, replace(DENSE, attention_dropout=0.5))
    )
    assert not torch.equal(plain, dropped)


@pytest.mark.parametrize(
    ("model", "training"),
    [(BOTH, {"recompute": "full"}), (ATTENTION, {"recompute": "selective"}), (HIDDEN, {"recompute": "selective", "recompute_modules": ("layernorm", "moe")})],
    ids=["layers", "attention", "experts"],
)  # fmt: skip
def test_recomputation_draws_the_same_numbers(model: Model, training: dict[str, Any]) -> None:
    plain = make_spec(model)
    assert results(replace(plain, training=replace(plain.training, **training))) == results(plain)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_share_the_numbers_of_what_they_share(sequence_parallel: bool) -> None:
    layout = layouts.Layout("dense", tp=2, sequence_parallel=sequence_parallel)
    spec = replace(layout.spec, model=replace(layout.spec.model, hidden_dropout=0.3))
    alone = layouts.train_rank(replace(spec, parallelism=Parallelism()), torch.float64)
    for found in workers(2).run(layouts.train_rank, spec, torch.float64):
        same = torch.allclose(found["grad_norm"], alone["grad_norm"], rtol=1e-9)
        assert same is not sequence_parallel, "shards of a sequence have draws of their own"


def test_ranks_with_other_data_or_layers_draw_other_numbers() -> None:
    for model, layout, distinct in (
        (HIDDEN, Parallelism(tp=2, dp=2, pp=2), 4),
        (HIDDEN, Parallelism(tp=2, dp=2, sequence_parallel=True), 4),
        (ATTENTION, Parallelism(tp=2, dp=2), 4),
    ):
        spec = replace(make_spec(model), parallelism=layout)
        seeds = [seed_of_draws(spec, rank) for rank in range(layout.world_size)]
        assert len(set(seeds)) == distinct
        shared = {seeds[rank] == seeds[rank + 1] for rank in range(0, layout.world_size, 2)}
        assert shared == {distinct < layout.world_size}


SETTINGS = [
    CudaGraph("full_iteration"),
    *(CudaGraph(impl, scope) for impl in LAYER_IMPLS for scope in ((), ROUTED)),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.label)
def test_graphed_steps_draw_what_eager_ones_draw(settings: CudaGraph) -> None:
    spec = make_spec(BOTH, steps=6)
    with drawing(TorchCallables), drawing(TransformerEngineCallables):
        assert results(replace(spec, cuda_graph=settings)) == results(spec)


def drawing(owner: type[TorchCallables | TransformerEngineCallables]) -> AbstractContextManager[Any]:
    """Let the warm-up passes of its capture draw numbers."""
    make = owner.make_callables

    def draw(*arguments: Any) -> Any:
        torch.rand(7)
        return make(*arguments)

    return mock.patch.object(owner, "make_callables", draw)


@contextmanager
def frozen_mask(engine: TorchNativeEngine) -> Iterator[None]:
    """Let each call drop the same elements, as if only the capture drew a mask."""

    def frozen(x: torch.Tensor, probability: float) -> torch.Tensor:
        keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) >= probability
        return x * keep / (1 - probability)

    with mock.patch.object(nn.functional, "dropout", frozen):
        yield


def test_a_step_check_is_clean_and_finds_a_frozen_mask() -> None:
    spec = spec_of(CudaGraph("full_iteration", warmup_steps=1, optimizer=True))
    spec = replace(spec, model=replace(spec.model, hidden_dropout=0.1, attention_dropout=0.1))
    captured = train_to_first_check(spec)
    clean = check(captured, lambda engine: nullcontext())
    assert (clean.unequal, clean.calibrated) == (0, True) and clean.tensors > 8
    assert "gradient of 0.layers.1.attention.qkv.weight" in faults_of(check(captured, frozen_mask))


def test_every_generator_has_its_state_again() -> None:
    """This includes the generators of Transformer Engine's tracker. Megatron-Core's own tracker holds bare states."""
    own, bare = torch.Generator().manual_seed(5), torch.get_rng_state()
    with cpu_as_cuda():
        from launch.engines.megatron import random_tracker
    with mock.patch.object(random_tracker, "get_all_rng_states", lambda: {"own": own, "bare": bare}):
        generators = random_tracker.generators_of_steps(CPU)
    assert generators == [torch.default_generator, own]
    before = [generator.get_state() for generator in generators]
    with pytest.raises(ValueError, match="passes"), random_states_kept(generators):
        torch.rand(3), torch.rand(3, generator=own)
        raise ValueError("passes failed")
    assert all(torch.equal(*pair) for pair in zip(before, [one.get_state() for one in generators], strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("impl", ["full_iteration", "transformer_engine", "local"])
def test_megatrons_graphed_steps_draw_what_eager_ones_draw(impl: Any) -> None:
    spec = megatron_spec_of(replace(DENSE, hidden_dropout=0.1), graph(impl))
    found, expected = train_graphed(spec), train_megatron(eager(spec))
    assert torch.equal(found["loss"], expected["loss"])
    torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=1e-6, atol=0)
    compare_runs(spec)  # A step check finds nothing and changes nothing.
