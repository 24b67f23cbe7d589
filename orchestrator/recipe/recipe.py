"""Recipe: what the user writes, checked whole before anything else happens.

Every problem is reported at once, each with its file and line, the key, the value and the way out. docs/recipes.md is
the reference of the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.contract.plan import Margins
from orchestrator.errors import InputError
from orchestrator.recipe.axes import Axes, read_axes, swept_fields
from orchestrator.recipe.field_check import NAME, Checker
from orchestrator.recipe.fields import HEAD, TopLevel, Tracking
from orchestrator.recipe.source_fields import SourceFields, Tree, flatten, read_written
from orchestrator.recipe.yaml_reader import dump

MOST_RUNS = 100_000
"""A sweep beyond it is a slip of the pen: its plan alone would be hundreds of megabytes."""


@dataclass(frozen=True)
class Recipe:
    """A recipe whose every field has been checked. Trees hold plain values, in this project's spelling."""

    name: str
    file: Path
    base: Tree
    """Every section that can be swept, as written (defaults not filled in)."""
    axes: tuple[tuple[Tree, ...], ...]
    """The sweep's axes: each a list of patches to ``base``; cells are their product."""
    repeats: int
    cluster: str
    """The profile of a Slurm cluster; this host's own executors have no use for one."""
    equivalence: Margins
    wandb: Tracking
    text: str
    """The recipe with its overrides, as YAML; what its presets hold stands below it, as comments."""
    presets: Mapping[str, Tree]
    """The model presets that it names, by name."""


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in ``path`` with ``overrides`` (OmegaConf dotlist: ``training.steps=50``).

    Raises:
        InputError: with every problem of the recipe.
    """
    written = read_written(path, overrides)
    checker = Checker(path, written.source)
    fields = dict(written.fields)
    swept = {place: fields.pop(place) for place in written.fields if place.partition(".")[0] == "sweep"}
    base = checker.patch(fields, lambda place: place)
    axes = read_axes(swept, checker)
    named = "name" in base
    head = TopLevel(**{key: base.pop(key) for key in HEAD.fields if key in base})
    if named and not NAME.fullmatch(head.name):
        remedy = "use up to 64 letters, digits, '.', '_', '-', a letter or digit first"
        checker.problem("name", head.name, "not usable as the name of a folder", remedy)
    _check_complete(written.fields, axes, checker)
    _check_size(axes, head.repeats, checker)
    _check_overrides(written, axes, checker)
    equivalence, wandb = base.pop("equivalence", {}), base.pop("wandb", {})
    if problems := (*written.problems, *checker.problems):
        raise InputError(problems)
    return Recipe(
        name=head.name,
        file=path,
        base=base | {"engine": head.engine},
        axes=tuple(axes.values()),
        repeats=head.repeats,
        cluster=head.cluster,
        equivalence=Margins(**equivalence),
        wandb=Tracking(**wandb),
        text=written.text + _presets_text(checker.presets),
        presets=checker.presets,
    )


def _presets_text(presets: Mapping[str, Tree]) -> str:
    """What presets hold now: a file of another day may hold something else."""
    return "".join(
        f"# model preset {name}:\n" + "".join(f"#   {line}\n" for line in dump(preset).splitlines())
        for name, preset in presets.items()
    )


def _check_complete(fields: Mapping[str, object], axes: Axes, checker: Checker) -> None:
    sections = {place.partition(".")[0] for place in (*fields, *swept_fields(axes))}
    if "name" not in sections:
        checker.problems.append(checker.source.missing("name", "a recipe needs a name", "name: tiny_moe"))
    if "model" not in sections:
        remedy = "model: {preset: tiny_moe}, or its fields written out"
        checker.problems.append(checker.source.missing("model", "a recipe needs a model", remedy))


def _check_overrides(written: SourceFields, axes: Axes, checker: Checker) -> None:
    """An axis that sets a field in all its points leaves nothing of what the command line says of it."""
    for place in sorted(written.source.overridden & written.fields.keys()):
        for axis, points in axes.items():
            if points and all(place in flatten(point)[0] for point in points):
                remedy = f"pick cells with --only, replace the axis ({axis}=[...]), or leave it out ({axis}=null)"
                checker.problem(place, written.fields[place], f"{axis} sets it in every cell", remedy)


def _check_size(axes: Axes, repeats: int, checker: Checker) -> None:
    runs = math.prod(map(len, axes.values())) * repeats
    if runs > MOST_RUNS:
        sizes = "".join(f"{len(axis)} ({name.removeprefix('sweep.grid.')}) x " for name, axis in axes.items())
        message = f"{sizes}{repeats} repeats are {runs:,} runs, above {MOST_RUNS:,}"
        place, remedy = ("sweep", "shorten an axis") if axes else ("repeats", "lower it")
        checker.problems.append(checker.source.missing(place, message, remedy))
