"""Test that each graph implementation has one row, and what scopes contain."""

from __future__ import annotations

from typing import get_args

import pytest

from launch.contract.graph_impls import GRAPH_IMPLS
from launch.contract.spec import CudaGraph, EngineName, GraphImpl, Model, RunSpec

DENSE = Model()
MOE = Model(num_moe_experts=4, moe_router_topk=2)
HYBRID = Model(num_layers=3, hybrid_override_pattern="M*-")
EXPERTS = {"router", "preprocessing", "experts"}


def test_every_name_that_a_recipe_may_write_has_a_row() -> None:
    assert tuple(GRAPH_IMPLS) == get_args(GraphImpl)
    assert {engine for row in GRAPH_IMPLS.values() for engine in row.engines} == set(get_args(EngineName))


@pytest.mark.parametrize(
    ("model", "graph", "parts"),
    [
        (DENSE, CudaGraph(), set()),
        (DENSE, CudaGraph("torch"), {"attention", "mlp"}),
        (MOE, CudaGraph("torch"), {"attention"} | EXPERTS),
        (MOE, CudaGraph("transformer_engine", ("attn", "moe_router")), {"attention", "router"}),
        (MOE, CudaGraph("local", ("attn",)), {"attention"} | EXPERTS),
        (DENSE, CudaGraph("local", ("mlp",)), {"attention", "mlp"}),
        (MOE, CudaGraph("local", ("moe",)), set()),
        (DENSE, CudaGraph("full_iteration", optimizer=True), {"attention", "mlp", "rest of the model", "optimizer"}),
        (HYBRID, CudaGraph("transformer_engine"), {"mamba", "attention", "mlp"}),
        (HYBRID, CudaGraph("transformer_engine", ("mamba",)), {"mamba"}),
        (HYBRID, CudaGraph("local", ("attn", "mamba")), {"mamba", "attention"}),
        (HYBRID, CudaGraph("full_iteration"), {"mamba", "attention", "mlp", "rest of the model"}),
        (DENSE, CudaGraph("cudagraph"), set()),  # type: ignore[arg-type]
    ],
)
def test_captured_parts(model: Model, graph: CudaGraph, parts: set[str]) -> None:
    assert RunSpec(model=model, cuda_graph=graph).captured_parts == parts
