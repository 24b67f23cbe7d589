"""A term of the forecast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from analysis.memory.measured_constants import Constant

Held = Literal["allocated", "pool", "cached", "outside"]
"""How memory is held: by live tensors at the peak, by graphs in addition, by the allocator's cache, or outside the allocator."""


class Term(NamedTuple):
    """Bytes of a rank. ``source`` is where the formula comes from: a file of the program, or a committed report."""

    name: str
    bytes: int
    template: str
    """The formula, with a pair of braces for each of ``values``."""
    values: tuple[Any, ...]
    source: str
    held: Held = "allocated"

    @property
    def formula(self) -> str:
        return self.template.format(*self.values)


def total(terms: Iterable[Term]) -> int:
    return sum([term.bytes for term in terms])


def mib(value: float) -> float:
    return value / 2**20


def times_constant(
    constant: Constant, count: int = 1, held: Held = "outside", more: str = "", values: tuple[Any, ...] = ()
) -> Term:
    """Return ``count`` times a measured constant. ``more`` extends the formula by ``values``."""
    formula = "{} x {:.0f} MiB" + more
    values = (count, mib(constant.value), *values)
    return Term(constant.name, round(constant.value) * count, formula, values, constant.measured, held)
