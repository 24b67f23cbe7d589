"""A YAML file with the command line's overrides, as flat fields with their lines.

A field's place is its dotted path, whether the user wrote it nested (``training: {steps: 50}``), dotted (``training.steps:
50``) or in Megatron's spelling. The axes of a sweep have places too (``sweep.grid.training.seed``). Lists are values. An
override replaces the file's value at its place.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.common.redact import Secrets
from orchestrator.errors import InputError, Problem, input_error
from orchestrator.recipe.aliases import canonical_place
from orchestrator.recipe.interpolation import InterpolationError, Resolver
from orchestrator.recipe.yaml_reader import dump, parse_value, read_page

Tree = dict[str, Any]
COMMAND_LINE = "command line"
SECRET_FIX = "set it in the shell of the orchestrator; a profile's setup may read a file: export X=$(cat FILE)"


@dataclass
class SourceFields:
    """The fields of one file by place, in its order, and every problem found in them so far."""

    file: str
    lines: Mapping[str, int]
    fields: Tree
    problems: list[Problem]
    override_places: set[str] = field(default_factory=set)
    """Places that the command line sets."""
    secrets: Secrets = field(default_factory=Secrets)
    """The secrets of this shell. Messages never show them."""

    @property
    def text(self) -> str:
        """The fields as YAML. Reading it returns the same fields."""
        return dump(_nest(self.fields))

    def problem(self, place: str, value: Any, message: str, fix: str) -> None:
        """Add a problem with the ``value`` at ``place``."""
        shown = "***" if self.secrets.holds(place, value) else value
        self.problem_at(place, message, fix, f" = {_abbreviate(shown)}")

    def problem_at(self, place: str, message: str, fix: str, value: str = "") -> None:
        where = self.secrets.hide(f"{self._locate(place)}: {_printable(place)}{value}")
        self.problems.append(Problem(where, self.secrets.hide(message), fix))

    def raise_problems(self) -> None:
        """Raise InputError with all problems, if any: problems of this file first, by line."""
        if self.problems:
            raise InputError(sorted(self.problems, key=self._position))

    def _position(self, problem: Problem) -> tuple[bool, bool, str, int]:
        file, _, rest = problem.place.partition(":")
        line = re.match(r"\d+", rest)
        return file == COMMAND_LINE, file != self.file, file, int(line[0]) if line else 0

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
        InputError: the file cannot be read at all, or its name is a secret.
    """
    secrets = Secrets()
    if found := secrets.find(path.name):
        message = f"its name looks like a secret ({found}), and the orchestrator records it"
        raise input_error(secrets.hide(str(path)), message, "rename the file")
    page = read_page(path)
    fields, repeated = flatten(page.values)
    source = SourceFields(str(path), page.lines, fields, list(page.problems), secrets=secrets)
    for override in overrides:
        try:
            for place, value in _parse_override(override, source.secrets):
                _override(fields, place, value)
                source.override_places.add(place)
        except InputError as error:
            source.problems += error.problems
    for clash in repeated:
        source.problem(*clash)
    if interpolate:
        _resolve(source)
    for place, found in source.secrets.find_in(source.fields):
        message = f"looks like a secret ({found}), and the orchestrator records this value"
        source.problem_at(place[1:], message, SECRET_FIX, ' = "***"')
    return source


def flatten(values: Mapping[str, Any]) -> tuple[Tree, list[tuple[str, Any, str, str]]]:
    """Return nested ``values`` as flat fields, and the fields that are given twice as (place, value, message, fix)."""
    fields: Tree = {}
    sections: set[str] = set()
    repeated = []
    for written, value in leaves(values):
        place = canonical_place(written)
        if place == "model" and isinstance(value, str):
            place = "model.preset"
        # An axis over a section does not contain axes over its fields. Axes are compared by the fields that they set.
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
    """Nest flat fields as a recipe does: fields by section, and axes with their whole names under ``sweep: grid:``."""
    tree: Tree = {}
    for place, value in fields.items():
        *outer, name = place.split(".", 2 if place.startswith("sweep.grid.") else 1)
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return tree


def _outer_places(place: str) -> Iterator[str]:
    while "." in place:
        place = place.rpartition(".")[0]
        yield place


def _parse_override(override: str, secrets: Secrets) -> list[tuple[str, Any]]:
    """Return the fields that ``override`` sets.

    Raises:
        InputError: it is not of the form key=value.
    """
    key, equals, text = override.partition("=")
    where = f"{COMMAND_LINE}: {_printable(f'{key}=***' if secrets.holds(key, text) else override)}"
    if not equals or not key.strip():
        raise InputError([Problem(where, "an override is key=value", "write for example training.steps=200")])
    if "[" in key:
        raise InputError([Problem(where, "an override cannot change an item of a list", "give the whole list")])
    try:
        return list(flatten({key.strip(): parse_value(text)})[0].items())
    except InputError as error:
        fix = "quote the value, for the shell and for YAML"
        raise InputError([Problem(where, problem.message, fix) for problem in error.problems]) from None


def _override(fields: Tree, place: str, value: Any) -> None:
    """Set ``value`` at ``place``.

    It replaces the value there, all values below, and a value in place of the section around it. A null in the sweep removes
    axes: ``sweep=null`` leaves one cell.
    """
    for other in list(fields):
        is_around = place.startswith(f"{other}.") and not other.startswith("sweep.grid.")
        if is_around or other.startswith(f"{place}."):
            del fields[other]
    if value is None and (place == "sweep" or place.startswith("sweep.")):
        fields.pop(place, None)
    else:
        fields[place] = value


def _resolve(source: SourceFields) -> None:
    """Resolve the interpolations in the fields. Remove fields with a wrong interpolation."""
    if not any("${" in str(value) for value in source.fields.values()):
        return
    resolver = Resolver(source.fields, os.environ)
    resolved: Tree = {}
    for place, value in source.fields.items():
        try:
            resolved[place] = resolver.resolve(place)
        except InterpolationError as error:
            source.problem(place, value, str(error), error.fix)
    # The value of an interpolation may be a section.
    source.fields = flatten(_nest(resolved))[0]


def _abbreviate(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _printable(text if len(text) <= 60 else text[:57] + "...")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
