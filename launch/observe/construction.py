"""Describe an object of the program by the arguments with which it was made. Nothing of the program is called."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

_MOST = 16
"""The number of values of a list to show. Longer ones are data."""
_STATE = ("last_epoch", "epoch")
"""Arguments that are kept where later steps change them."""
_UNLIKE = ("_schedule_phases", "total_size", "step_ratio")
"""Where OneCycleLR and CyclicLR keep their arguments."""


def describe_construction(made: object) -> str:
    """Return the class of ``made``, and those of its arguments that it keeps under their names and that are settings."""
    kept = getattr(made, "__dict__", {})
    places = ((name, place) for name in _arguments(type(made)) for place in (name, f"_{name}", f"{name}s"))
    texts: dict[str, str] = {}
    for name, place in (*places, *((one, one) for one in _UNLIKE)):
        if name not in _STATE and name not in texts and (text := text_of(kept.get(place))):
            texts[name] = f"{name.strip('_')} {text}"
    return " ".join([type(made).__name__, *([f"({', '.join(texts.values())})"] if texts else [])])


def _arguments(kind: type) -> Iterator[str]:
    """Yield the names of the arguments of ``kind`` and its bases."""
    for base in kind.__mro__:
        if inspect.isfunction(begin := vars(base).get("__init__")):
            yield from inspect.signature(begin).parameters


def text_of(value: object) -> str:
    """Return a setting as text, with floats rounded as float32 may be; "" for what is no setting, such as data."""
    if isinstance(value, partial):
        value = [value.func, *value.args, *value.keywords, *value.keywords.values()]
    if isinstance(value, dict):
        value = [f"{name} {text_of(one)}" for name, one in value.items() if isinstance(one, int | float)]
    if isinstance(value, tuple | list):
        # Schedulers keep a function for each group of parameters.
        texts = dict.fromkeys(map(text_of, value)) if all(map(callable, value)) else map(text_of, value)
        return "/".join(filter(None, texts)) if len(value) <= _MOST else ""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, torch.Generator):
        return f"seed {value.initial_seed()}"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, int | str):
        return str(value)
    return _text_of_function(value) if callable(value) else ""


def _text_of_function(function: Callable[..., Any]) -> str:
    """Return the name of ``function`` and the numbers that it closes over. Two scripts may define it at other places."""
    name = str(getattr(function, "__name__", ""))
    # Numbers that it changes are no settings.
    if not inspect.isfunction(function) or any(each.opname == "STORE_DEREF" for each in dis.get_instructions(function)):
        return name
    numbers = [one for one in _closed_over(function) if type(one) in (int, float)]
    return " ".join([name, *map(text_of, numbers)])


def _closed_over(function: Callable[..., Any]) -> Iterator[object]:
    for cell in function.__closure__ or ():
        # A cell is empty until its variable has a value.
        with suppress(ValueError):
            yield cell.cell_contents
