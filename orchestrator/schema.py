"""A dataclass as the schema of a section: which fields it has, and values converted to their types by OmegaConf."""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Iterable
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


class Schema:
    """The fields of one frozen dataclass."""

    def __init__(self, cls: type) -> None:
        self._types = typing.get_type_hints(cls)
        self._config = OmegaConf.structured(cls)
        self.fields = tuple(field.name for field in dataclasses.fields(cls))
        self._converted: dict[tuple[str, str], Any] = {}

    def convert(self, key: str, value: Any) -> Any:
        """``value`` as the type of field ``key``.

        Raises:
            ValueError: it cannot be; the message says why.
        """
        memo = (key, json.dumps(value, default=repr))
        if memo not in self._converted:
            self._converted[memo] = self._convert(key, value)
        return self._converted[memo]

    def _convert(self, key: str, value: Any) -> Any:
        if isinstance(value, str) and self._is_sequence(key):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, bool) and self._types[key] in (int, float):
            raise ValueError(f"{value} is not a number")
        try:
            merged = OmegaConf.merge(self._config, {key: value})
            converted = OmegaConf.to_container(merged)[key]  # type: ignore[index, call-overload]
        except OmegaConfBaseException as error:
            raise ValueError(str(error).splitlines()[0]) from error
        return tuple(converted) if self._is_sequence(key) else converted

    def choices(self, key: str) -> tuple[str, ...]:
        """The values of a field that has a closed set of them, none where it is open."""
        kind = self._types[key]
        for candidate in (kind, *typing.get_args(kind)):
            if typing.get_origin(candidate) is Literal:
                return tuple(str(choice) for choice in typing.get_args(candidate))
        return ()

    def _is_sequence(self, key: str) -> bool:
        return typing.get_origin(self._types[key]) is tuple


def suggestion(written: Any, known: Iterable[str], otherwise: str = "") -> str:
    """ "did you mean ...?" where something known is close, else the known things, else ``otherwise``."""
    names = sorted(known)
    close = difflib.get_close_matches(str(written), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return otherwise or (f"known: {', '.join(names)}" if names else "")
