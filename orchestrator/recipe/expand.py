"""Expand a recipe into cells: the product of its axes, each cell resolved to a RunSpec. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from launch.common.grouped import grouped
from launch.contract.outcomes import Expectation
from launch.contract.records.events import BEFORE_CAPTURE
from launch.contract.spec import (
    CudaGraph,
    Data,
    Device,
    EngineName,
    Fault,
    Model,
    Parallelism,
    Placement,
    RunSpec,
    Training,
)
from launch.megatron_config.absent_fields import absent_value
from launch.support.rule import field_value, spell
from orchestrator.errors import input_error
from orchestrator.recipe.aliases import canonical_place, canonical_values
from orchestrator.recipe.command import command_of, graphs_axis
from orchestrator.recipe.field_check import FileSchema, Schema
from orchestrator.recipe.fields import RECIPE, Resources
from orchestrator.recipe.recipe import AUTO_CHECKS, Recipe
from orchestrator.recipe.source_fields import Tree, leaves
from orchestrator.suggestion import suggestion

Section = TypeVar("Section")
QUICK_STEPS = 20
"""The steps of a run in a quick sweep: warm-up, capture, and some to check."""

_UNKNOWN_BATCH = {"global_batch_size": 0, "sequence_length": 0}
"""The batch of a user's program if the recipe does not give it. Tokens per second are then unknown."""

_NOT_IN_SETTINGS = ("cuda_graph.impl", "cuda_graph.scope", "cuda_graph.optimizer", "cuda_graph.name", "cuda_graph.arguments", "cuda_graph.mend", "resources.minutes_per_run",
                    "resources.hang_minutes")  # fmt: skip
"""Fields in which cells of one workload may differ. The graph label covers those of ``cuda_graph``; the others change no
run."""


@dataclass(frozen=True)
class ResolvedCell:
    """One configuration, before rules and target are applied."""

    spec: RunSpec
    settings: tuple[str, ...]
    """The settings that distinguish its workload in the sweep, such as "precision=bf16"."""
    expect: Expectation
    resources: Resources
    is_added_baseline: bool = False
    """Whether it is an eager baseline that the recipe does not list."""

    @property
    def label(self) -> str:
        return ", ".join((self.spec.cuda_graph.label, *self.settings))


def expand(recipe: Recipe, device: Device) -> tuple[ResolvedCell, ...]:
    """Return each cell of ``recipe`` once: a workload's eager cell first, then its graphed cells in the recipe's order.

    ``resources.device: auto`` becomes ``device``. Graphed cells without an eager baseline get one.

    Raises:
        InputError: two points of the sweep are one cell, but expect different outcomes or have different time limits.
    """
    builder = _Builder(recipe, device)
    workloads: dict[str, dict[str, ResolvedCell]] = {}
    for patches in itertools.product(*recipe.axes, *graphs_axis(recipe)):
        cell = builder.build_cell(patches)
        present = workloads.setdefault(cell.spec.workload_id, {}).setdefault(cell.spec.cell_id, cell)
        if (present.expect, present.resources) != (cell.expect, cell.resources):
            message = f"two points are the same run ({cell.label}), but differ in expect or resources"
            fix = "write expect and time limits into points, one for each run"
            raise input_error(f"{recipe.file}: sweep", message, fix)
    return tuple(itertools.chain.from_iterable(_add_baseline(cells) for cells in workloads.values()))


def eager_baseline(spec: RunSpec) -> RunSpec:
    """Return the eager baseline of ``spec``."""
    return replace(spec, cuda_graph=CudaGraph("none", (), spec.cuda_graph.warmup_steps))


def _add_baseline(workload: Mapping[str, ResolvedCell]) -> list[ResolvedCell]:
    """Return the cells of one workload, the eager baseline first. Add the baseline if graphed cells have none."""
    cells = sorted(workload.values(), key=lambda cell: cell.spec.graphed)
    last = cells[-1]
    if not last.spec.graphed:
        return cells
    spec = eager_baseline(last.spec)
    if spec.cell_id in workload:
        return cells
    # An outcome expected before the capture is also expected of the baseline.
    expect = next((cell.expect for cell in cells if cell.expect.phase in BEFORE_CAPTURE), Expectation())
    return [replace(last, spec=spec, expect=expect, is_added_baseline=True), *cells]


