"""Decide which smaller captured sets to try next, and which is the smallest that fails. Pure.

Sets are tried from the smallest up. All sets of one size run together and share an eager baseline. The search ends at the
first size at which a set fails, or at which no status is clear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from launch.contract.graph_impls import GRAPH_SCOPES
from launch.contract.spec import CudaGraph, RunSpec
from orchestrator.rules import graph_scope

Status = Literal["fails", "fails otherwise", "passes", "unclear"]
"""Only "fails" is the original failure. Another failure may hide it."""


@dataclass(frozen=True)
class Candidate:
    """A set to try, and the parts of a step that it captures."""

    graph: CudaGraph
    parts: frozenset[str]


@dataclass(frozen=True)
class Conclusion:
    """The result of a search."""

    smallest: Candidate | None = None
    """A set that fails, while no set of fewer parts is known to fail."""
    also: tuple[Candidate, ...] = ()
    """Other sets of the same size that fail."""
    unclear: tuple[Candidate, ...] = ()
    """Smaller sets that neither pass nor fail, including those that fail otherwise."""


def next_scopes(
    candidates: Sequence[Candidate], found: Mapping[CudaGraph, Status]
) -> tuple[Candidate, ...] | Conclusion:
    """Return the sets that must have a status after the next round, or the conclusion.

    Args:
        candidates: all sets, including the whole set.
        found: the status of each set that was tried.
    """
    tried: tuple[Candidate, ...] = ()
    unclear: tuple[Candidate, ...] = ()
    for size in sorted({len(candidate.parts) for candidate in candidates}):
        level = tuple(candidate for candidate in candidates if len(candidate.parts) == size)
        tried += level
        if any(candidate.graph not in found for candidate in level):
            return tried
        failing = [candidate for candidate in level if found[candidate.graph] == "fails"]
        if failing:
            return Conclusion(failing[0], tuple(failing[1:]), unclear)
        unclear += tuple(candidate for candidate in level if found[candidate.graph] != "passes")
        larger_tried = any(candidate.graph in found for candidate in candidates if len(candidate.parts) > size)
        if all(found[candidate.graph] == "unclear" for candidate in level) and not larger_tried:
            break
    return Conclusion(unclear=unclear)


def list_candidates(whole: RunSpec) -> tuple[Candidate, ...]:
    """Return every set of the same implementation that captures strictly less than ``whole``, then the whole set.

    Sets that mean nothing for the model are left out. No other rule is checked. The order is that of GRAPH_SCOPES.
    """
    all_parts = whole.captured_parts
    scopes = (parts for size in range(len(GRAPH_SCOPES) + 1) for parts in combinations(GRAPH_SCOPES, size))
    specs = (replace(whole, cuda_graph=replace(whole.cuda_graph, scope=parts, optimizer=False)) for parts in scopes)
    smaller = [
        Candidate(spec.cuda_graph, spec.captured_parts)
        for spec in specs
        if spec.captured_parts < all_parts and not any(rule.judge(spec) for rule in graph_scope.RULES)
    ]
    return (*smaller, Candidate(whole.cuda_graph, all_parts))
