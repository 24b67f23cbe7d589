"""A recipe, which the user writes. It is checked completely before anything else happens.

All problems are reported at once, each with file, line, field, value and fix. docs/recipes.md describes the format.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from launch import ROOT
from launch.contract.plan import Margins
from launch.contract.spec import FrameworkName
from orchestrator.errors import InputError, input_error
from orchestrator.recipe.axes import Axes, read_axes, swept_fields
from orchestrator.recipe.field_check import check_fields
from orchestrator.recipe.fields import PRESET, RECIPE, OtherTrackers, TopLevel, Tracking, most_repeats
from orchestrator.recipe.source_fields import SourceFields, Tree, leaves, read_fields
from orchestrator.recipe.yaml_reader import dump, find_yaml, suggest_yaml
from orchestrator.suggestion import suggestion

MOST_RUNS = 100_000
"""A larger sweep is rejected as a mistake. Its plan alone would take hundreds of megabytes."""
_SHIPPED = ROOT / "recipes"
_FOLDERS = (Path("recipes"), _SHIPPED, _SHIPPED / "exhibits")

AUTO_CHECKS = 5
"""The number of step checks with ``step_checks: auto``, and in a quick sweep."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe whose fields are all checked. Trees contain plain values, in this project's spelling."""

    name: str
    file: Path
    base: Tree = field(default_factory=dict)
    """Every section that can be swept, as written, without defaults."""
    axes: tuple[tuple[Tree, ...], ...] = ()
    """The axes of the sweep, each a list of patches to ``base``. Cells are their product."""
    repeats: int | str
    """A number, or "auto"."""
    perturbed: bool = False
    """Whether each workload has an additional eager run, perturbed by one unit in the last place (RunSpec.perturbed)."""
    step_checks: int | str = 0
    """How many steps of each graphed run are also computed uncaptured: a number, or "auto"."""
    cluster: str
    """The name of a Slurm cluster's profile. A plan for this host ignores it."""
    equivalence: Margins
    wandb: Tracking
    published: Mapping[str, str] = field(default_factory=dict)
    """Figures that others published, by what they are and where they stand."""
    text: str
    """The recipe with its overrides, as YAML, followed by the fields of its presets as comments."""
    presets: Mapping[str, Tree] = field(default_factory=dict)
    """The model presets that the recipe names, by name."""
    tracking: OtherTrackers = field(default_factory=OtherTrackers)


def recipe_names() -> list[str]:
    """Return the names of the recipes in ./recipes and of the shipped ones."""
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.yaml")})


def find_recipe(written: Path) -> Path:
    """Return the file that ``written`` names: a path, or the name of a recipe in ./recipes or of a shipped one.

    The documentation's paths (recipes/exhibits/local_inputs.yaml) also name shipped recipes, outside the checkout too.

    Raises:
        InputError: there is no such file or recipe.
    """
    shipped = _SHIPPED.parent / written
    if os.path.lexists(written):
        return written
    if written.parts[:1] == ("recipes",) and shipped.is_file():
        return shipped
    found = find_yaml(str(written).removesuffix(".yaml"), _FOLDERS)
    if found is None and "=" in str(written):
        raise input_error(str(written), "not a recipe", f"write the recipe first: RECIPE {written}")
    if found is None:
        files = suggestion(
            written.with_suffix(".yaml"), map(str, written.parent.glob("*.yaml")), otherwise="", cutoff=0.8
        )
        raise input_error(str(written), "no such file or directory", files or suggest_yaml(written.stem, _FOLDERS))
    return found