def filter_cells(cells: Sequence[ResolvedCell], selections: Sequence[str]) -> tuple[ResolvedCell, ...]:
    """Return the cells that match ``selections``, and their eager baselines.

    A cell matches if each key has one of the values that ``key=value`` gives for it.

    Raises:
        InputError: a selection is wrong, or no cell that matches has its value.
    """
    if not selections:
        return tuple(cells)
    settings = [parse_setting(text) for text in selections]
    wanted = grouped(settings)
    matching = [cell for cell in cells if all(field_value(cell.spec, key) in wanted[key] for key in wanted)]
    found = {key: [field_value(cell.spec, key) for cell in matching] for key in wanted}
    if absent := {
        text: key for text, (key, value) in zip(selections, settings, strict=True) if value not in found[key]
    }:
        present = {key: {spell(field_value(cell.spec, key)) for cell in cells} for key in absent.values()}
        values = "; ".join(f"{key} is {', '.join(sorted(values)[:12])}" for key, values in present.items())
        message = f"no {'selected ' * bool(matching)}cell has {' and '.join(absent)}"
        raise input_error("--only", message, f"in this recipe {values}")
    chosen = {cell.spec.cell_id for cell in matching}
    workloads = {cell.spec.workload_id for cell in cells if cell.spec.cell_id in chosen and cell.spec.graphed}
    return tuple(
        replace(cell, is_added_baseline=False) if cell.spec.cell_id in chosen else cell
        for cell in cells
        if cell.spec.cell_id in chosen or (not cell.spec.graphed and cell.spec.workload_id in workloads)
    )


_SELECTABLE = (
    "engine", "megatron_core", "model", "parallelism", "training", "data", "cuda_graph", "fault", "command", "placement",
    "step_checks", "profile",
)  # fmt: skip
_CELL = FileSchema(RECIPE.top, {**RECIPE.sections, "placement": Schema(Placement)})
_CELL_FIELDS = {name: field for name, field in _CELL.fields.items() if name.partition(".")[0] in _SELECTABLE}


def parse_setting(text: str, place: str = "--only") -> tuple[str, Any]:
    """Return the field of a cell and the value that ``key=value`` names. Errors name the ``place`` of the text.

    Raises:
        InputError: there is no such field, or it does not take the value.
    """
    written, equals, value = text.partition("=")
    name = "model.preset" if written == "model" else canonical_place(written.strip())
    if not equals:
        raise input_error(place, f"{text!r} is not of the form key=value", "--only cuda_graph.impl=torch_compile")
    if name not in _CELL_FIELDS:
        same = [field for field in _CELL_FIELDS if field.rpartition(".")[2] == name]
        fix = f"did you mean {same[0]!r}?" if same else suggestion(name, _CELL_FIELDS, "docs/recipes.md lists them")
        raise input_error(place, f"{written!r} is not a field of a cell", fix)
    schema, key = _CELL_FIELDS[name]
    plain = value.strip().removeprefix("[").removesuffix("]") if schema.is_list(key) else value.strip()
    try:
        converted = schema.convert(key, None if plain == "null" else plain)
    except ValueError as error:
        one_of = suggestion(value, schema.choices(key), "write one of them") if schema.choices(key) else ""
        message, fix = absent_value(key, plain) or (str(error), one_of)
        raise input_error(place, f"{text}: {message}", fix) from None
    return name, canonical_values({"scope": converted})["scope"] if name == "cuda_graph.scope" else converted


