"""Read frozen dataclasses from JSON, by the types of their fields.

A record is damaged or of another version if its fields or the types of its values differ from its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from launch.common.atomic_files import NOT_FINITE, RecordError, amount, number, read_json

Amount = Annotated[float, amount]
"""A finite number of at least 0. The function of an ``Annotated`` type takes a value and its name, and raises ValueError."""
Count = Annotated[int, amount]

_TYPE_NAMES = {
    float: "a number", int: "a whole number", str: "text", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip

_PLAIN: Mapping[Any, tuple[type, ...]] = {
    str: (str,), int: (int,), float: (float, int), bool: (bool,), str | None: (str, NoneType), int | None: (int, NoneType),
    Mapping[str, Any]: (dict,),
}  # fmt: skip
"""For each type of field, the types of values that need no conversion."""

Record = TypeVar("Record")
Read = Callable[[Any, str], Any]
"""Converts (value, its name in messages) to the value of a field."""


def from_json(cls: type[Record], content: object) -> Record:
    """Return the ``cls`` in ``content``.

    Raises:
        TypeError: a field is missing, unknown or of another type. The message has its name.
        ValueError: a list has another length, or the function of an ``Annotated`` type rejects a value.
    """
    record: Record = _reader(cast(Any, cls))(content, "")
    return record


def read_record(cls: type[Record], path: Path) -> Record:
    """Return the ``cls`` in the file ``path``.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is damaged, or of another version.
    """
    content = read_json(path)
    try:
        return from_json(cls, content)
    except (TypeError, ValueError) as error:
        raise RecordError(str(error)) from error


@cache
def _reader(kind: Any) -> Read:
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record_reader(kind)
    if origin is Annotated:
        return _checked_reader(_reader(parts[0]), parts[1])
    if origin in (Union, UnionType):
        known = _reader(parts[0])
        return lambda value, name: None if value is None else known(value, name)
    if origin is tuple and parts[-1] is Ellipsis:
        item = _reader(parts[0])
        return lambda value, name: tuple(item(one, name) for one in _check(value, name, list))
    if origin is tuple:
        items = list(map(_reader, parts))
        return lambda value, name: tuple(
            read(one, name) for read, one in zip(items, _check(value, name, list), strict=True)
        )
    if origin is Mapping:
        of_key, of_value = map(_reader, parts)
        return lambda value, name: {of_key(k, name): of_value(v, name) for k, v in _check(value, name, dict).items()}
    if origin is Literal:
        return lambda value, name: _check(value, name, str, choices=parts)
    if kind is Any:
        return lambda value, name: value
    if kind is float:
        return lambda value, name: value if type(value) is float else _read_float(value, name)
    return lambda value, name: value if type(value) is kind else _check(value, name, kind)


def _read_float(value: Any, name: str) -> float:
    return number(value) if value in NOT_FINITE else cast(float, _check(value, name, float, int))


def _checked_reader(read: Read, check: Read) -> Read:
    def read_checked(value: Any, name: str) -> Any:
        check(value, name)
        return read(value, name)

    return read_checked


def _record_reader(cls: Any) -> Read:
    hints = get_type_hints(cls, include_extras=True)
    readers = {name: _reader(hints[name]) for name in cls.__dataclass_fields__}
    plain = {name: _PLAIN.get(hints[name], ()) for name in readers}

    def read(content: Any, name: str) -> Any:
        if _check(content, name, dict).keys() != readers.keys():
            wrong = sorted(map(str, content.keys() ^ readers.keys()))
            raise TypeError(f"{name or 'the record'} has different fields than in this version: {', '.join(wrong)}")
        prefix = f"{name}." if name else ""
        # Avoid a call for most values, because a store has thousands of records.
        return cls(
            **{
                field: value if type(value := content[field]) in plain[field] else read_field(value, prefix + field)
                for field, read_field in readers.items()
            }
        )

    return read


def _check(value: Any, name: str, *types: type, choices: tuple[Any, ...] = ()) -> Any:
    if type(value) not in types or (choices and value not in choices):
        expected = f"one of {', '.join(choices)}" if choices else _TYPE_NAMES[types[0]]
        raise TypeError(f"{name or 'the record'} is {value!r}, not {expected}")
    return value