def load(written: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe that ``written`` names, with ``overrides`` (OmegaConf dotlist: ``training.steps=50``).

    Raises:
        InputError: the recipe has problems. The error lists all of them.
    """
    path = find_recipe(written)
    source = read_fields(path, overrides)
    swept = {place: value for place, value in source.fields.items() if place.partition(".")[0] == "sweep"}
    base = check_fields(source, RECIPE, {place: v for place, v in source.fields.items() if place not in swept})
    axes = read_axes(swept, source)
    presets = _load_presets(base, axes, path, source)
    top = TopLevel(**{key: base.pop(key) for key in RECIPE.top.fields if key in base})
    _check_complete(axes, source)
    _check_graphs(axes, source)
    _check_size(axes, most_repeats(top.repeats), source)
    _check_overrides(axes, source)
    source.raise_problems()
    equivalence, wandb = Margins(**base.pop("equivalence", {})), Tracking(**base.pop("wandb", {}))
    tracking = OtherTrackers(**base.pop("tracking", {}))
    published = base.pop("published", {})
    is_quick = equivalence.mode == "quick"
    return Recipe(
        name=top.name,
        file=path,
        base=base | {"engine": top.engine, "megatron_core": top.megatron_core, "profile": top.profile},
        axes=tuple(axes.values()),
        repeats=top.repeats,
        perturbed=top.perturbed,
        step_checks=AUTO_CHECKS if is_quick and top.step_checks in (0, "auto") else top.step_checks,
        cluster=top.cluster,
        equivalence=equivalence,
        wandb=wandb,
        tracking=tracking,
        published=published,
        text=source.text + _presets_as_comments(presets),
        presets=presets,
    )


def _load_presets(base: Tree, axes: Axes, path: Path, source: SourceFields) -> dict[str, Tree]:
    """Load the model presets that the recipe in ``path`` names. One next to the recipe takes precedence."""
    patches = {f"{place}[{i}]": patch for place, axis in axes.items() for i, patch in enumerate(axis)}
    presets: dict[str, Tree] = {}
    for place, patch in ({"model.preset": base} | patches).items():
        name = patch.get("model", {}).get("preset")
        if name is not None and name not in presets:
            presets[name] = _load_preset(name, place, (path.parent / "models", _SHIPPED / "models"), source)
    return presets


def _load_preset(name: str, place: str, folders: Sequence[Path], source: SourceFields) -> Tree:
    path = find_yaml(name, folders)
    if path is None:
        source.problem(place, name, "no such preset", suggest_yaml(name, folders))
        return {}
    try:
        preset = read_fields(path)
    except InputError as error:
        source.problems += error.problems
        return {}
    checked = check_fields(preset, PRESET)
    source.problems += preset.problems
    return checked


def _presets_as_comments(presets: Mapping[str, Tree]) -> str:
    """Return the content of the presets as comments, because their files may change."""
    return "".join(
        f"# model preset {name}:\n" + "".join(f"#   {line}\n" for line in dump(preset).splitlines())
        for name, preset in presets.items()
    )


def _check_complete(axes: Axes, source: SourceFields) -> None:
    names = {place.partition(".")[0] for place in (*source.fields, *swept_fields(axes))}
    if "name" not in names:
        source.problem_at("name", "a recipe needs a name", "write name: tiny_moe")
    # An engine that is the name of a framework has its own message.
    is_command = source.fields.get("engine") in ("command", *get_args(FrameworkName))
    if "model" not in names and not is_command:
        source.problem_at("model", "a recipe needs a model", "write model: {preset: tiny_moe}, or its fields")
    for place in (name for name in ("model", "data", "fault") if is_command and name in names):
        source.problem_at(place, "engine command runs a program with its own", "leave the section out")
    if is_command != ("command" in names):
        fix = "write engine: command and command: {run: ...}, or neither"
        source.problem_at("command", "the section and the engine command belong together", fix)
    elif is_command and "command.run" not in {*source.fields, *swept_fields(axes)}:
        source.problem_at("command", "no program to run", "write command: {run: 'python train.py'}")


def _check_graphs(axes: Axes, source: SourceFields) -> None:
    """Reject named graphs of a program that have the words of others, or of the eager command: both would run the same.

    Also reject other graphs beside them, because they would not run.
    """
    prefix, known = "command.graphs.", dict[str, str]()
    words = {
        f"{prefix}none": [],
        **{place: value for place, value in source.fields.items() if place.startswith(prefix)},
    }
    for place, value in words.items():
        first = known.setdefault(str(value), place)
        if first != place:
            problem = f"the words of {first.removeprefix(prefix)} too, so both would run the same command"
            source.problem(place, value, problem, "give each graphed command words of its own")
    if words.keys() - {f"{prefix}none"}:
        for place in sorted({*source.fields, *swept_fields(axes)} & {"cuda_graph.impl", "cuda_graph.scope"}):
            fix = "leave it out, or leave out command.graphs if the framework turns on graphs by cuda_graph"
            source.problem_at(place, "command.graphs sets the graphs of every cell", fix)


def _check_size(axes: Axes, repeats: int, source: SourceFields) -> None:
    runs = math.prod(map(len, axes.values())) * repeats
    if runs > MOST_RUNS:
        sizes = "".join(f"{len(axis)} ({name.removeprefix('sweep.grid.')}) x " for name, axis in axes.items())
        message = f"{sizes}{repeats} repeats are {runs:,} runs, above {MOST_RUNS:,}"
        place, fix = ("sweep", "shorten an axis, or lower repeats") if axes else ("repeats", "lower it")
        source.problem_at(place, message, fix)


def _check_overrides(axes: Axes, source: SourceFields) -> None:
    """Reject an override of a field that an axis sets in every cell, because it would have no effect."""
    for place in sorted(source.override_places & source.fields.keys()):
        for axis, points in axes.items():
            if all(place in dict(leaves(point)) for point in points):
                fix = f"pick cells with --only, replace the axis ({axis}=[...]), or remove it ({axis}=null)"
                source.problem(place, source.fields[place], f"{axis} sets it in every cell", fix)
