"""A dataclass as the schema of a section: which fields it has, and values converted to their types by OmegaConf."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from typing import Any, Literal

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.rules.bounds import Interval

WIDEST = 2**63
"""Whole numbers below it, and above its negative, are what a signed 64-bit integer holds."""

_INTERPOLATION = re.compile(r"(\\*)\$\{")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list of words",
          dict: "a mapping of names to text"}  # fmt: skip


class Schema:
    """The fields of one frozen dataclass."""

    def __init__(self, cls: type, bounds: Mapping[str, Interval]) -> None:
        self._bounds = bounds
        self._types = typing.get_type_hints(cls)
        self._scratch = OmegaConf.structured(cls)
        OmegaConf.set_readonly(self._scratch, False)  # frozen dataclasses make frozen configs
        self.fields = tuple(field.name for field in dataclasses.fields(cls))
        self._converted: dict[tuple[str, str], Any] = {}

    def convert(self, key: str, value: Any) -> Any:
        """``value`` as the type of field ``key``.

        Raises:
            ValueError: it cannot be; the message says what the field takes.
        """
        if type(value) is self._types[key]:
            return self._bounded(key, value)
        memo = (key, repr(value))
        if memo not in self._converted:
            self._converted[memo] = self._convert(key, value)
        return self._converted[memo]

    def choices(self, key: str) -> tuple[str, ...]:
        """The values of a field that has a closed set of them, none where it is open."""
        for candidate in (self._types[key], *typing.get_args(self._types[key])):
            if typing.get_origin(candidate) is Literal:
                return tuple(str(choice) for choice in typing.get_args(candidate))
        return ()

    def is_list(self, key: str) -> bool:
        return typing.get_origin(self._types[key]) is tuple

    def describe_type(self, key: str) -> str:
        """What field ``key`` takes, in words: "a whole number", "one of fp32, bf16"."""
        kind = self._types[key]
        null = ", or null" if self._takes_null(key) else ""
        if self.choices(key):
            return f"one of {', '.join(self.choices(key))}{null}"
        plain = next((t for t in typing.get_args(kind) if t is not type(None)), kind) if null else kind
        return _WORDS[typing.get_origin(plain) or plain] + null

    def _takes_null(self, key: str) -> bool:
        return type(None) in typing.get_args(self._types[key])

    def _convert(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and self.is_list(key):
            value = [part.strip() for part in value.split(",") if part.strip()]
        refused = ValueError(f"not {self.describe_type(key)}")
        if value == MISSING or not _has_sense(value, self._types[key] is bool):
            raise refused
        try:
            OmegaConf.update(self._scratch, key, _literal(value))
            converted = self._scratch[key]
        except OmegaConfBaseException:
            raise refused from None
        return tuple(converted) if self.is_list(key) else self._bounded(key, converted)

    def _bounded(self, key: str, value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("not a finite number")
        if isinstance(value, int) and not -WIDEST < value < WIDEST:
            raise ValueError("beyond 64 bits")
        if value is not None and key in self._bounds and value not in self._bounds[key]:
            raise ValueError(f"must be {self._bounds[key]}")
        return value


def _literal(value: Any) -> Any:
    """``value`` without interpolations: those of a recipe have been resolved before, and a profile's are the shell's."""
    if isinstance(value, list):
        return [_literal(item) for item in value]
    return _INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _has_sense(value: Any, takes_bool: bool) -> bool:
    """YAML reads a bare ``yes`` as true, which OmegaConf would take for the number 1 or the text "True"; and 3 for true."""
    if takes_bool:
        return isinstance(value, (bool, str))
    return not any(isinstance(item, bool) for item in (value if isinstance(value, list) else [value]))
