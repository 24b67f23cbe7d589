"""The axes of a sweep, read as patches to the recipe: a grid, and a list of points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.recipe.field_check import Flaw, check_fields
from orchestrator.recipe.fields import PATCH
from orchestrator.recipe.source_fields import SourceFields, Tree, flatten, leaves
from orchestrator.suggestion import suggestion

Axes = dict[str, tuple[Tree, ...]]
"""The patches of each axis, by the axis's place."""

_GRID = "sweep.grid."
_EXAMPLE_SWEEP = "sweep: {grid: {training.precision: [fp32, bf16]}}"
_EXAMPLE_POINTS = "write points: [{parallelism.dp: 2}, {parallelism.dp: 4}]"
_WRONG_POINTS = Flaw("not a list of at least one mapping", _EXAMPLE_POINTS)


def read_axes(swept: Mapping[str, Any], source: SourceFields) -> Axes:
    """Read the axes from the fields under ``sweep``. Problems go to ``source``."""
    axes: Axes = {}
    for place, value in swept.items():
        if place.startswith(_GRID):
            axes[place] = _read_grid_axis(place, value, source)
        elif place == "sweep.points":
            axes[place] = _read_points(value, source)
        else:
            source.problem(place, value, *_check_place(place))
    _check_overlap(axes, source)
    return {place: axis for place, axis in axes.items() if axis}


def swept_fields(axes: Axes) -> Iterable[str]:
    """Return the fields that ``axes`` set, each once, in order."""
    return {field: None for axis in axes.values() for patch in axis for field, _ in leaves(patch)}


def _check_place(place: str) -> Flaw:
    """Return what is wrong with a ``place`` that is neither in the grid nor the list of points."""
    name = place.removeprefix("sweep.")
    if place in ("sweep", "sweep.grid"):
        return Flaw("not a mapping of at least one axis", f"leave it out, or write {_EXAMPLE_SWEEP}")
    if name.startswith("points."):
        return _WRONG_POINTS
    if PATCH.check_name(name) is None:
        return Flaw("an axis belongs under grid", f"write sweep: {{grid: {{{name}: [...]}}}}")
    return Flaw("no such field", suggestion(name.partition(".")[0], ("grid", "points")))


def _read_grid_axis(place: str, values: Any, source: SourceFields) -> tuple[Tree, ...]:
    name = place.removeprefix(_GRID)
    if flaw := PATCH.check_name(name) or _check_values(name, values):
        source.problem(place, values, *flaw)
        return ()
    return tuple(_read_patch({name: value}, f"{place}[{i}]", name, source) for i, value in enumerate(values))


def _check_values(name: str, values: Any) -> Flaw | None:
    if not isinstance(values, list) or not values:
        return Flaw("an axis is a list of at least one value", f"write {name}: [first, second]")
    schema, key = PATCH.fields.get(name, (None, ""))
    if schema and schema.is_list(key) and not all(isinstance(value, list) for value in values):
        fix = f"[[attn], [mlp]] are two values, [[attn, mlp]] is one: write {name}: [[attn], [attn, mlp]]"
        return Flaw("an axis over a list is a list of lists", fix)
    return None


def _read_points(points: Any, source: SourceFields) -> tuple[Tree, ...]:
    if not isinstance(points, list) or not points:
        source.problem("sweep.points", points, *_WRONG_POINTS)
        return ()
    return tuple(_read_patch(point, f"sweep.points[{i}]", "", source) for i, point in enumerate(points))


def _read_patch(values: Any, place: str, axis: str, source: SourceFields) -> Tree:
    """Read one point of an axis. ``place`` ends with the name of a grid ``axis``, so messages do not repeat it."""
    if not (isinstance(values, Mapping) and values):
        source.problem(place, values, "a point is a mapping of fields to values", _EXAMPLE_POINTS)
        return {}

    def locate(field: str) -> str:
        rest = field.removeprefix(axis).removeprefix(".")
        return f"{place}.{rest}" if rest else place

    fields, repeated = flatten(values)
    for written, *clash in repeated:
        source.problem(locate(written), *clash)
    return check_fields(source, PATCH, fields, locate)


def _check_overlap(axes: Axes, source: SourceFields) -> None:
    """Reject a field that two axes set. The later axis would win, and the product would repeat every cell."""
    owners: dict[str, str] = {}
    for place, axis in axes.items():
        for field in swept_fields({place: axis}):
            first = owners.setdefault(field, place)
            if first != place:
                source.problem_at(place, f"sets {field}, and so does {first}", "keep one of them, or write points")
