"""Test layers and their parts as graphed callables: the gradients equal those of the same code uncaptured bit for bit,
although the next replay overwrites the outputs of a graph (pytorch/pytorch#181723)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from launch.contract.spec import CudaGraph, GraphImpl, Model, Parallelism, RunSpec
from tests.distributed import workers
from tests.numerics.graphed_callables_on_cpu import train_graphed
from tests.numerics.tiny import DENSE, MOE, make_spec

EXPERTS = replace(
    MOE, num_layers=4, moe_layer_freq=2, moe_aux_loss_coeff=0.01, moe_shared_expert_ffn_hidden_size=8,
    moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
)  # fmt: skip
LAYOUTS = {
    "alone": Parallelism(),
    "1f1b": Parallelism(pp=2),
    "gpipe": Parallelism(pp=2, schedule="gpipe"),
    "interleaved": Parallelism(pp=2, vpp=2, schedule="interleaved"),
}
PARTS: list[tuple[Model, tuple[str, ...]]] = [
    (replace(DENSE, num_layers=4), ("attn", "mlp")),
    (EXPERTS, ()),
    (EXPERTS, ("mlp",)),
    (EXPERTS, ("attn", "moe")),
    (EXPERTS, ("attn", "moe_router", "moe_preprocess")),
]
UNCAPTURED: dict[str, list[dict[str, Any]]] = {}
"""Results of uncaptured runs, by run id."""


def combinations() -> Iterator[Any]:
    """Yield all combinations. Half of them are not exhaustive. These include each pair of two of the three values."""
    for (row, (model, scope)), (column, layout) in product(enumerate(PARTS), enumerate(LAYOUTS)):
        for number, impl in enumerate(("torch", "transformer_engine")):
            rest = [pytest.mark.exhaustive] if (row + column + number) % 2 else []
            name = f"{' '.join(scope) or 'whole layers'}-{impl}-{layout}"
            yield pytest.param(model, scope, impl, LAYOUTS[layout], id=name, marks=rest)


@pytest.mark.parametrize(("model", "scope", "impl", "layout"), list(combinations()))
def test_distinct_micro_batches_add_up_to_what_they_do_uncaptured(
    model: Model, scope: tuple[str, ...], impl: GraphImpl, layout: Parallelism
) -> None:
    held_against_uncaptured(replace(make_spec(model, steps=4, global_batch_size=6), parallelism=layout), impl, scope)


@pytest.mark.parametrize("impl", ["torch", "transformer_engine"])
def test_attention_that_is_recomputed_in_a_graph_is_recomputed_there(impl: GraphImpl) -> None:
    spec = make_spec(DENSE, steps=4, global_batch_size=6)
    recomputed = replace(spec, training=replace(spec.training, recompute="selective"))
    held_against_uncaptured(replace(recomputed, parallelism=LAYOUTS["1f1b"]), impl, ("attn",))


@pytest.mark.parametrize("scope", [(), ("moe_router",)], ids=["whole layers", "routers"])
def test_modules_are_recomputed_in_a_graph_and_behind_it(scope: tuple[str, ...]) -> None:
    modules = ("moe_act", "shared_experts") if scope else ("layernorm", "moe_act", "shared_experts")
    spec = make_spec(replace(EXPERTS, moe_shared_expert_ffn_hidden_size=12), steps=4, global_batch_size=6)
    recomputed = replace(spec, training=replace(spec.training, recompute="selective", recompute_modules=modules))
    held_against_uncaptured(recomputed, "torch", scope)


def uncaptured(eager: RunSpec) -> list[dict[str, Any]]:
    """Return the results of the uncaptured run by rank. All captured runs of a workload share them."""
    spec = replace(eager, cuda_graph=CudaGraph(warmup_steps=1))
    if spec.run_id not in UNCAPTURED:
        UNCAPTURED[spec.run_id] = workers(eager.parallelism.world_size).run(train_graphed, spec)
    return UNCAPTURED[spec.run_id]


def held_against_uncaptured(eager: RunSpec, impl: GraphImpl, scope: tuple[str, ...]) -> None:
    graphed = replace(eager, cuda_graph=CudaGraph(impl, scope, warmup_steps=1))
    found = workers(eager.parallelism.world_size).run(train_graphed, graphed)
    assert any(rank["graphs"] for rank in found)
    for one, other in zip(found, uncaptured(eager), strict=True):
        assert one["proven"] or one["graphs"] == 0  # An interleaved stage may have no dense layer.
        assert one["steps"] == other["steps"]
        assert torch.equal(one["weights"], other["weights"])
