"""What the user wrote, a YAML file with the command line's overrides, as flat fields with their lines.

A field's place is its dotted path, whether it was written nested (``training: {steps: 50}``), dotted
(``training.steps: 50``) or in Megatron's spelling. The axes of a sweep have places too (``sweep.grid.training.seed``).
Lists are values. An override replaces what the file has at its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.common.redact import is_secret_name
from orchestrator.errors import InputError, Problem
from orchestrator.recipe.aliases import canonical_place
from orchestrator.recipe.yaml_reader import dump, parse_value, read_page

Tree = dict[str, Any]
COMMAND_LINE = "command line"
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?(\w+)")


@dataclass
class SourceFields:
    """The fields of one file by place, in its order, and every problem found in them so far."""

    file: str
    lines: Mapping[str, int]
    fields: Tree
    problems: list[Problem]
    override_places: set[str] = field(default_factory=set)
    """Places that the command line sets."""

    @property
    def text(self) -> str:
        """The fields as YAML. Reading it returns the same fields."""
        return dump(_nest(self.fields))

    def problem(self, place: str, value: Any, message: str, fix: str, is_secret: bool = False) -> None:
        """Add a problem of the ``value`` at ``place``."""
        self.problem_at(place, message, fix, f" = {_abbreviate('***' if is_secret else value)}")

    def problem_at(self, place: str, message: str, fix: str, value: str = "") -> None:
        self.problems.append(Problem(f"{self._locate(place)}: {_printable(place)}{value}", message, fix))

    def raise_problems(self) -> None:
        """Raise InputError with all problems, if there are any."""
        if self.problems:
            raise InputError(self.problems)

    def _locate(self, place: str) -> str:
        if any(f"{place}.".startswith((f"{o}.", f"{o}[")) or o.startswith(f"{place}.") for o in self.override_places):
            return COMMAND_LINE
        around = place
        while around and around not in self._all_lines:
            around = around[: max(around.rfind("."), around.rfind("["), 0)]
        return f"{self.file}:{self._all_lines[around]}" if around else self.file

    @cached_property
    def _all_lines(self) -> Mapping[str, int]:
        return {canonical_place(place): line for place, line in self.lines.items()} | dict(self.lines)


def read_fields(path: Path, overrides: Sequence[str] = (), *, interpolate: bool = True) -> SourceFields:
    """Read the fields of the file in ``path`` with ``overrides`` (``training.steps=50``), and resolve interpolations.

    Raises:
        InputError: the file cannot be read at all.
    """
    page = read_page(path)
    fields, repeated = flatten(page.values)
    source = SourceFields(str(path), page.lines, fields, list(page.problems))
    for override in overrides:
        try:
            for place, value in _parse_override(override):
                _override(fields, place, value)
                source.override_places.add(place)
        except InputError as error:
            source.problems += error.problems
    for clash in repeated:
        source.problem(*clash)
    if interpolate:
        _resolve(source)
    return source


def flatten(values: Mapping[str, Any]) -> tuple[Tree, list[tuple[str, Any, str, str]]]:
    """Return nested ``values`` as flat fields, and those given twice (place, value, message, fix)."""
    fields: Tree = {}
    sections: set[str] = set()
    repeated = []
    for written, value in leaves(values):
        place = canonical_place(written)
        if place == "model" and isinstance(value, str):
            place = "model.preset"
        # An axis over a section does not contain the axes over its fields. Axes are compared by the fields they set.
        outer_places = [outer for outer in _outer_places(place) if not outer.startswith("sweep.grid.")]
        if place in fields or place in sections or any(outer in fields for outer in outer_places):
            repeated.append((written, value, f"{place} is given twice", "keep one of them"))
            continue
        sections.update(outer_places)
        fields[place] = value
    return fields, repeated


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of each leaf of nested ``values``."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nest(fields: Mapping[str, Any]) -> Tree:
    """Nest flat fields as a recipe does: by section, and axes by their whole names under ``sweep: grid:``."""
    tree: Tree = {}
    for place, value in fields.items():
        *outer, name = _split(place)
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return tree


def _split(place: str) -> list[str]:
    return place.split(".", 2 if place.startswith("sweep.grid.") else 1)


def _outer_places(place: str) -> Iterator[str]:
    while "." in place:
        place = place.rpartition(".")[0]
        yield place


def _parse_override(override: str) -> list[tuple[str, Any]]:
    """Return the fields that ``override`` sets.

    Raises:
        InputError: it is not of the form key=value.
    """
    key, equals, text = override.partition("=")
    where = f"{COMMAND_LINE}: {_printable(override)}"
    if not equals or not key.strip():
        raise InputError([Problem(where, "an override is key=value", "write for example training.steps=50")])
    if "[" in key:
        raise InputError([Problem(where, "an override cannot change an item of a list", "give the whole list")])
    try:
        return list(flatten({key.strip(): parse_value(text)})[0].items())
    except InputError as error:
        fix = "quote the value, for the shell and for YAML"
        raise InputError([Problem(where, problem.message, fix) for problem in error.problems]) from None


def _override(fields: Tree, place: str, value: Any) -> None:
    """Put ``value`` at ``place``. It replaces what is there, what is below, and a value that stands for the section
    around it. A null in the sweep removes axes: ``sweep=null`` leaves one cell."""
    for other in list(fields):
        is_around = place.startswith(f"{other}.") and not other.startswith("sweep.grid.")
        if is_around or other.startswith(f"{place}."):
            del fields[other]
    if value is None and (place == "sweep" or place.startswith("sweep.")):
        fields.pop(place, None)
    else:
        fields[place] = value


def _resolve(source: SourceFields) -> None:
    """Resolve OmegaConf's interpolations in the fields. Remove the fields where that fails."""
    interpolated = {place: value for place, value in source.fields.items() if "${" in str(value)}
    if not interpolated:
        return
    flaws = {place: flaw for place, value in interpolated.items() if (flaw := _check_interpolation(value))}
    valid = {place: value for place, value in source.fields.items() if place not in flaws}
    config = OmegaConf.create(_nest(valid))
    for place in interpolated.keys() - flaws.keys():
        try:
            node = reduce(getitem, _split(place), config)
            valid[place] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            flaws[place] = (_first_line(error), "name a field of this recipe by its whole name")
            del valid[place]
    for place, value in interpolated.items():
        if place in flaws:
            source.problem(place, value, *flaws[place])
    # An interpolation may stand for a section.
    source.fields = flatten(_nest(valid))[0]


def _check_interpolation(value: Any) -> tuple[str, str] | None:
    """Return message and fix for an interpolation that is wrong whatever it resolves to."""
    secret = next(filter(is_secret_name, _ENVIRONMENT.findall(str(value))), None)
    if secret is not None:
        message = f"${secret} looks like a secret, and the orchestrator records recipes"
        return message, "remove it: runs see the variables of the shell"
    try:
        OmegaConf.create([value])
    except OmegaConfBaseException as error:
        return _first_line(error), "write ${...} as OmegaConf does"
    return None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _abbreviate(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _printable(text if len(text) <= 60 else text[:57] + "...")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
