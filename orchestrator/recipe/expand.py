"""A recipe's expansion into cells: the product of its axes, each cell resolved to a RunSpec. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from launch.contract.outcomes import Expectation
from launch.contract.records.events import Phase
from launch.contract.spec import CudaGraph, Data, Device, Fault, Model, Parallelism, Placement, RunSpec, Training
from orchestrator.errors import input_error, suggestion
from orchestrator.recipe.aliases import canonical_place, canonical_values
from orchestrator.recipe.fields import FIELDS, HEAD, SCHEMAS, Resources
from orchestrator.recipe.recipe import Recipe
from orchestrator.recipe.section_schema import Schema
from orchestrator.recipe.source_fields import Tree

BEFORE_CAPTURE: tuple[Phase, ...] = ("init", "build", "warmup")
"""Phases that an eager twin goes through as well: what a recipe expects there, it expects of the twin too."""

_WITHIN_A_WORKLOAD = (
    "cuda_graph.impl",
    "cuda_graph.scope",
    "cuda_graph.optimizer",
    "resources.minutes_per_run",
    "resources.hang_minutes",
)
"""What may set cells of one workload apart: said by a cell's graph label, or by nothing, since it changes no run."""


@dataclass(frozen=True)
class ResolvedCell:
    """One configuration, before anyone has judged it."""

    spec: RunSpec
    settings: tuple[str, ...]
    """What sets its workload apart in the sweep: "precision=bf16"."""
    expect: Expectation
    resources: Resources
    twin: bool = False
    """Whether it was added as the eager twin of graphed cells, rather than asked for."""

    @property
    def label(self) -> str:
        return ", ".join((self.spec.cuda_graph.label, *self.settings))


def expand(recipe: Recipe, device: Device) -> tuple[ResolvedCell, ...]:
    """Every cell of ``recipe``, each once: a workload's eager cell first, then its graphed cells in the recipe's order.

    ``device`` is what ``resources.device: auto`` stands for. Twins of graphed cells are added.

    Raises:
        InputError: two points of the sweep are one cell, yet expect different outcomes or have different time limits.
    """
    build = _Builder(recipe, device)
    workloads: dict[str, dict[str, ResolvedCell]] = {}
    for patches in itertools.product(*recipe.axes):
        cell = build.cell(patches)
        present = workloads.setdefault(cell.spec.workload_id, {}).setdefault(cell.spec.cell_id, cell)
        if (present.expect, present.resources) != (cell.expect, cell.resources):
            message = f"two points are the same run ({cell.label}), but differ in expect or resources"
            raise input_error(f"{recipe.file}: sweep", message, "write expect and time limits into points, one a run")
    return tuple(itertools.chain.from_iterable(_eager_first(cells) for cells in workloads.values()))


def _eager_first(workload: Mapping[str, ResolvedCell]) -> list[ResolvedCell]:
    """The cells of one workload, with the eager twin where graphed cells have none."""
    cells = sorted(workload.values(), key=lambda cell: cell.spec.graphed)
    if not cells[-1].spec.graphed:
        return cells
    spec = replace(cells[-1].spec, cuda_graph=CudaGraph("none", (), cells[-1].spec.cuda_graph.warmup_steps))
    if spec.cell_id in workload:
        return cells
    expect = next((cell.expect for cell in cells if cell.expect.phase in BEFORE_CAPTURE), Expectation())
    return [replace(cells[-1], spec=spec, expect=expect, twin=True), *cells]


def filter_cells(cells: Sequence[ResolvedCell], selections: Sequence[str]) -> tuple[ResolvedCell, ...]:
    """The cells that every ``key=value`` of ``selections`` agrees with, and their eager twins.

    Raises:
        InputError: a selection names no field, holds no value of it, or no cell is left.
    """
    if not selections:
        return tuple(cells)
    wanted = [_selection(text) for text in selections]
    picked = {c.spec.cell_id for c in cells if all(_value(c.spec, key) == value for key, value in wanted)}
    if not picked:
        there = {key: {str(_value(cell.spec, key)) for cell in cells} for key, _ in wanted}
        values = "; ".join(f"{key} is {', '.join(sorted(values)[:12])}" for key, values in there.items())
        raise input_error("--only", f"no cell has {' and '.join(selections)}", f"in this recipe {values}")
    workloads = {cell.spec.workload_id for cell in cells if cell.spec.cell_id in picked and cell.spec.graphed}
    asked = (replace(cell, twin=False) if cell.spec.cell_id in picked else cell for cell in cells)
    return tuple(
        c for c in asked if c.spec.cell_id in picked or (not c.spec.graphed and c.spec.workload_id in workloads)
    )


_PLACEMENT = Schema(Placement, {})
_SELECTABLE = {name: SCHEMAS[name] for name in ("model", "parallelism", "training", "data", "cuda_graph", "fault")}


