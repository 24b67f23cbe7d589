"""The answer of `bisect`: the smallest captured set that fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.common.atomic_files import members
from launch.contract.plan import Reason
from launch.contract.spec import CudaGraph, RunSpec
from orchestrator.bisect.failure_status import FailureStatus
from orchestrator.bisect.scope_candidates import Conclusion, Status, list_candidates
from orchestrator.bisect.search import Answer, Search, join_names


@dataclass(frozen=True)
class ScopeSearch(Search):
    """A search for the smallest of ``candidates`` with the failure ``sought`` (FailureStatus.failure).

    ``left_out`` holds the sets that cannot be tried, with the reasons.
    """

    sought: str
    candidates: tuple[RunSpec, ...]
    left_out: Mapping[CudaGraph, tuple[Reason, ...]]

    purpose = "bisect"
    specs = "smaller sets"
    compares = True


@dataclass(frozen=True)
class ScopeFindings:
    """The status of each set that was tried, and what follows."""

    search: ScopeSearch
    statuses: Mapping[CudaGraph, FailureStatus]
    conclusion: Conclusion

    def is_certain(self, smallest: RunSpec) -> bool:
        """Return whether every set of fewer parts was tried and passes."""
        return not self.conclusion.unclear and not self.untried_below(smallest)

    def untried_below(self, smallest: RunSpec) -> list[RunSpec]:
        sets = list_candidates(self.search.cell.run_spec)
        return [
            one
            for one in sets
            if one.cuda_graph in self.search.left_out and len(one.captured_parts) < len(smallest.captured_parts)
        ]

    def has_status(self, one: RunSpec, status: Status) -> bool:
        found = self.statuses.get(one.cuda_graph)
        return found is not None and found.status == status


def scope_answer(found: ScopeFindings, missing: tuple[RunSpec, ...]) -> Answer:
    smallest = found.conclusion.smallest
    named = _not_reproduced(found) if smallest is None else _describe_smallest(found, smallest)
    return Answer(
        found.search,
        missing,
        is_found=smallest is not None and found.is_certain(smallest),
        evidence=[_table_of_sets(found, "no outcome yet" if missing else "not tried")],
        sentences=[*named, *_describe_unclear(found), *_describe_other_failures(found)],
        json_fields=_json_fields(found),
    )


def _table_of_sets(found: ScopeFindings, without: str) -> str:
    """Return a table with a row for each set. ``without`` is shown for sets without a status."""
    statuses = {graph: (status.status, status.description) for graph, status in found.statuses.items()}
    rows = [(one.cuda_graph.label, *statuses.get(one.cuda_graph, (without, ""))) for one in found.search.candidates]
    rows += [(graph.label, "left out", _format_reason(why[0])) for graph, why in found.search.left_out.items()]
    label, status = (max(map(len, column)) for column in list(zip(*rows, strict=True))[:2])
    return "\n".join(f"    {row[0]:{label}}  {row[1]:{status}}  {row[2]}".rstrip() for row in rows)


def _json_fields(found: ScopeFindings) -> dict[str, Any]:
    search, conclusion = found.search, found.conclusion
    return {
        "sought": search.sought,
        "smallest": conclusion.smallest and _graph_to_json(conclusion.smallest),
        "also": [_graph_to_json(one) for one in conclusion.also],
        "unclear": [_graph_to_json(one) for one in conclusion.unclear],
        "sets": [
            _graph_to_json(one) | _status_to_json(found.statuses.get(one.cuda_graph)) for one in search.candidates
        ],
        "left_out": [{"label": graph.label, "reasons": why} for graph, why in search.left_out.items()],
    }


def _describe_smallest(found: ScopeFindings, smallest: RunSpec) -> list[str]:
    search, also = found.search, found.conclusion.also
    passing = [
        one
        for one in search.candidates
        if one.captured_parts < smallest.captured_parts and found.has_status(one, "passes")
    ]
    sentences = [_name_smallest(found, smallest)]
    for one in found.untried_below(smallest):
        reasons = "; ".join(map(_format_reason, search.left_out[one.cuda_graph]))
        sentences += [f"{one.cuda_graph.label} was not tried: {reasons}."]
    if passing:
        sentences += [f"{_labels(passing)} {'passes' if len(passing) == 1 else 'pass'}."]
    parts_pass = frozenset().union(*(one.captured_parts for one in passing)) == smallest.captured_parts
    if len(smallest.captured_parts) > 1 and parts_pass and found.is_certain(smallest):
        sentences += ["Each of its parts passes in a smaller set: only their combination fails."]
    if also:
        sentences += [f"{_labels(also)}, of the same size, {'fails' if len(also) == 1 else 'fail'} too."]
    return sentences


def _name_smallest(found: ScopeFindings, smallest: RunSpec) -> str:
    label = smallest.cuda_graph.label
    is_whole = smallest.cuda_graph == found.search.cell.run_spec.cuda_graph
    if found.untried_below(smallest):
        name = f"{label}, the whole set," if is_whole else label
        return f"{name} is the smallest set that fails among those that could be tried."
    if not is_whole:
        return f"{label} is the smallest set that fails."
    return f"Only the whole set {'fails' if found.is_certain(smallest) else 'is known to fail'}: {label}."


def _not_reproduced(found: ScopeFindings) -> list[str]:
    if not found.conclusion.unclear:
        return ["Not reproduced: all sets pass now, including the whole set."]
    whole = found.statuses.get(found.search.cell.run_spec.cuda_graph)
    if whole is not None and whole.status != "unclear":
        return [f"Not reproduced: the whole set {whole.status} now."]
    return ["No set is known to fail."]


def _describe_unclear(found: ScopeFindings) -> list[str]:
    unclear = [one for one in found.conclusion.unclear if not found.has_status(one, "fails otherwise")]
    if not unclear:
        return []
    doubt = ", so a smaller set may fail" if found.conclusion.smallest else ""
    return [f"The status of {_labels(unclear)} is unclear{doubt}."]


def _describe_other_failures(found: ScopeFindings) -> list[str]:
    others = [
        f"{one.cuda_graph.label} ({found.statuses[one.cuda_graph].description})"
        for one in found.search.candidates
        if found.has_status(one, "fails otherwise")
    ]
    return [f"Another failure occurred, which may hide {found.search.sought}: {'; '.join(others)}."] if others else []


def _format_reason(reason: Reason) -> str:
    return f"[{reason.rule}] {reason.message}"


def _labels(sets: Sequence[RunSpec]) -> str:
    return join_names([one.cuda_graph.label for one in sets])


def _graph_to_json(one: RunSpec) -> dict[str, Any]:
    return members(one.cuda_graph, "label", "impl", "scope", "optimizer")


def _status_to_json(status: FailureStatus | None) -> dict[str, Any]:
    return {"status": status and status.status, "words": status.description if status else ""}
