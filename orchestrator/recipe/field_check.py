"""Checking fields: a recipe's own, those of one point of a sweep, and those of a model preset.

Checked fields are a tree by section, of plain values in their fields' types. Nothing is raised: problems are gathered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch.common.redact import is_secret_name
from orchestrator.errors import InputError, Problem, suggestion
from orchestrator.recipe.fields import HEAD, SCHEMAS, SECTIONS, TOP, meant, way_out
from orchestrator.recipe.section_schema import Schema
from orchestrator.recipe.source_fields import Source, SourceFields, Tree, read_written

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What names a folder or a file here."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Places = Callable[[str], str]
"""Where a field of a patch was written, given its place in the patch."""


class Checker:
    """Checks patches of one recipe, and loads the presets that they name."""

    def __init__(self, path: Path, source: Source) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.presets: dict[str, Tree] = {}
        self._path = path

    def problem(self, place: str, value: Any, message: str, remedy: str) -> None:
        self.problems.append(self.source.problem(place, value, message, remedy))

    def patch(self, fields: Mapping[str, Any], at: Places) -> Tree:
        """``fields`` checked: known ones only, values converted to their types, nested by section."""
        checked: Tree = {}
        for place, value in fields.items():
            section, _, name = place.partition(".")
            if section == "environment":
                self._variable(checked, name, value, at(place))
            elif place in HEAD.fields:
                self._leaf(HEAD, checked, place, value, at(place))
            elif section in SECTIONS and name:
                self._leaf(SCHEMAS[section], checked.setdefault(section, {}), name, value, at(place))
            elif section in SECTIONS:
                self._whole_section(section, value, at(place))
            else:
                self.problem(at(place), value, "no such field", meant(place, TOP))
        self._load_preset(checked.get("model", {}).get("preset"), at("model.preset"))
        return checked

    def preset(self, written: SourceFields) -> Tree:
        """The fields of a model preset, which stand at its file's top."""
        checked: Tree = {}
        for place, value in written.fields.items():
            if place == "preset":
                self.problem(place, value, "a preset cannot name another", "write its fields out")
            else:
                self._leaf(SCHEMAS["model"], checked, place, value, place)
        return checked

    def _whole_section(self, section: str, value: Any, place: str) -> None:
        fields = f"fields: {', '.join(SCHEMAS[section].fields)}"
        if value is None:
            self.problem(place, value, "an empty section", f"leave it out, or give it {fields}")
        elif value != {}:
            self.problem(place, value, "a section is a mapping of fields to values", fields)

    def _leaf(self, schema: Schema, into: Tree, key: str, value: Any, place: str) -> None:
        if key not in schema.fields:
            self.problem(place, value, "no such field", meant(place, schema.fields))
            return
        try:
            into[key] = schema.convert(key, value)
        except ValueError as error:
            self.problem(place, value, str(error), way_out(schema, key, value))

    def _variable(self, into: Tree, name: str, value: Any, place: str) -> None:
        flaw = check_variable(name, value)
        if flaw:
            self.problem(place, *flaw)
        else:
            into.setdefault("environment", {})[name] = str(value)

    def _load_preset(self, name: str | None, place: str) -> None:
        if name is None or name in self.presets:
            return
        self.presets[name] = {}
        found = find_preset(name, self._path)
        if found is None:
            self.problem(place, name, "no such preset", suggestion(name, preset_names(self._path)))
            return
        try:
            written = read_written(found)
        except InputError as error:
            self.problems += error.problems
            return
        checker = Checker(found, written.source)
        self.presets[name] = checker.preset(written)
        self.problems += (*written.problems, *checker.problems)


def check_variable(name: str, value: Any) -> tuple[Any, str, str] | None:
    """Why an environment variable is not taken: its value as it may be shown, what is wrong, and the way out."""
    if not name:
        return value, "a mapping of variables to values", "environment: {NCCL_GRAPH_REGISTER: '0'}"
    if not _VARIABLE.fullmatch(name):
        return value, "no name of an environment variable", "letters, digits and '_'"
    if is_secret_name(name):
        return (
            "***",
            "looks like a secret, and what is written here is recorded",
            "set it in the shell that runs the orchestrator",
        )
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "\0" in str(value):
        return value, "not the text of a variable", "write it in quotes"
    return None


def find_preset(name: str, recipe: Path) -> Path | None:
    """The file of a model preset: beside the recipe under models/, else among those that ship."""
    if not NAME.fullmatch(name):
        return None
    return next((p for folder in _preset_folders(recipe) if (p := folder / f"{name}.yaml").is_file()), None)


def preset_names(recipe: Path) -> list[str]:
    return sorted({path.stem for folder in _preset_folders(recipe) for path in folder.glob("*.yaml")})


def _preset_folders(recipe: Path) -> tuple[Path, ...]:
    return (recipe.parent / "models", Path(__file__).resolve().parents[2] / "recipes" / "models")
