"""Decide which smaller captured sets to try next, and which is the smallest that fails. Pure.

The search begins with the smallest sets. All sets of one size run together and share an eager baseline. The search ends at the
first size at which a set fails, or at which no status is clear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launch.contract.graph_impls import SCOPE_SETS
from launch.contract.spec import CudaGraph, RunSpec
from launch.support.megatron import needed_mends
from orchestrator.rules import graph_scope

Status = Literal["fails", "fails otherwise", "passes", "unclear"]
"""Only "fails" is the original failure. Another failure may hide it."""


@dataclass(frozen=True)
class Conclusion:
    """The result of a search."""

    smallest: RunSpec | None = None
    """A set that fails. No set of fewer parts is known to fail."""
    also: tuple[RunSpec, ...] = ()
    """Other sets of the same size that fail."""
    unclear: tuple[RunSpec, ...] = ()
    """Smaller sets that neither pass nor fail, including those that fail otherwise."""


def next_scopes(candidates: Sequence[RunSpec], found: Mapping[CudaGraph, Status]) -> tuple[RunSpec, ...] | Conclusion:
    """Return the sets that must have a status after the next round, or the conclusion.

    Args:
        candidates: all sets, including the whole set.
        found: the status of each set that was tried.
    """
    tried: tuple[RunSpec, ...] = ()
    unclear: tuple[RunSpec, ...] = ()
    for size in sorted({len(candidate.captured_parts) for candidate in candidates}):
        level = tuple(candidate for candidate in candidates if len(candidate.captured_parts) == size)
        tried += level
        if any(candidate.cuda_graph not in found for candidate in level):
            return tried
        failing = [candidate for candidate in level if found[candidate.cuda_graph] == "fails"]
        if failing:
            return Conclusion(failing[0], tuple(failing[1:]), unclear)
        unclear += tuple(candidate for candidate in level if found[candidate.cuda_graph] != "passes")
        larger_tried = any(
            candidate.cuda_graph in found for candidate in candidates if len(candidate.captured_parts) > size
        )
        if all(found[candidate.cuda_graph] == "unclear" for candidate in level) and not larger_tried:
            break
    return Conclusion(unclear=unclear)


def list_candidates(whole: RunSpec) -> tuple[RunSpec, ...]:
    """Return ``whole`` with every set of its implementation that captures strictly less, then ``whole`` itself.

    Leave out sets that mean nothing for the model, but check no other rule. The order is that of SCOPE_SETS.
    """
    all_parts = whole.captured_parts
    specs = (_smaller(whole, parts) for parts in SCOPE_SETS)
    smaller = [
        spec
        for spec in specs
        if spec.captured_parts < all_parts and not any(rule.judge(spec) for rule in graph_scope.RULES)
    ]
    return (*smaller, whole)


def _smaller(whole: RunSpec, scope: tuple[str, ...]) -> RunSpec:
    """Return ``whole`` with another scope, and without the mends that have nothing to repair in that scope."""
    spec = replace(whole, cuda_graph=replace(whole.cuda_graph, scope=scope, optimizer=False))
    return replace(spec, cuda_graph=replace(spec.cuda_graph, mend=needed_mends(spec)))
