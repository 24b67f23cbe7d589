"""Resolve the interpolations of a file: ``${training.steps}``, ``${oc.env:NAME,default}``. They cannot be nested.

The syntax is OmegaConf's. With OmegaConf a few lines can take hours. Here the number of fields between a field and the value that
it refers to is limited, and so is the total size of the results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launch.common.redact import is_secret_name
from orchestrator.recipe.yaml_reader import MOST_VALUES

MOST_BETWEEN = 3
"""The most fields between a field and a value that it refers to. A section counts as one."""
_INTERPOLATION = re.compile(r"(?<!\\)(?P<backslashes>\\*)\$\{(?P<inner>[^{}]*)(?P<end>\}?)")
_QUOTES = re.compile(r"(['\"])(.*)\1")
_FIX = "write ${training.steps} for a field of this file, or ${oc.env:NAME,default} for a variable of the shell"


class InterpolationError(ValueError):
    """An interpolation is wrong. The message says why."""

    def __init__(self, message: str, fix: str = _FIX) -> None:
        super().__init__(message)
        self.fix = fix


class Resolver:
    """Resolves the flat ``fields`` of one file, and variables of ``environment``."""

    def __init__(self, fields: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._fields = fields
        self._environment = environment
        self._open: list[str] = []
        """The fields being resolved. Each is named in an interpolation of the previous one."""
        self._left = MOST_VALUES

    def resolve(self, place: str) -> Any:
        """Return the value of a field, or the fields of a section by their names in it.

        Raises:
            InterpolationError: an interpolation in it is wrong, refers to itself, or has too large a result.
        """
        if len(self._open) > MOST_BETWEEN:
            path = " -> ".join([*self._open[-2:], place])
            raise InterpolationError(
                f"refers to itself, or through too many other fields ({path})", "write the value out"
            )
        self._open.append(place)
        try:
            return self._walk(self._read(place))
        finally:
            self._open.pop()

    def _read(self, place: str) -> Any:
        if place in self._fields:
            return self._fields[place]
        if not (inner := [name for name in self._fields if name.startswith(f"{place}.")]):
            raise InterpolationError(f"{place!r} not found")
        return {name.removeprefix(f"{place}."): self.resolve(name) for name in inner}

    def _walk(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._walk(item) for item in value]
        return self._expand(value) if isinstance(value, str) and "${" in value else value

    def _expand(self, text: str) -> Any:
        """Return ``text`` with each interpolation replaced. A text that is a single interpolation becomes its value."""
        found = list(_INTERPOLATION.finditer(text))
        if len(found) == 1 and found[0][0] == text and not found[0]["backslashes"]:
            return self._evaluate(found[0])
        return _INTERPOLATION.sub(lambda one: str(self._evaluate(one)), text)

    def _evaluate(self, found: re.Match[str]) -> Any:
        """Return the replacement of an interpolation and the backslashes before it. An odd number of these escapes it."""
        escapes, escaped = divmod(len(found["backslashes"]), 2)
        if escaped:
            return "\\" * escapes + found[0].lstrip("\\")
        if not found["end"]:
            message = "an interpolation has no end, or holds a brace or another interpolation"
            raise InterpolationError(
                message, "close ${ with }, replace an inner interpolation by its value, or write \\${ for a literal ${"
            )
        value = self._look_up(found["inner"])
        self._spend(value)
        return "\\" * escapes + str(value) if escapes else value

    def _look_up(self, expression: str) -> Any:
        """Return the value of ``expression``, the text between the braces."""
        resolver, colon, arguments = expression.strip().partition(":")
        name, comma, default = (part.strip() for part in arguments.partition(","))
        if not colon:
            return self.resolve(self._absolute(resolver))
        if resolver == "oc.env":
            return self._read_variable(name) if name in self._environment or not comma else _read_default(default)
        if resolver == "oc.select":
            place = self._absolute(name)
            known = any(f"{name}.".startswith(f"{place}.") for name in self._fields)
            return self.resolve(place) if known or not comma else _read_default(default)
        raise InterpolationError(f"{resolver!r} is not supported")

    def _absolute(self, name: str) -> str:
        """Return the place of ``name``. ``.seed`` is next to the field being resolved, and ``..seed`` is a level above."""
        rest = name.lstrip(".")
        around = self._open[-1] if rest != name else ""
        for _ in range(len(name) - len(rest)):
            around = around.rpartition(".")[0]
        return f"{around}.{rest}" if around else rest

    def _read_variable(self, name: str) -> str:
        if is_secret_name(name):
            message = f"${name} looks like a secret, and the orchestrator records recipes"
            raise InterpolationError(message, "remove it: runs see the variables of the shell")
        if name not in self._environment:
            raise InterpolationError(f"the shell has no variable {name!r}")
        return self._environment[name]

    def _spend(self, value: Any) -> None:
        """Count the characters of ``value``. Repeated content counts each time."""
        self._left -= 1 + len(str(value))
        if self._left < 0:
            message = f"interpolations stand for more than {MOST_VALUES:,} characters"
            raise InterpolationError(message, "write the values out")


def _read_default(text: str) -> str | None:
    quoted = _QUOTES.fullmatch(text)
    return quoted[2] if quoted else None if text == "null" else text
