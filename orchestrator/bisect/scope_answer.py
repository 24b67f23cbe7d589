"""The answer of `bisect`: the smallest captured set that fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.common.atomic_files import members
from launch.common.text import align, listed
from launch.contract.plan import Reason
from launch.contract.spec import CudaGraph, RunSpec
from orchestrator.bisect.failure_status import FailureStatus
from orchestrator.bisect.scope_candidates import Conclusion, list_candidates
from orchestrator.bisect.search import Answer, Search

NOT_REPRODUCED = "Not reproduced: all sets pass now, including the whole set."


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

    def untried_below(self, smallest: RunSpec) -> list[RunSpec]:
        sets = list_candidates(self.search.cell.run_spec)
        return [
            one
            for one in sets
            if one.cuda_graph in self.search.left_out and len(one.captured_parts) < len(smallest.captured_parts)
        ]


def scope_answer(found: ScopeFindings, missing: tuple[RunSpec, ...]) -> Answer:
    smallest = found.conclusion.smallest
    unknown = "No set is known to fail." if found.conclusion.unclear else NOT_REPRODUCED
    named = [unknown] if smallest is None else _describe_smallest(found, smallest)
    return Answer(
        found.search,
        missing,
        # Every set of fewer parts must have been tried, and must pass.
        is_found=smallest is not None and not (found.conclusion.unclear or found.untried_below(smallest)),
        evidence=[_table_of_sets(found, "no outcome yet" if missing else "not tried")],
        sentences=[*named, *_describe_unclear(found)],
        json_fields=_json_fields(found),
    )


def _table_of_sets(found: ScopeFindings, without: str) -> str:
    """Return a table with a row for each set. ``without`` is shown for sets without a status."""
    statuses = {graph: (status.status, status.description) for graph, status in found.statuses.items()}
    rows = [(one.cuda_graph.label, *statuses.get(one.cuda_graph, (without, ""))) for one in found.search.candidates]
    rows += [(graph.label, "left out", _format_reason(why[0])) for graph, why in found.search.left_out.items()]
    return "\n".join(f"    {line}" for line in align(rows))


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
    graph, untried = smallest.cuda_graph, found.untried_below(smallest)
    whole = ", the whole set," if graph == found.search.cell.run_spec.cuda_graph else ""
    among = " among those that could be tried" if untried else ""
    reasons = [(one, "; ".join(map(_format_reason, found.search.left_out[one.cuda_graph]))) for one in untried]
    return [
        f"{graph.label}{whole} is the smallest set that fails{among}.",
        *(f"{one.cuda_graph.label} was not tried: {why}." for one, why in reasons),
    ]


def _describe_unclear(found: ScopeFindings) -> list[str]:
    """Say which sets neither pass nor fail as the run did. The table has what happened to each."""
    unclear = [one.cuda_graph.label for one in found.conclusion.unclear]
    if not unclear:
        return []
    doubt = ", so a smaller set may fail" if found.conclusion.smallest else ""
    return [f"The status of {listed(unclear)} is unclear{doubt}."]


def _format_reason(reason: Reason) -> str:
    return f"[{reason.rule}] {reason.message}"


def _graph_to_json(one: RunSpec) -> dict[str, Any]:
    return members(one.cuda_graph, "label", "impl", "scope", "optimizer")


def _status_to_json(status: FailureStatus | None) -> dict[str, Any]:
    return {"status": status and status.status, "words": status.description if status else ""}
