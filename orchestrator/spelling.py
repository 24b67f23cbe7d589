"""The spellings of graph settings that are in use, normalised once.

Megatron-Core up to 0.16 writes ``cuda_graph_impl: local`` with ``cuda_graph_scope: full_iteration`` for the whole
iteration and a comma-separated scope; later releases write ``cuda_graph_impl: full_iteration`` and
``cuda_graph_modules``. Here it is ``cuda_graph: {impl, scope, warmup_steps}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = {
    "cuda_graph_impl": "impl",
    "cuda_graph_scope": "scope",
    "cuda_graph_modules": "scope",
    "cuda_graph_warmup_steps": "warmup_steps",
}
_INNER = {**KEYS, "modules": "scope"}


def normalize_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with every graph setting under ``cuda_graph``, by its name there. Values are left as they are."""
    plain = {key: value for key, value in tree.items() if key not in KEYS}
    graph = plain.get("cuda_graph", {})
    moved = {KEYS[key]: value for key, value in tree.items() if key in KEYS}
    if not isinstance(graph, Mapping):
        return plain
    inner = {_INNER.get(str(key), str(key)): value for key, value in graph.items()} | moved
    return plain | {"cuda_graph": inner} if inner else plain


def normalize_values(graph: Mapping[str, Any]) -> dict[str, Any]:
    """A complete ``cuda_graph`` section in one vocabulary: the whole iteration is an implementation, not a scope."""
    normal = dict(graph)
    scope = tuple(normal.get("scope", ()))
    if scope == ("full",):  # Megatron's default: the whole layer
        normal["scope"] = ()
    if normal.get("impl") == "local" and scope == ("full_iteration",):
        normal["impl"], normal["scope"] = "full_iteration", ()
    return normal
