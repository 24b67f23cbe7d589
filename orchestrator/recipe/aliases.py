"""Normalise the spellings of graph settings.

Megatron-Core up to 0.16 writes ``cuda_graph_impl: local`` with ``cuda_graph_scope: full_iteration`` for the whole iteration,
and a comma-separated scope. Later releases write ``cuda_graph_impl: full_iteration`` and ``cuda_graph_modules``. Megatron
Bridge's guide writes ``cfg.model.cuda_graph_impl``. This project writes ``cuda_graph: {impl, scope, warmup_steps}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launch.contract.graph_impls import GRAPH_SCOPES

_WHERE = r"^(sweep\.grid\.|sweep\.points\[\d+\]\.)?"
_BRIDGE = re.compile(_WHERE + r"cfg\.")
_FLAT = re.compile(_WHERE + r"(?:model\.)?cuda_graph_(impl|scope|modules|warmup_steps)(?![a-z_])")
_MODULES = re.compile(_WHERE + r"(cuda_graph(?:\[\d+\])?)\.modules(?![a-z_])")


def canonical_place(place: str) -> str:
    """Return the place of a field in this project's spelling: ``cuda_graph_modules`` becomes ``cuda_graph.scope``."""
    place = _BRIDGE.sub(lambda found: found[1] or "", place) if "cfg." in place else place
    nested = (
        _FLAT.sub(lambda found: f"{found[1] or ''}cuda_graph.{found[2]}", place) if "cuda_graph_" in place else place
    )
    return _MODULES.sub(r"\1\2.scope", nested) if ".modules" in nested else nested


def canonical_values(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise the values of a complete ``cuda_graph`` section.

    The full iteration is an implementation, not a scope. The parts of a scope are sorted, because a scope is a set.
    """
    normal = dict(graph) | ({"mend": tuple(sorted(graph["mend"]))} if "mend" in graph else {})
    scope = tuple(normal.get("scope", ()))
    # Megatron's default is the whole layer.
    if scope == ("full",):
        normal["scope"] = ()
    elif scope == ("full_iteration",) and normal.get("impl") == "local":
        normal["impl"], normal["scope"] = "full_iteration", ()
    elif scope:
        normal["scope"] = tuple(sorted(scope, key=_rank))
    return normal


def _rank(name: str) -> int:
    return GRAPH_SCOPES.index(name) if name in GRAPH_SCOPES else len(GRAPH_SCOPES)
