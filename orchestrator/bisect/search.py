"""What both searches of `bisect` share: the failing cell that they examine, and the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from launch.common.atomic_files import members
from launch.contract.exit_codes import ExitCode
from launch.contract.plan import Cell, Plan
from launch.contract.spec import RunSpec


@dataclass(frozen=True)
class Search:
    """A search for the cause of a failure. ``failure`` describes how ``cell`` of ``plan`` fails."""

    plan: Plan
    cell: Cell
    failure: str

    purpose: ClassVar[str]
    """The word that the search's sweep and its answer's files have in their names."""
    specs: ClassVar[str]
    """What the search runs, for readers of the recipe."""
    compares: ClassVar[bool]
    """Whether the search repeats runs, compares them with eager baselines, and gets a report."""

    @property
    def name(self) -> str:
        """The name of the search's own sweep. Only the digest in it distinguishes the cell from others of its sweep."""
        return f"{self.plan.name}-{self.purpose}-{self.cell.cell_id.rpartition('-')[2]}"


@dataclass(frozen=True)
class Answer:
    """What the records of a search show. The ``missing`` runs must have outcomes before the search can go on or end."""

    search: Search
    missing: tuple[RunSpec, ...]
    is_found: bool = False
    evidence: Sequence[str] = ()
    """The paragraphs of evidence."""
    sentences: Sequence[str] = ()
    """The conclusion, if no run is missing."""
    json_fields: Mapping[str, Any] = field(default_factory=dict)
    """The fields that only this kind of search has."""

    @property
    def exit_code(self) -> ExitCode:
        """0 if the cause is found, 2 if runs were lost, 4 if the cause is unknown."""
        if self.missing:
            return ExitCode.UNFINISHED
        return ExitCode.PASS if self.is_found else ExitCode.INCONCLUSIVE

    @property
    def text(self) -> str:
        """The failure, the evidence and the conclusion as Markdown. It is also readable in a terminal."""
        head = f"{self.search.cell.label} of {self.search.plan.name} fails: {self.search.failure}"
        return "\n\n".join((head, *self.evidence, self.summary)) + "\n"

    @property
    def summary(self) -> str:
        if self.missing:
            return "Runs were lost before the answer was known. The same command resumes them."
        return " ".join(self.sentences)


def answer_to_json(answer: Answer) -> dict[str, Any]:
    """Return the content of bisect.json or layers.json."""
    search = answer.search
    return {
        "format": 1,
        "sweep": search.plan.name,
        **members(search.cell, "cell_id", "label"),
        "failure": search.failure,
        "exit_code": answer.exit_code,
        "text": answer.summary,
        **answer.json_fields,
    }