class _Builder:
    """Builds cells from patches. Cells share equal sections, because thousands of cells have few different ones."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self._recipe = recipe
        self._device = device
        self._varying = _varying_fields(recipe)
        self._sections: dict[tuple[Any, ...], Any] = {}

    def build_cell(self, patches: Sequence[Tree]) -> ResolvedCell:
        tree = _merge(self._recipe.base, patches)
        preset = self._recipe.presets.get(tree.get("model", {}).get("preset", ""), {})
        resources = self._section(Resources, tree.get("resources", {}))
        parallelism = self._parallelism(tree.get("parallelism", {}), resources)
        spec = RunSpec(
            engine=tree["engine"],
            megatron_core=tree["megatron_core"],
            profile=tree["profile"],
            model=self._section(Model, preset | tree.get("model", {})),
            parallelism=parallelism,
            training=self._training(tree.get("training", {}), tree["engine"]),
            data=self._section(Data, tree.get("data", {})),
            cuda_graph=self._section(CudaGraph, canonical_values(tree.get("cuda_graph", {}))),
            placement=self._placement(parallelism, resources),
            fault=self._section(Fault, tree.get("fault", {})),
            command=command_of(tree.get("command", {}), self._recipe.file.absolute().parent),
            environment=tree.get("environment", {}),
        )
        spec = replace(spec, step_checks=_count_step_checks(spec, self._recipe.step_checks))
        expect = self._section(Expectation, tree.get("expect", {}))
        return ResolvedCell(spec, self._settings(patches), expect, resources)

    def _section(self, cls: type[Section], values: Mapping[str, Any]) -> Section:
        memo = (cls, *values.items())
        if memo not in self._sections:
            self._sections[memo] = cls(**values)
        return cast(Section, self._sections[memo])

    def _training(self, values: Mapping[str, Any], engine: EngineName) -> Training:
        """Return the training section, with at most ``QUICK_STEPS`` steps in a quick sweep."""
        training = self._section(Training, values if engine != "command" else {**_UNKNOWN_BATCH, **values})
        if self._recipe.equivalence.mode == "full" or training.steps <= QUICK_STEPS:
            return training
        return training.shortened(QUICK_STEPS)

    def _parallelism(self, values: Mapping[str, Any], resources: Resources) -> Parallelism:
        layout = self._section(Parallelism, values)
        ranks = resources.nodes * resources.gpus_per_node
        others = layout.tp * layout.cp * layout.pp
        if "dp" in values or ranks == 0:
            return layout
        return self._section(Parallelism, {**values, "dp": max(1, ranks // others)})

    def _placement(self, layout: Parallelism, resources: Resources) -> Placement:
        values = {
            "device": self._device if resources.device == "auto" else resources.device,
            "nodes": resources.nodes,
            "ranks_per_node": resources.gpus_per_node or max(1, layout.world_size // resources.nodes),
            "threads_per_rank": resources.threads_per_rank,
        }
        return self._section(Placement, values)

    def _settings(self, patches: Iterable[Tree]) -> tuple[str, ...]:
        settings = dict(itertools.chain.from_iterable(leaves(patch) for patch in patches))
        varying = ((key.rpartition(".")[2], value) for key, value in settings.items() if key in self._varying)
        return tuple(f"{key}={value if isinstance(value, str) else spell(value)}" for key, value in varying)


def _count_step_checks(spec: RunSpec, written: int | str) -> int:
    """Return the number of step checks of a run. Deterministic runs need none, because their verdict rests on equal bits.

    ``auto`` leaves out an optimizer that Megatron-Core has captured, because each check would copy its whole state.
    """
    if spec.engine == "command":
        return 0
    if isinstance(written, int):
        return written
    is_left_out = spec.engine == "megatron" and spec.cuda_graph.optimizer
    is_needed = spec.graphed and spec.placement.device == "cuda" and not spec.training.deterministic
    return AUTO_CHECKS if is_needed and not is_left_out else 0


def _varying_fields(recipe: Recipe) -> frozenset[str]:
    """Return the fields that distinguish workloads: fields with several values, and fields that only some points set."""
    values: dict[str, set[Any]] = {}
    for axis in recipe.axes:
        points = [dict(leaves(patch)) for patch in axis]
        for key in {key: None for point in points for key in point}:
            # A flag may have a list of words.
            found = (point.get(key) for point in points)
            values[key] = {tuple(value) if isinstance(value, list) else value for value in found}
    return frozenset(
        key
        for key, several in values.items()
        if len(several) > 1 and key not in _NOT_IN_SETTINGS and not key.startswith("expect.")
    )


def _merge(base: Tree, patches: Iterable[Tree]) -> Tree:
    tree = dict(base)
    for patch in patches:
        for key, value in patch.items():
            present = tree.get(key)
            tree[key] = {**present, **value} if isinstance(present, dict) and isinstance(value, dict) else value
    return tree
