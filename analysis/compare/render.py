"""Format a comparison of two sweeps: the answer, each cell that differs, then the differences of environment and recipe."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from analysis.compare.cell_changes import KINDS, NOTHING_WORSE
from analysis.compare.sweep_changes import Comparison, ProvenanceDifference
from launch.common.text import count

_BY_LABEL = "matched by label, since their ids differ (other settings, or fields of another version)"

_KERNELS = re.compile(
    r"torch|triton|transformer[-_]engine|megatron-(core|bridge)|flash[-_]attn.*|apex|nvidia-(nccl|cudnn|cublas|cuda-runtime)(-cu\d+)?"
)
"""The packages that bring kernels, or choose them."""


def format_comparison(comparison: Comparison, before: str, after: str) -> str:
    """Return the text. ``before`` and ``after`` are the user's names of the two sweeps."""
    return "\n".join((f"{after} against {before}: {_answer(comparison)}", *_lines(comparison)))


def _lines(comparison: Comparison) -> Iterator[str]:
    for change, row in KINDS.items():
        yield from _section(row.heading, [
            line
            for cell in comparison.cells
            if cell.change == change
            for line in (cell.label, *(f"  {one.aspect}: {one.before} -> {one.after}" for one in cell.differences))
        ])  # fmt: skip
    yield from _section(_BY_LABEL, [cell.label for cell in comparison.cells if cell.matched == "label"])
    yield from _section("the environment differs in", _without_minor_packages(comparison.environment))
    yield from _section("the recipe differs in", _differing(comparison.recipe))


def _without_minor_packages(found: Sequence[ProvenanceDifference]) -> list[str]:
    """Return a line for each difference, and one for all packages that hardly change numbers or speed."""
    minor = [one for one in found if one.key.startswith("packages.") and not _KERNELS.fullmatch(one.key[9:].lower())]
    rest = [f"{count('other package', len(minor))} differ (--json lists each)"] if minor else []
    return [*_differing(one for one in found if one not in minor), *rest]


def _differing(found: Iterable[ProvenanceDifference]) -> list[str]:
    return [f"{one.key}: {one.before} -> {one.after}" for one in found]


def _section(heading: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"\n{heading}:"
        yield from (f"  {line}" for line in lines)


def _answer(comparison: Comparison) -> str:
    counts = Counter(cell.change for cell in comparison.cells)
    found = [f"{counts[change]} {row.heading}" for change, row in KINDS.items() if counts[change]]
    same = f"{counts[None]} of {len(comparison.cells)} cells as before"
    answer = KINDS[comparison.change].answer if comparison.change else NOTHING_WORSE
    return f"{answer} ({'; '.join([*found, same])})"