def _selection(text: str) -> tuple[str, Any]:
    """``key=value`` as a field of a cell and a value of its type."""
    written, equals, value = text.partition("=")
    key = "model.preset" if written == "model" else canonical_place(written.strip())
    section, _, name = key.partition(".")
    schema = HEAD if key == "engine" else {**_SELECTABLE, "placement": _PLACEMENT}.get(section)
    if not equals:
        raise input_error("--only", f"{text!r} is not of the form key=value", "--only cuda_graph.impl=torch_compile")
    if schema is None or (name or key) not in schema.fields:
        known = ["engine", *(f for f in FIELDS if f.partition(".")[0] in _SELECTABLE)]
        raise input_error(
            "--only", f"{written!r} names no field of a cell", suggestion(key, known, "docs/recipes.md has them")
        )
    try:
        plain = value.strip().removeprefix("[").removesuffix("]") if schema.is_list(name or key) else value.strip()
        converted = schema.convert(name or key, None if plain == "null" else plain)
    except ValueError as error:
        close = suggestion(value, schema.choices(name or key), "")
        raise input_error("--only", f"{text}: {key} is {error}", close) from None
    return key, canonical_values({"scope": converted})["scope"] if key == "cuda_graph.scope" else converted


def _value(spec: RunSpec, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(spec, section), name) if name else getattr(spec, section)


class _Builder:
    """Builds cells from patches. Sections are memoised: a sweep of thousands of cells has few distinct ones."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self._recipe = recipe
        self._device = device
        self._varying = _varying(recipe)
        self._sections: dict[tuple[Any, ...], Any] = {}

    def cell(self, patches: Sequence[Tree]) -> ResolvedCell:
        tree = _merge(self._recipe.base, patches)
        resources = self._section(Resources, tree.get("resources", {}))
        parallelism = self._parallelism(tree.get("parallelism", {}), resources)
        spec = RunSpec(
            engine=tree["engine"],
            model=self._model(tree.get("model", {})),
            parallelism=parallelism,
            training=self._section(Training, tree.get("training", {})),
            data=self._section(Data, tree.get("data", {})),
            cuda_graph=self._section(CudaGraph, canonical_values(tree.get("cuda_graph", {}))),
            placement=self._placement(parallelism, resources),
            fault=self._section(Fault, tree.get("fault", {})),
            environment=tree.get("environment", {}),
        )
        expect = self._section(Expectation, tree.get("expect", {}))
        return ResolvedCell(spec, self._settings(patches), expect, resources)

    def _section(self, cls: type, values: Mapping[str, Any]) -> Any:
        memo = (cls, *values.items())
        if memo not in self._sections:
            self._sections[memo] = cls(**values)
        return self._sections[memo]

    def _model(self, values: Mapping[str, Any]) -> Model:
        preset = self._recipe.presets.get(values.get("preset", ""), {})
        return cast(Model, self._section(Model, {**preset, **values}))

    def _parallelism(self, values: Mapping[str, Any], resources: Resources) -> Parallelism:
        layout = cast(Parallelism, self._section(Parallelism, values))
        ranks = resources.nodes * resources.gpus_per_node
        others = layout.tp * layout.cp * layout.pp
        if "dp" in values or ranks == 0 or others < 1:
            return layout
        return cast(Parallelism, self._section(Parallelism, {**values, "dp": max(1, ranks // others)}))

    def _placement(self, layout: Parallelism, resources: Resources) -> Placement:
        values = {
            "device": self._device if resources.device == "auto" else resources.device,
            "nodes": resources.nodes,
            "ranks_per_node": resources.gpus_per_node or max(1, layout.world_size // resources.nodes),
            "threads_per_rank": resources.threads_per_rank,
        }
        return cast(Placement, self._section(Placement, values))

    def _settings(self, patches: Iterable[Tree]) -> tuple[str, ...]:
        settings = dict(itertools.chain.from_iterable(_fields(patch) for patch in patches))
        return tuple(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items() if key in self._varying)


def _varying(recipe: Recipe) -> frozenset[str]:
    """The fields that set workloads of ``recipe`` apart: those with more than one value, or only in some points."""
    values: dict[str, set[Any]] = {}
    for axis in recipe.axes:
        points = [dict(_fields(patch)) for patch in axis]
        for key in {key: None for point in points for key in point}:
            values[key] = {point.get(key) for point in points}
    return frozenset(
        key
        for key, several in values.items()
        if len(several) > 1 and key not in _WITHIN_A_WORKLOAD and not key.startswith("expect.")
    )


def _merge(base: Tree, patches: Iterable[Tree]) -> Tree:
    tree = dict(base)
    for patch in patches:
        for key, value in patch.items():
            present = tree.get(key)
            tree[key] = {**present, **value} if isinstance(present, dict) and isinstance(value, dict) else value
    return tree


def _fields(patch: Tree) -> Iterator[tuple[str, Any]]:
    for key, value in patch.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value
