"""How a comparison of two sweeps is worded: the answer first, then each cell that differs, then what differs around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from analysis.compare.cell_changes import Change
from analysis.compare.sweep_changes import CellComparison, Comparison, ProvenanceDifference

_HEADINGS: dict[Change, str] = {
    "worse": "worse",
    "unfinished": "without an outcome",
    "inconclusive": "no longer to be told",
    "not held": "not held: nothing to hold it against",
    "changed": "different",
    "better": "better",
}


_ANSWERS: dict[Change, str] = {
    "worse": "worse",
    "unfinished": "cannot be told yet",
    "inconclusive": "cannot be told",
}


def format_comparison(comparison: Comparison, before: str, after: str) -> str:
    """``before`` and ``after`` are what the user calls the two."""
    return "\n".join((f"{after} against {before}: {_answer(comparison)}", *_lines(comparison)))


def _lines(comparison: Comparison) -> Iterator[str]:
    for change, heading in _HEADINGS.items():
        cells = [cell for cell in comparison.cells if cell.change == change]
        if cells:
            yield f"\n{heading}:"
        for cell in cells:
            yield f"  {cell.label}"
            yield from (f"    {one.aspect}: {one.before} -> {one.after}" for one in cell.differences)
    yield from _by_label(comparison.cells)
    yield from _around("the environment differs in", comparison.environment)
    yield from _around("the recipe differs in", comparison.recipe)


def _answer(comparison: Comparison) -> str:
    counts = Counter(cell.change for cell in comparison.cells)
    found = [f"{counts[change]} {heading}" for change, heading in _HEADINGS.items() if counts[change]]
    same = f"{counts[None]} of {len(comparison.cells)} cells as before"
    answer = _ANSWERS.get(comparison.change, "nothing is worse") if comparison.change else "nothing is worse"
    return f"{answer} ({'; '.join([*found, same])})"


def _by_label(cells: Sequence[CellComparison]) -> Iterator[str]:
    """An id says all that determines a cell; a label only what sets it apart in its sweep."""
    labels = [cell.label for cell in cells if cell.matched == "label"]
    if labels:
        yield "\nmatched by label, since their ids differ (other settings, or another version's fields):"
        yield from (f"  {label}" for label in labels)


def _around(heading: str, unlike: Sequence[ProvenanceDifference]) -> Iterator[str]:
    if unlike:
        yield f"\n{heading}:"
        yield from (f"  {one.key}: {one.before} -> {one.after}" for one in unlike)
