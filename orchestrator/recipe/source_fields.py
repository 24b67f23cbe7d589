"""What the user wrote: a YAML file with the command line's overrides, as flat fields that know where they stand.

A field's place is its dotted path, whether it was written nested (``training: {steps: 50}``), dotted
(``training.steps: 50``) or in Megatron's spelling; so are the axes of a sweep (``sweep.grid.training.seed``). Lists are
values. An override replaces what the file holds at its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class Source:
    """Where things stand: in which line of a file, or on the command line."""

    file: str
    lines: Mapping[str, int]
    overridden: frozenset[str] = frozenset()

    def problem(self, place: str, value: Any, message: str, remedy: str = "") -> Problem:
        return Problem(f"{self._where(place)}: {_printable(place)} = {_shown(value)}", message, remedy)

    def missing(self, place: str, message: str, remedy: str) -> Problem:
        return Problem(f"{self._where(place)}: {place}", message, remedy)

    def _where(self, place: str) -> str:
        if any(f"{place}.".startswith((f"{o}.", f"{o}[")) or o.startswith(f"{place}.") for o in self.overridden):
            return COMMAND_LINE
        around = place
        while around and around not in self._all_lines:
            around = around[: max(around.rfind("."), around.rfind("["), 0)]
        return f"{self.file}:{self._all_lines[around]}" if around else self.file

    @cached_property
    def _all_lines(self) -> Mapping[str, int]:
        return {canonical_place(place): line for place, line in self.lines.items()} | dict(self.lines)


@dataclass(frozen=True)
class SourceFields:
    """Fields by place, in the order of the file, and what was wrong with them already."""

    fields: Mapping[str, Any]
    source: Source
    problems: tuple[Problem, ...]

    @property
    def text(self) -> str:
        """The fields as YAML, which reads back as the same fields."""
        return dump(nested(self.fields))


def read_written(path: Path, overrides: Sequence[str] = ()) -> SourceFields:
    """The fields of the file in ``path``, with ``overrides`` (``training.steps=50``), interpolations resolved.

    Raises:
        InputError: the file cannot be read at all.
    """
    page = read_page(path)
    fields, twice = flatten(page.values)
    given, faults = _overrides(overrides)
    for place, value in given:
        _override(fields, place, value)
    source = Source(str(path), page.lines, frozenset(place for place, _ in given))
    problems = [*page.problems, *faults, *(source.problem(*clash) for clash in twice)]
    resolved, unresolved = _resolve(fields, source)
    return SourceFields(resolved, source, (*problems, *unresolved))


def flatten(values: Mapping[str, Any]) -> tuple[Tree, list[tuple[str, Any, str, str]]]:
    """Nested ``values`` as flat fields, and those given twice (place, value, message, way out)."""
    fields: Tree = {}
    sections: set[str] = set()
    twice = []
    for written, value in _leaves(values, ""):
        place = canonical_place(written)
        if place == "model" and isinstance(value, str):
            place = "model.preset"
        # Axes over a section and over its fields may stand side by side: the fields that they set tell them apart.
        above = [outer for outer in _above(place) if not outer.startswith("sweep.grid.")]
        if place in fields or place in sections or any(outer in fields for outer in above):
            twice.append((written, value, f"{place} is given twice", "keep one of them"))
            continue
        sections.update(above)
        fields[place] = value
    return fields, twice


def nested(fields: Mapping[str, Any]) -> Tree:
    """Flat fields as a recipe nests them: by section, and axes by their whole keys under ``sweep: grid:``."""
    tree: Tree = {}
    for place, value in fields.items():
        *outer, name = _parts(place)
        inner = tree
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return tree


def _parts(place: str) -> list[str]:
    return place.split(".", 2 if place.startswith("sweep.grid.") else 1)


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _above(place: str) -> Iterator[str]:
    while "." in place:
        place = place.rpartition(".")[0]
        yield place


def _overrides(written: Iterable[str]) -> tuple[list[tuple[str, Any]], list[Problem]]:
    given: list[tuple[str, Any]] = []
    problems: list[Problem] = []
    for override in written:
        key, equals, text = override.partition("=")
        where = f"{COMMAND_LINE}: {_printable(override)}"
        if not equals or not key.strip():
            problems.append(Problem(where, "an override is key=value", "write for example training.steps=50"))
        elif "[" in key:
            problems.append(Problem(where, "an override cannot reach into a list", "give the whole list"))
        else:
            try:
                given += flatten({key.strip(): parse_value(text)})[0].items()
            except InputError as error:
                remedy = "quote the value, for the shell and for YAML"
                problems += [Problem(where, problem.message, remedy) for problem in error.problems]
    return given, problems


def _override(fields: Tree, place: str, value: Any) -> None:
    """Put ``value`` at ``place``, instead of what is there, below it, or stands for the whole around it. A null in
    the sweep takes away: ``sweep=null`` leaves one cell."""
    for other in list(fields):
        around = place.startswith(f"{other}.") and not other.startswith("sweep.grid.")
        if around or other.startswith(f"{place}."):
            del fields[other]
    if value is None and (place == "sweep" or place.startswith("sweep.")):
        fields.pop(place, None)
    else:
        fields[place] = value


def _resolve(fields: Tree, source: Source) -> tuple[Tree, list[Problem]]:
    """``fields`` with OmegaConf's interpolations resolved; what cannot be is left out."""
    named = {place: value for place, value in fields.items() if "${" in str(value)}
    if not named:
        return fields, []
    flaws = {place: flaw for place, value in named.items() if (flaw := _flaw(value))}
    kept = {place: value for place, value in fields.items() if place not in flaws}
    config = OmegaConf.create(nested(kept))
    for place in named.keys() - flaws.keys():
        try:
            kept[place] = _resolved(config, place)
        except OmegaConfBaseException as error:
            flaws[place] = (_first_line(error), "name a field that the recipe holds, by its whole key")
            del kept[place]
    problems = [source.problem(place, named[place], *flaws[place]) for place in named if place in flaws]
    return flatten(nested(kept))[0], problems


def _flaw(value: Any) -> tuple[str, str] | None:
    """What is wrong with an interpolation before it is resolved, and the way out."""
    try:
        OmegaConf.create({"value": value})
    except OmegaConfBaseException as error:
        return _first_line(error), "write ${...} as OmegaConf does"
    for name in _ENVIRONMENT.findall(str(value)):
        if is_secret_name(name):
            return (
                f"${name} looks like a secret, and recipes are recorded",
                "take it out: runs see the shell's variables",
            )
    return None


def _resolved(config: Any, place: str) -> Any:
    for part in _parts(place):
        config = config[part]
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _printable(text if len(text) <= 60 else text[:57] + "...")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
