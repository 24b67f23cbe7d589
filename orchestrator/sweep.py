"""A recipe's expansion into cells: the product of its axes, each cell resolved to a RunSpec. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from launch.record import Expectation, Phase
from launch.spec import CudaGraph, Data, Device, Model, Parallelism, Placement, RunSpec, Training
from orchestrator.errors import wrong
from orchestrator.recipe import Recipe, Resources, Tree
from orchestrator.schema import suggestion
from orchestrator.spelling import normalize_values

BEFORE_CAPTURE: tuple[Phase, ...] = ("init", "build", "warmup")
"""Phases that an eager twin goes through as well: what a recipe expects there, it expects of the twin too."""


@dataclass(frozen=True)
class ResolvedCell:
    """One configuration, before anyone has judged it."""

    spec: RunSpec
    label: str
    expect: Expectation
    resources: Resources
    twin: bool
    """Whether it was added as the eager twin of graphed cells, rather than asked for."""


def expand(recipe: Recipe, device: Device) -> tuple[ResolvedCell, ...]:
    """Every cell of ``recipe``, each once: a workload's eager cell first, then its graphed cells in the recipe's order.

    ``device`` is what ``resources.device: auto`` stands for. Twins of graphed cells are added.
    """
    build = _Builder(recipe, device)
    written = [build.cell(patches) for patches in itertools.product(*recipe.axes)]
    labels = _Labels(recipe)
    cells: dict[str, ResolvedCell] = {}
    for cell, patches in zip(written, itertools.product(*recipe.axes), strict=True):
        labelled = replace(cell, label=labels.of(cell.spec, patches))
        if labelled.spec.graphed:
            twin = _twin(labelled, labels.of(_eager(labelled.spec), patches))
            cells.setdefault(twin.spec.cell_id, twin)
            cells.setdefault(labelled.spec.cell_id, labelled)
        else:
            cells[labelled.spec.cell_id] = labelled  # asked for, even where it is a twin as well
    return tuple(_eager_first(cells.values()))


def pick(cells: Sequence[ResolvedCell], selections: Sequence[str]) -> tuple[ResolvedCell, ...]:
    """The cells that every ``key=value`` of ``selections`` agrees with, and their eager twins.

    Raises:
        InputError: a selection names no field, or no cell is left.
    """
    wanted = [_parse_selection(selection) for selection in selections]
    picked = [cell for cell in cells if all(_matches(cell.spec, key, value) for key, value in wanted)]
    if wanted and not picked:
        raise wrong(
            "--only",
            f"no cell has {' and '.join(selections)}",
            f"cells: {'; '.join(cell.label for cell in cells[:12])}",
        )
    workloads = {cell.spec.workload_id for cell in picked if cell.spec.graphed}
    kept = {cell.spec.cell_id for cell in picked}
    return tuple(c for c in cells if c.spec.cell_id in kept or (not c.spec.graphed and c.spec.workload_id in workloads))


def _parse_selection(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    section, _, name = key.partition(".")
    spec = RunSpec()
    if not equals:
        raise wrong("--only", f"{text!r} is not of the form key=value", "--only cuda_graph.impl=torch_compile")
    if not hasattr(spec, section) or (name and not hasattr(getattr(spec, section), name)):
        known = ["engine", *(f"{s}.{n}" for s in _SWEPT for n in vars(getattr(spec, s)))]
        raise wrong("--only", f"{key!r} names no field of a cell", suggestion(key, known, "see README, Recipes"))
    return key, value


_SWEPT = ("model", "parallelism", "training", "data", "cuda_graph", "placement")


def _matches(spec: RunSpec, key: str, value: str) -> bool:
    section, _, name = key.partition(".")
    actual = getattr(spec, section)
    actual = getattr(actual, name) if name else actual
    text = ",".join(actual) if isinstance(actual, tuple) else str(actual)
    return text.lower() == value.strip("[]").replace(" ", "").lower()


class _Builder:
    """Builds cells from patches. Sections are memoised: a sweep of thousands of cells has few distinct ones."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self._recipe = recipe
        self._device = device
        self._sections: dict[tuple[type, str], Any] = {}

    def cell(self, patches: Iterable[Tree]) -> ResolvedCell:
        tree = _merge(self._recipe.base, patches)
        resources = self._section(Resources, tree.get("resources", {}))
        parallelism = self._parallelism(tree.get("parallelism", {}), resources)
        spec = RunSpec(
            engine=tree["engine"],
            model=self._model(tree.get("model", {})),
            parallelism=parallelism,
            training=self._section(Training, tree.get("training", {})),
            data=self._section(Data, tree.get("data", {})),
            cuda_graph=self._section(CudaGraph, normalize_values(tree.get("cuda_graph", {}))),
            placement=self._placement(parallelism, resources),
            environment=tree.get("environment", {}),
        )
        return ResolvedCell(spec, "", self._section(Expectation, tree.get("expect", {})), resources, twin=False)

    def _section(self, cls: type, values: Mapping[str, Any]) -> Any:
        memo = (cls, json.dumps(values, sort_keys=True))
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
        return replace(layout, dp=max(1, ranks // others))

    def _placement(self, layout: Parallelism, resources: Resources) -> Placement:
        device = self._device if resources.device == "auto" else resources.device
        ranks_per_node = resources.gpus_per_node or max(1, layout.world_size // max(1, resources.nodes))
        return Placement(device, resources.nodes, ranks_per_node, resources.threads_per_rank)


class _Labels:
    """Words for what sets cells apart: the values of the axes that vary, graph settings aside."""

    def __init__(self, recipe: Recipe) -> None:
        values: dict[str, set[str]] = {}
        for axis in recipe.axes:
            flat = [dict(_flatten(patch)) for patch in axis]
            for key in {key for patch in flat for key in patch}:
                values.setdefault(key, set()).update(str(patch.get(key)) for patch in flat)
        self._varying = {k for k, v in values.items() if len(v) > 1 and k.split(".")[0] not in ("cuda_graph", "expect")}

    def of(self, spec: RunSpec, patches: Iterable[Tree]) -> str:
        settings = dict(itertools.chain.from_iterable(_flatten(patch) for patch in patches))
        said = [f"{key.rpartition('.')[2]}={value}" for key, value in settings.items() if key in self._varying]
        return ", ".join([spec.cuda_graph.label, *said])


def _merge(base: Tree, patches: Iterable[Tree]) -> Tree:
    tree = dict(base)
    for patch in patches:
        for key, value in patch.items():
            present = tree.get(key)
            tree[key] = {**present, **value} if isinstance(present, dict) and isinstance(value, dict) else value
    return tree


def _flatten(tree: Tree) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def _eager(spec: RunSpec) -> RunSpec:
    return replace(spec, cuda_graph=CudaGraph("none", (), spec.cuda_graph.warmup_steps))


def _twin(cell: ResolvedCell, label: str) -> ResolvedCell:
    expect = cell.expect if cell.expect.phase in BEFORE_CAPTURE else Expectation()
    return ResolvedCell(_eager(cell.spec), label, expect, cell.resources, twin=True)


def _eager_first(cells: Iterable[ResolvedCell]) -> list[ResolvedCell]:
    """Cells by workload in order of first appearance; within one, the eager cell first."""
    workloads: dict[str, list[ResolvedCell]] = {}
    for cell in cells:
        workloads.setdefault(cell.spec.workload_id, []).append(cell)
    return [cell for group in workloads.values() for cell in sorted(group, key=lambda c: c.spec.graphed)]
