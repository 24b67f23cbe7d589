"""Test that all spellings of a graph configuration give one configuration."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.contract.graph_impls import GRAPH_SCOPES
from launch.contract.spec import CudaGraph
from orchestrator.recipe.aliases import canonical_place, canonical_values
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load

SPELLINGS = {
    CudaGraph("full_iteration"): (
        "cuda_graph: {impl: full_iteration}",
        "cuda_graph: {impl: local, scope: [full_iteration]}",
        "cuda_graph: {impl: local, modules: full_iteration}",
        "cuda_graph_impl: local\ncuda_graph_scope: full_iteration",
        "cuda_graph_impl: full_iteration",
        "cuda_graph.impl: local\ncuda_graph.scope: full_iteration",
        "sweep: {grid: {cuda_graph_impl: [local], cuda_graph_scope: [[full_iteration]]}}",
        "cuda_graph_scope: full_iteration\nsweep: {grid: {cuda_graph.impl: [local]}}",
        "sweep: {points: [{cuda_graph_impl: local, cuda_graph_scope: full_iteration}]}",
    ),
    CudaGraph("transformer_engine", ("attn", "moe_router")): (
        "cuda_graph: {impl: transformer_engine, scope: [attn, moe_router]}",
        "cuda_graph: {impl: transformer_engine, scope: [moe_router, attn]}",
        "cuda_graph: {impl: transformer_engine, scope: 'attn, moe_router'}",
        "cuda_graph_impl: transformer_engine\ncuda_graph_scope: attn,moe_router",
        "cuda_graph_impl: transformer_engine\ncuda_graph_scope: attn moe_router",
        "cfg.model.cuda_graph_impl: transformer_engine\ncfg: {model: {cuda_graph_scope: [attn, moe_router]}}",
        "sweep: {points: [{cfg.model.cuda_graph_impl: transformer_engine, model.cuda_graph_modules: attn moe_router}]}",
        "cuda_graph_impl: transformer_engine\ncuda_graph_modules: [attn, moe_router]",
        "cuda_graph: {impl: transformer_engine}\ncuda_graph_modules: [attn, moe_router]",
        "sweep: {grid: {cuda_graph: [{impl: transformer_engine, modules: [attn, moe_router]}]}}",
        "sweep: {grid: {cuda_graph_modules: [[moe_router, attn]]}}\ncuda_graph_impl: transformer_engine",
    ),
    CudaGraph("local", (), 7): (
        "cuda_graph: {impl: local, warmup_steps: 7}",
        "cuda_graph_impl: local\ncuda_graph_warmup_steps: 7",
        "cuda_graph_impl: local\ncuda_graph_scope: full\ncuda_graph_warmup_steps: 7",
        "cuda_graph_impl: local\ncuda_graph_scope: ''\ncuda_graph.warmup_steps: 7",
    ),
}


@pytest.mark.parametrize(("graph", "text"), [(graph, text) for graph, texts in SPELLINGS.items() for text in texts])
def test_a_spelling_is_read_as_what_it_means(tmp_path: Path, graph: CudaGraph, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"name: x\nmodel: tiny_moe\nengine: megatron\n{text}\n")
    eager, graphed = expand(load(path), "cpu")
    assert graphed.spec.cuda_graph == graph
    assert eager.spec.cuda_graph == CudaGraph("none", (), graph.warmup_steps)


def test_full_iteration_of_another_implementation_is_left_for_the_rules() -> None:
    written = {"impl": "transformer_engine", "scope": ("full_iteration",)}
    assert canonical_values(written) == written


@given(st.permutations(GRAPH_SCOPES))
def test_a_scope_is_a_set(scope: list[str]) -> None:
    assert canonical_values({"scope": tuple(scope)}) == {"scope": GRAPH_SCOPES}


@given(st.lists(st.sampled_from([*GRAPH_SCOPES, "full", "full_iteration", "atn"])), st.sampled_from(["local", "torch"]))
def test_what_is_canonical_stays_as_it_is(scope: list[str], impl: str) -> None:
    once = canonical_values({"impl": impl, "scope": tuple(scope)})
    assert canonical_values(once) == once


def test_places_are_canonical_where_graph_settings_stand_and_nowhere_else() -> None:
    settings = {
        "cuda_graph_impl": "cuda_graph.impl",
        "cuda_graph_modules": "cuda_graph.scope",
        "cuda_graph.modules": "cuda_graph.scope",
        "cuda_graph.scope": "cuda_graph.scope",
    }
    for prefix, (written, canonical) in itertools.product(("", "sweep.grid.", "sweep.points[3]."), settings.items()):
        assert canonical_place(prefix + written) == prefix + canonical
    for place in ("environment.cuda_graph_impl", "model.modules", "cuda_graph_implement", "training.cuda_graph_scope"):
        assert canonical_place(place) == place
