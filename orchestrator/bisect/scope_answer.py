"""What ``bisect`` looks for, and what it says in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.contract.plan import Cell, Plan, Reason
from launch.contract.spec import CudaGraph
from orchestrator.bisect.failure_status import FailureStatus
from orchestrator.bisect.scope_candidates import Candidate, Conclusion, candidates_of
from orchestrator.bisect.side_sweep import side_sweep_name


@dataclass(frozen=True)
class ScopeSearch:
    """What is looked for: the smallest of ``candidates`` that fails as ``cell`` of ``plan`` did, by its ``failure``.

    ``sought`` is what tells that failure from others (orchestrator.bisect.failure_status.Stand). ``left_out`` are sets
    that cannot be tried, and why.
    """

    plan: Plan
    cell: Cell
    failure: str
    sought: str
    candidates: tuple[Candidate, ...]
    left_out: Mapping[CudaGraph, tuple[Reason, ...]]

    @property
    def name(self) -> str:
        """Of the sweep that holds the runs."""
        return side_sweep_name(self.plan, self.cell, "bisect")

    @property
    def untried(self) -> tuple[Candidate, ...]:
        """The sets left out."""
        return tuple(one for one in candidates_of(self.cell.run_spec) if one.graph in self.left_out)


@dataclass(frozen=True)
class ScopeAnswer:
    """How sets stand, and what follows from it; ``conclusion`` is None where runs were lost."""

    search: ScopeSearch
    found: Mapping[CudaGraph, FailureStatus]
    conclusion: Conclusion | None

    @property
    def exit_code(self) -> int:
        """0 the smallest set that fails is known; 2 runs were lost; 4 it cannot be told."""
        if self.conclusion is None:
            return 2
        return 0 if self.conclusion.smallest and self.certain(self.conclusion.smallest) else 4

    def certain(self, smallest: Candidate) -> bool:
        """Whether every set of fewer parts was tried, and passes."""
        return bool(self.conclusion and not self.conclusion.unclear) and not self.untried_below(smallest)

    def untried_below(self, smallest: Candidate) -> tuple[Candidate, ...]:
        return tuple(one for one in self.search.untried if len(one.parts) < len(smallest.parts))

    @property
    def fail_otherwise(self) -> tuple[Candidate, ...]:
        stands = ((one, self.found.get(one.graph)) for one in self.search.candidates)
        return tuple(one for one, stand in stands if stand and stand.status == "fails otherwise")

    @property
    def text(self) -> str:
        """What fails, a row a set, and the answer. Markdown that a terminal can show."""
        search = self.search
        rows = [(one.graph.label, *self._row(self.found.get(one.graph))) for one in search.candidates]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(w.ljust(n) for w, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        left = [
            f"{g.label:{widths[0]}}  left out  [{found[0].rule}] {found[0].message}"
            for g, found in search.left_out.items()
        ]
        head = f"{search.cell.label} of {search.plan.name} fails: {search.failure}"
        return "\n".join((head, "", *(f"    {row}" for row in (*table, *left)), "", self.words)) + "\n"

    def _row(self, stand: FailureStatus | None) -> tuple[str, str]:
        if stand is None:
            return ("no outcome yet" if self.conclusion is None else "not tried", "")
        return (stand.status, stand.words)

    @property
    def words(self) -> str:
        """The answer in a sentence or two."""
        if self.conclusion is None:
            return "Runs were lost before the answer was known: the same command takes them up."
        sentences = (*_named(self, self.conclusion), *_unclear(self, self.conclusion), *_otherwise(self))
        return " ".join(sentences)


def _named(answer: ScopeAnswer, conclusion: Conclusion) -> list[str]:
    smallest = conclusion.smallest
    if smallest is None:
        return [_not_reproduced(answer, conclusion)]
    whole = smallest.graph == answer.search.cell.run_spec.cuda_graph
    untried = answer.untried_below(smallest)
    passing = [one for one in answer.search.candidates if one.parts < smallest.parts and _passes(answer, one)]
    sentences = [_smallest(smallest, whole, answer)]
    sentences += [f"{one.graph.label} was not tried: {_why(answer, one)}." for one in untried]
    if passing:
        sentences += [f"{_labels(passing)} {_verb(passing, 'pass', 'es')}."]
    parts_pass = frozenset().union(*(one.parts for one in passing)) == smallest.parts
    if len(smallest.parts) > 1 and parts_pass and answer.certain(smallest):
        sentences += ["Each of its parts passes in a smaller set: only their combination fails."]
    if conclusion.also:
        sentences += [f"{_labels(conclusion.also)}, as small, {_verb(conclusion.also, 'fail', 's')} too."]
    return sentences


def _smallest(smallest: Candidate, whole: bool, answer: ScopeAnswer) -> str:
    label = smallest.graph.label
    if answer.untried_below(smallest):
        named = f"{label}, the whole set," if whole else label
        return f"{named} is the smallest set that fails of those that could be tried."
    if not whole:
        return f"{label} is the smallest set that fails."
    return f"Only the whole set {'fails' if answer.certain(smallest) else 'is known to fail'}, {label}."


def _not_reproduced(answer: ScopeAnswer, conclusion: Conclusion) -> str:
    if not conclusion.unclear:
        return "Not reproduced: no set fails any more, the whole one included."
    whole = answer.found.get(answer.search.cell.run_spec.cuda_graph)
    if whole is not None and whole.status != "unclear":
        return f"Not reproduced: the whole set {'passes' if whole.status == 'passes' else 'fails otherwise'} now."
    return "No set is known to fail."


def _passes(answer: ScopeAnswer, one: Candidate) -> bool:
    stand = answer.found.get(one.graph)
    return stand is not None and stand.status == "passes"


def _why(answer: ScopeAnswer, one: Candidate) -> str:
    return "; ".join(f"[{reason.rule}] {reason.message}" for reason in answer.search.left_out[one.graph])


def _verb(subjects: Sequence[Candidate], verb: str, ending: str) -> str:
    return verb + ending if len(subjects) == 1 else verb


def _unclear(answer: ScopeAnswer, conclusion: Conclusion) -> list[str]:
    otherwise = answer.fail_otherwise
    unclear = [one for one in conclusion.unclear if one not in otherwise]
    if not unclear:
        return []
    doubt = ", so that a smaller set may fail" if conclusion.smallest else ""
    return [f"What becomes of {_labels(unclear)} is unclear{doubt}."]


def _otherwise(answer: ScopeAnswer) -> list[str]:
    """Failures that nobody looked for, each a finding of its own."""
    found = [f"{one.graph.label} ({answer.found[one.graph].words})" for one in answer.fail_otherwise]
    if not found:
        return []
    return [f"Another failure than {answer.search.sought}, a finding of its own, which hides whether that comes about: {'; '.join(found)}."]  # fmt: skip


def _labels(sets: Sequence[Candidate]) -> str:
    *others, last = (one.graph.label for one in sets)
    return f"{', '.join(others)} and {last}" if others else last


def answer_to_json(answer: ScopeAnswer) -> dict[str, Any]:
    """The content of bisect.json."""
    search, conclusion = answer.search, answer.conclusion
    return {
        "format": 1,
        "sweep": search.plan.name,
        "cell_id": search.cell.cell_id,
        "label": search.cell.label,
        "failure": search.failure,
        "sought": search.sought,
        "exit_code": answer.exit_code,
        "text": answer.words,
        "smallest": _graph(conclusion.smallest) if conclusion and conclusion.smallest else None,
        "also": [_graph(one) for one in conclusion.also] if conclusion else [],
        "unclear": [_graph(one) for one in conclusion.unclear] if conclusion else [],
        "sets": [{**_graph(one), **_stand(answer.found.get(one.graph))} for one in search.candidates],
        "left_out": [
            {"label": graph.label, "reasons": [vars(reason) for reason in reasons]}
            for graph, reasons in search.left_out.items()
        ],
    }


def _graph(one: Candidate) -> dict[str, Any]:
    graph = one.graph
    return {"label": graph.label, "impl": graph.impl, "scope": graph.scope, "optimizer": graph.optimizer}


def _stand(stand: FailureStatus | None) -> dict[str, Any]:
    return {"status": stand.status if stand else None, "words": stand.words if stand else ""}
