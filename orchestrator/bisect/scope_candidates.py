"""Which of the smaller sets of what a run captures to try next, and which is the smallest that fails. Pure.

Sets are tried from the smallest up, all of one size together: they share an eager twin. The first size at which one fails
ends it, so that no smaller set that was tried fails, whether or not a larger set fails wherever a smaller one does. The
whole set is the last: that it fails again, and no part of it does, is then known from the same sweep. A size of which
nothing is clear ends it too, as where the eager twin fails.
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
"""Only "fails" is the failure looked for. Another one hides whether it would have come about."""


@dataclass(frozen=True)
class Candidate:
    """A set to try, and the parts of a step that it captures."""

    graph: CudaGraph
    parts: frozenset[str]


@dataclass(frozen=True)
class Conclusion:
    """``smallest`` fails, and no set of fewer parts is known to; None where none is, the whole included, or nothing is
    clear. ``also`` fail too and have as many parts. Whether ``unclear`` sets, of fewer parts, fail so is not known: those
    that fail otherwise are among them."""

    smallest: Candidate | None
    also: tuple[Candidate, ...]
    unclear: tuple[Candidate, ...]


def next_scopes(
    candidates: Sequence[Candidate], found: Mapping[CudaGraph, Status]
) -> tuple[Candidate, ...] | Conclusion:
    """The sets that must have been tried by the end of the next round, or what follows from those that have been.

    Args:
        candidates: the whole set among them.
        found: how sets stand that have been tried.
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
        beyond = any(candidate.graph in found for candidate in candidates if len(candidate.parts) > size)
        if all(found[candidate.graph] == "unclear" for candidate in level) and not beyond:
            break
    return Conclusion(None, (), unclear)


def candidates_of(whole: RunSpec) -> tuple[Candidate, ...]:
    """Every set of the same implementation that captures strictly less than ``whole`` and means something for the model,
    in the order of launch.contract.graph_impls.GRAPH_SCOPES, and last the whole. Other rules are not asked."""
    all_parts = whole.captured_parts
    specs = (replace(whole, cuda_graph=graph) for graph in _graphs(whole.cuda_graph))
    smaller = [
        Candidate(spec.cuda_graph, spec.captured_parts)
        for spec in specs
        if spec.captured_parts < all_parts and not any(rule.judge(spec) for rule in graph_scope.RULES)
    ]
    return (*smaller, Candidate(whole.cuda_graph, all_parts))


def _graphs(whole: CudaGraph) -> list[CudaGraph]:
    scopes = [parts for size in range(len(GRAPH_SCOPES) + 1) for parts in combinations(GRAPH_SCOPES, size)]
    return [replace(whole, scope=parts, optimizer=False) for parts in scopes]
