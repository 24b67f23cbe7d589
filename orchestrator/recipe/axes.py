"""The axes of a sweep: grids and lists of points, read as patches to the recipe they stand in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.errors import suggestion
from orchestrator.recipe.field_check import Checker
from orchestrator.recipe.fields import NOT_SWEPT, SCHEMAS, SECTIONS, TOP, is_field, meant
from orchestrator.recipe.source_fields import Tree, flatten

Axes = dict[str, tuple[Tree, ...]]
"""Patches by the place that their axis was written at."""

EXAMPLE_SWEEP = "sweep: {grid: {training.precision: [fp32, bf16]}}"
EXAMPLE_POINTS = "points: [{parallelism.dp: 2}, {parallelism.dp: 4}]"


def read_axes(swept: Mapping[str, Any], checker: Checker) -> Axes:
    """The axes of the fields under ``sweep``; what is wrong with them goes to ``checker``."""
    reader = _AxisReader(checker)
    axes: Axes = {}
    for place, value in swept.items():
        if place.startswith("sweep.grid."):
            axes[place] = reader.grid_axis(place, value)
        elif place == "sweep.points":
            axes[place] = reader.read_points(value)
        else:
            reader.no_axis(place, value)
    _check_apart(axes, checker)
    return {place: axis for place, axis in axes.items() if axis}


def swept_fields(axes: Axes) -> Iterable[str]:
    """The fields that ``axes`` set, each once, in order."""
    return {field: None for axis in axes.values() for patch in axis for field in flatten(patch)[0]}


class _AxisReader:
    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._problem = checker.problem

    def no_axis(self, place: str, value: Any) -> None:
        rest = place.removeprefix("sweep.")
        if place in ("sweep", "sweep.grid") and value in (None, {}):
            self._problem(place, value, "no axis", f"leave it out, or give axes: {EXAMPLE_SWEEP}")
        elif place in ("sweep", "sweep.grid"):
            self._problem(place, value, "not a mapping of axes", EXAMPLE_SWEEP)
        elif rest.startswith("points."):
            self._problem(place, value, "points are a list of mappings", EXAMPLE_POINTS)
        elif is_field(rest):
            self._problem(place, value, "an axis stands under grid", f"sweep: {{grid: {{{rest}: [...]}}}}")
        else:
            self._problem(place, value, "no such field", suggestion(rest, ("grid", "points")))

    def grid_axis(self, place: str, values: Any) -> tuple[Tree, ...]:
        key = place.removeprefix("sweep.grid.")
        section, _, name = key.partition(".")
        if not self._can_vary(key, place, values):
            return ()
        if not isinstance(values, list) or not values:
            self._problem(place, values, "an axis is a list of at least one value", f"{key}: [first, second]")
        elif name and section in SCHEMAS and SCHEMAS[section].is_list(name) and not _lists(values):
            remedy = f"[[attn], [mlp]] are two values, [[attn, mlp]] is one: {key}: [[attn], [attn, mlp]]"
            self._problem(place, values, "an axis over a list is a list of lists", remedy)
        else:
            return tuple(self._patch({key: value}, f"{place}[{index}]", key) for index, value in enumerate(values))
        return ()

    def read_points(self, points: Any) -> tuple[Tree, ...]:
        if not isinstance(points, list) or not points:
            self._problem("sweep.points", points, "points are a list of mappings, at least one", EXAMPLE_POINTS)
            return ()
        patches = []
        for index, point in enumerate(points):
            place = f"sweep.points[{index}]"
            if isinstance(point, Mapping) and point:
                patches.append(self._patch(point, place, ""))
            else:
                self._problem(place, point, "a point is a mapping of keys to values", EXAMPLE_POINTS)
        return tuple(patches)

    def _patch(self, raw: Mapping[str, Any], place: str, key: str) -> Tree:
        """One point of an axis. ``key`` is the axis's own, which messages need not say again."""

        def at(field: str) -> str:
            rest = field.removeprefix(key).removeprefix(".")
            return f"{place}.{rest}" if rest else place

        fields, twice = flatten(raw)
        for written, *clash in twice:
            self._problem(at(written), *clash)
        return self._checker.patch({f: v for f, v in fields.items() if key or self._may_vary(f, at(f), v)}, at)

    def _can_vary(self, key: str, place: str, value: Any) -> bool:
        top = key.partition(".")[0]
        known = is_field(key) or top in NOT_SWEPT
        if not known:
            self._problem(place, value, "no such field", meant(key, SCHEMAS[top].fields if top in SECTIONS else TOP))
        return known and self._may_vary(key, place, value)

    def _may_vary(self, key: str, place: str, value: Any) -> bool:
        top = key.partition(".")[0]
        if top in NOT_SWEPT:
            message = f"{top} is one for the whole sweep and cannot be an axis"
            self._problem(place, value, message, "write another recipe")
        return top not in NOT_SWEPT


def _check_apart(axes: Axes, checker: Checker) -> None:
    """No field is set by two axes: the later one would win, and the product hold every cell many times."""
    owners: dict[str, str] = {}
    for place, axis in axes.items():
        for field in swept_fields({place: axis}):
            first = owners.setdefault(field, place)
            if first != place:
                message = f"sets {field}, and so does {first}"
                checker.problems.append(checker.source.missing(place, message, "keep one of them, or write points"))


def _lists(values: Iterable[Any]) -> bool:
    return all(isinstance(value, list) for value in values)
