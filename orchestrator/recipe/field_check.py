"""Check the fields of a YAML file against dataclasses, for recipes, model presets and cluster profiles.

Checks raise no errors. They collect every problem, with line, field, value and fix.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import UnionType
from typing import Any, Literal, NamedTuple

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.common.redact import is_secret_name
from launch.megatron_config.absent_fields import absent_field, absent_value
from launch.megatron_config.field_names import DEPRECATED, FIELDS
from orchestrator.recipe.aliases import canonical_place
from orchestrator.recipe.ranges import Interval
from orchestrator.recipe.source_fields import SECRET_FIX, SourceFields, Tree
from orchestrator.suggestion import suggestion

WIDEST = 2**63
"""Whole numbers between minus this number and this number, both excluded, fit into a signed 64-bit integer."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INTERPOLATION = re.compile(r"(?<!\\)(\\*)\$\{")
_TYPE_NAMES = {UnionType: "a whole number, or auto", int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list of words",
               dict: "a mapping of names to text"}  # fmt: skip


class Flaw(NamedTuple):
    """What is wrong with a value, and how to correct it."""

    message: str
    fix: str


Check = Callable[[Any], Flaw | None]
"""Check one value, or one item of a list."""
EntryCheck = Callable[[str, Any], Flaw | None]
"""Check the name and the value of an entry of a mapping."""
Places = Callable[[str], str]
"""Return where the user wrote a field, given its name."""


def interval_check(interval: Interval) -> Check:
    """Return the check that a number lies in ``interval``."""
    fix = "write such a number, or leave it out for the default"
    return lambda number: None if number in interval else Flaw(f"must be {interval}", fix)


def checked_field(default: Any, check: Check | None = None, **metadata: Any) -> Any:
    """Declare a field of a dataclass whose values ``check`` judges. ``instead`` has the fixes of values that it does not take."""
    return field(default=default, metadata={"check": check, **metadata})


class Schema:
    """The fields of one frozen dataclass. OmegaConf converts values to their types."""

    def __init__(self, cls: type, checks: Mapping[str, Check] | None = None, *, separator: str = ",") -> None:
        """Read the fields of ``cls``. ``checks`` are added to the checks of the fields.

        For a list field, ``separator`` is the pattern that splits a text into items; with "" texts are not split.
        """
        fields = dataclasses.fields(cls)
        self.fields = tuple(field.name for field in fields)
        self._instead = {field.name: field.metadata.get("instead", {}) for field in fields}
        self._checks = {field.name: field.metadata.get("check") for field in fields} | dict(checks or {})
        self._separator = separator
        self._types = typing.get_type_hints(cls)
        self._scratch = OmegaConf.structured(cls)
        # OmegaConf makes the config of a frozen dataclass read-only.
        OmegaConf.set_readonly(self._scratch, False)

    def convert(self, key: str, value: Any) -> Any:
        """Return ``value`` as the type of field ``key``.

        Raises:
            ValueError: the field does not take the value. The message says what is wrong with the value.
        """
        converted = value if type(value) is self._types[key] else self._convert(key, value)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError("not a finite number")
        if isinstance(converted, int) and not -WIDEST < converted < WIDEST:
            raise ValueError("does not fit into 64 bits")
        return converted

    def find_flaws(self, key: str, converted: Any) -> Iterator[tuple[str, Any, Flaw]]:
        """Yield each flaw of a converted value or its items, as (index "[2]" or "", item, flaw)."""
        check = self._checks[key]
        if check is None or converted is None:
            return
        items = [(f"[{i}]", item) for i, item in enumerate(converted)] if self.is_list(key) else [("", converted)]
        yield from ((index, item, flaw) for index, item in items if (flaw := check(item)))

    def choices(self, key: str) -> tuple[str, ...]:
        """Return the values of a field that has a closed set of values, otherwise an empty tuple."""
        for candidate in (self._types[key], *typing.get_args(self._types[key])):
            if typing.get_origin(candidate) is Literal:
                return tuple(str(choice) for choice in typing.get_args(candidate))
        return ()

    def is_list(self, key: str) -> bool:
        return typing.get_origin(self._types[key]) is tuple

    def describe_type(self, key: str) -> str:
        """Describe the values of field ``key``: "a whole number", "one of fp32, bf16"."""
        kind = self._types[key]
        null = ", or null" if type(None) in typing.get_args(kind) else ""
        if self.choices(key):
            return f"one of {', '.join(self.choices(key))}{null}"
        plain = next((t for t in typing.get_args(kind) if t is not type(None)), kind) if null else kind
        return _TYPE_NAMES[typing.get_origin(plain) or plain] + null

    def suggest_value(self, key: str, value: Any) -> str:
        """Return the fix for a ``value`` that field ``key`` does not take. ``instead`` of its metadata has those of known ones."""
        if fix := self._instead[key].get(str(value)):
            return str(fix)
        if self.choices(key):
            # No suggestion is better than a wrong one, and "gpu" is two thirds of "cpu".
            return suggestion(value, self.choices(key), otherwise="write one of them", cutoff=0.7)
        if isinstance(value, (bool, int, float)) and "text" in self.describe_type(key):
            return f"write it in quotes: '{value}'"
        example = f"{key}: [first, second]" if self.is_list(key) else self.describe_type(key)
        return f"write {example}, or leave it out for the default"

    def _convert(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and self.is_list(key) and self._separator:
            value = [part.strip() for part in re.split(self._separator, value) if part.strip()]
        if isinstance(value, float) and self.choices(key):
            value = str(value)  # a release, which YAML reads as a number
        refused = ValueError(f"not {self.describe_type(key)}")
        if value == MISSING or not _is_bool_only_where_wanted(value, self._types[key] is bool):
            raise refused
        try:
            OmegaConf.update(self._scratch, key, _escape_interpolations(value))
            converted = self._scratch[key]
        except OmegaConfBaseException:
            raise refused from None
        return tuple(converted) if self.is_list(key) else converted


@dataclass(frozen=True)
class FileSchema:
    """The content that one kind of file may have: fields at the top, sections of fields, and mappings with the user's names."""

    top: Schema
    sections: Mapping[str, Schema] = field(default_factory=dict)
    mappings: Mapping[str, EntryCheck] = field(default_factory=dict)
    rejections: Mapping[str, Flaw] = field(default_factory=dict)
    """Names at the top that are rejected with a message of their own."""
    other_names: tuple[str, ...] = ()
    """Names at the top that other code reads. Messages list them."""

    @cached_property
    def fields(self) -> Mapping[str, tuple[Schema, str]]:
        """The schema and key of each field, by its whole name ("training.steps")."""
        top = {key: (self.top, key) for key in self.top.fields}
        return top | {f"{name}.{key}": (schema, key) for name, schema in self.sections.items() for key in schema.fields}

    def mapping_of(self, name: str) -> str:
        """Return the mapping that ``name`` names, or of which it names an entry; "" if neither."""
        return next((mapping for mapping in self.mappings if f"{name}.".startswith(f"{mapping}.")), "")

    def check_name(self, name: str) -> Flaw | None:
        """Return what is wrong with ``name`` if it names no field, section or entry of a mapping, otherwise None."""
        first = name.partition(".")[0]
        if first in self.rejections:
            return self.rejections[first]
        if name in self.fields or name in self.sections or self.mapping_of(name):
            return None
        if first in self.top.fields:
            return Flaw(f"{first} is not a mapping", f"write {self.top.describe_type(first)}")
        # A source may give a whole section that no engine has, such as peft.
        absent = (absent_field(part) for part in (canonical_place(name).rpartition(".")[2], first))
        if flaw := next(filter(None, absent), None):
            return Flaw(*flaw)
        return Flaw("no such field", self._suggest_name(name, first))

    def _suggest_name(self, name: str, first: str) -> str:
        mappings = (name for name in self.mappings if "." not in name)
        names = (*self.top.fields, *self.sections, *mappings, *self.other_names)
        known = [other for other in names if other not in self.rejections]
        if first in self.sections:
            inner = (one.rpartition(".")[2] for one in self.mappings if one.startswith(f"{first}."))
            known = [*self.sections[first].fields, *inner]
            if (key := name.split(".")[1]) not in known and name.count(".") > 1:
                return suggestion(key, known)
        last = canonical_place(name).rpartition(".")[2]
        if last in DEPRECATED:
            return f"write {' = '.join(DEPRECATED[last])}"
        if last in FIELDS and FIELDS[last] in self.fields:
            return f"write {FIELDS[last]}"
        same = [other for other in self.fields if other.rpartition(".")[2] == last]
        elsewhere = next((other for other in same if other.partition(".")[0] not in self.rejections), None)
        if elsewhere is None:
            return suggestion(last, known)
        # A typing error of one letter is likelier than a wrong section.
        return suggestion(last, known, f"did you mean {elsewhere!r}?", cutoff=0.85)


def check_fields(
    source: SourceFields, schema: FileSchema, fields: Mapping[str, Any] | None = None, locate: Places = str
) -> Tree:
    """Return the valid fields of ``fields``, converted to their types and nested by section. Problems go to ``source``.

    Without ``fields``, check all fields of ``source``.
    """
    checked: Tree = {}
    for name, value in (source.fields if fields is None else fields).items():
        section, _, key = name.partition(".")
        if flaw := schema.check_name(name):
            last = canonical_place(name).rpartition(".")[2]
            source.problem(locate(name), value, *(absent_value(last, value) or flaw))
            continue
        into = checked.setdefault(section, {}) if key else checked
        mapping = schema.mapping_of(name)
        if mapping and name != mapping:
            if flaw := schema.mappings[mapping](name.removeprefix(f"{mapping}."), value):
                source.problem(locate(name), value, *flaw)
            into[key] = value if section in schema.sections else "" if value is None else str(value)
        elif name in schema.mappings or name in schema.sections:
            if flaw := _check_whole(name, value, schema):
                source.problem(locate(name), value, *flaw)
        else:
            _check_field(source, *schema.fields[name], value, locate(name), into)
    return checked


def _check_field(source: SourceFields, schema: Schema, key: str, value: Any, place: str, into: Tree) -> None:
    try:
        into[key] = schema.convert(key, value)
    except ValueError as error:
        source.problem(place, value, *(absent_value(key, value) or (str(error), schema.suggest_value(key, value))))
        return
    for index, item, flaw in schema.find_flaws(key, into[key]):
        source.problem(f"{place}{index}", item if index else value, *flaw)


def _check_whole(name: str, value: Any, schema: FileSchema) -> Flaw | None:
    """Check the value of a whole section or mapping. Only {} is valid, because content arrives as separate fields."""
    if value == {}:
        return None
    if name in schema.mappings:
        return Flaw("not a mapping of names to text", f"write {name}: {{NAME: 'text'}}, or leave it out")
    message = "an empty section" if value is None else "not a mapping of fields to values"
    return Flaw(message, f"leave it out, or give it fields: {', '.join(schema.sections[name].fields)}")


def check_variable(name: str, value: Any) -> Flaw | None:
    """Return what is wrong with an environment variable for runs."""
    if not _VARIABLE.fullmatch(name):
        return Flaw("not the name of an environment variable", "use letters, digits and '_', no digit first")
    if is_secret_name(name):
        return Flaw("looks like a secret, and the orchestrator records this value", SECRET_FIX)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "\0" in str(value):
        return Flaw("not the text of a variable", "write it in quotes")
    return None


def _escape_interpolations(value: Any) -> Any:
    """Escape ``${``. A recipe's interpolations are already resolved, and a profile's are for the shell."""
    if isinstance(value, list):
        return [_escape_interpolations(item) for item in value]
    return _INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _is_bool_only_where_wanted(value: Any, takes_bool: bool) -> bool:
    """Return whether ``value`` is a boolean only if the field takes one.

    OmegaConf would read YAML's bare ``yes`` as the number 1 or the text "True" for other fields, and 3 as true for this one.
    """
    if takes_bool:
        return isinstance(value, (bool, str))
    return not any(isinstance(item, bool) for item in (value if isinstance(value, list) else [value]))
