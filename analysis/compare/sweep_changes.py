"""Compare two sweeps cell by cell: verdict, outcome, speed and memory.

Cells are matched by their ids, which cover everything that determines them. Cells without such a match are matched by labels
that are unique on both sides: with the fields of another version, the same configuration has another id.

The rules of analysis/compare/cell_changes.py say which figures are worse. A missing cell is worse, too; a new cell is judged as
its own report judges it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from analysis.compare.cell_changes import KINDS, MEMORY_TOLERANCE, Change, FigureChange, differences, judge_alone, worst
from analysis.compare.golden import Golden, GoldenCell
from analysis.records.provenance import flat
from analysis.report.json_report import to_json
from launch.contract.exit_codes import ExitCode


@dataclass(frozen=True)
class CellComparison:
    """A cell on one or both sides. ``matched`` says how its counterpart on the other side was found."""

    label: str
    cell_id: str
    matched: Literal["id", "label", "no"]
    differences: tuple[FigureChange, ...]
    seconds: float = 0.0
    """The total duration of the cell's runs in the later sweep."""

    @property
    def change(self) -> Change | None:
        """The worst of its differences."""
        return worst([difference.change for difference in self.differences])


@dataclass(frozen=True)
class ProvenanceDifference:
    """A key of the environment, or of the recipe, whose values differ; "unset" where a side has none."""

    key: str
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """Two sweeps, with the differences of their cells, environments and recipes."""

    before: str
    after: str
    cells: tuple[CellComparison, ...]
    environment: tuple[ProvenanceDifference, ...]
    recipe: tuple[ProvenanceDifference, ...]
    memory_tolerance: float

    @property
    def change(self) -> Change | None:
        return worst([change for cell in self.cells if (change := cell.change)])

    @property
    def exit_code(self) -> ExitCode:
        """The exit code. 3: a regression. 2: a run without an outcome. 4: only unknown now. 0: nothing worse."""
        return KINDS[self.change].exit_code if self.change else ExitCode.PASS


def compare_sweeps(before: Golden, after: Golden, memory_tolerance: float = MEMORY_TOLERANCE) -> Comparison:
    """Compare ``after`` with ``before``. Cells are in the order of ``before``, then new ones."""
    partners = _matched(before.cells, after.cells)
    matched = {partner.cell_id for partner, _ in partners.values()}
    cells = [
        _compare_cell(cell, *partners[cell.cell_id], memory_tolerance)
        if cell.cell_id in partners
        else _removed(cell, after)
        for cell in before.cells
    ]
    cells += [_added(cell) for cell in after.cells if cell.cell_id not in matched]
    return Comparison(
        before.sweep,
        after.sweep,
        tuple(cells),
        _differences(_values(before), _values(after)),
        _differences(_fields(before.recipe), _fields(after.recipe)),
        memory_tolerance,
    )


def _matched(
    before: Sequence[GoldenCell], after: Sequence[GoldenCell]
) -> dict[str, tuple[GoldenCell, Literal["id", "label"]]]:
    """Return, by the id of each matched cell of ``before``, its counterpart in ``after`` and how it was found."""
    by_id = {cell.cell_id: cell for cell in after}
    found: dict[str, tuple[GoldenCell, Literal["id", "label"]]] = {
        cell.cell_id: (by_id[cell.cell_id], "id") for cell in before if cell.cell_id in by_id
    }
    left, there = _by_label(before, found.keys()), _by_label(after, found.keys())
    return found | {left[label].cell_id: (there[label], "label") for label in left.keys() & there.keys()}


def _by_label(cells: Sequence[GoldenCell], without: Any) -> dict[str, GoldenCell]:
    """Return the cells with a unique label."""
    rest = [cell for cell in cells if cell.cell_id not in without]
    counts = Counter(cell.label for cell in rest)
    return {cell.label: cell for cell in rest if counts[cell.label] == 1}


def _compare_cell(
    before: GoldenCell, after: GoldenCell, matched: Literal["id", "label"], tolerance: float
) -> CellComparison:
    return CellComparison(after.label, after.cell_id, matched, differences(before, after, tolerance), after.seconds)


def _removed(cell: GoldenCell, after: Golden) -> CellComparison:
    now = next((one for one in after.not_run if one.cell_id == cell.cell_id), None) or next(
        (one for one in after.not_run if one.label == cell.label), None
    )
    words = f"{now.state} ({now.rules})" if now else "not there"
    return CellComparison(cell.label, cell.cell_id, "no", (FigureChange("cell", "worse", _summary(cell), words),))


def _added(cell: GoldenCell) -> CellComparison:
    """Judge a new cell as its own report does."""
    difference = FigureChange("cell", judge_alone(cell).change, "not there", _summary(cell))
    return CellComparison(cell.label, cell.cell_id, "no", (difference,), cell.seconds)


def _summary(cell: GoldenCell) -> str:
    return f"{cell.outcome}, {cell.verdict.verdict}" if cell.verdict else cell.outcome


# --- what differs around them ---------------------------------------------------------------------------------------

_FIRST = ("versions.", "hardware.gpus", "hardware.driver", "code.", "digests.", "data_digest", "choices.", "hardware.")


def _differences(
    before: Mapping[str, tuple[str, ...]], after: Mapping[str, tuple[str, ...]]
) -> tuple[ProvenanceDifference, ...]:
    """Return the keys whose values differ, first those that may change numbers or speed. Counts of runs do not matter."""
    keys = sorted(before.keys() | after.keys(), key=lambda key: (_place(key), key))
    pairs = ((key, before.get(key, ("unset",)), after.get(key, ("unset",))) for key in keys)
    return tuple(
        ProvenanceDifference(key, " | ".join(was), " | ".join(now)) for key, was, now in pairs if set(was) != set(now)
    )


def _values(golden: Golden) -> dict[str, tuple[str, ...]]:
    return {key: tuple(value for value, _ in values) for key, values in golden.provenance.items()}


def _place(key: str) -> int:
    return next((place for place, prefix in enumerate(_FIRST) if key.startswith(prefix)), len(_FIRST))


_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
"""A number that recipes may hold, but that PyYAML reads as text: 1e-5."""


def _fields(recipe: str) -> dict[str, tuple[str, ...]]:
    """Return the fields of a recipe by their dotted keys, or one field with the whole text if it is not a mapping."""
    try:
        content = yaml.safe_load(recipe)
    except yaml.YAMLError:
        content = None
    fields = flat(content) if isinstance(content, dict) else {"recipe": recipe}
    return {key: (str(float(value)) if _EXPONENT.fullmatch(value) else value,) for key, value in fields.items()}


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Return what ``compare --json`` prints."""
    cells = [{**to_json(cell), "change": cell.change} for cell in comparison.cells]
    return {**to_json(comparison), "exit_code": comparison.exit_code, "change": comparison.change, "cells": cells}
