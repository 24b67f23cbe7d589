"""The names that programs give to a step, its loss and its gradient norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Column = Literal["step", "loss", "grad_norm"]
NAMES: Mapping[Column, tuple[str, ...]] = {
    "step": ("step", "iteration", "globalstep", "trainerglobalstep"),
    "loss": ("loss", "lmloss", "reducedtrainloss", "lossmetricsglobalavgloss"),
    "grad_norm": ("gradnorm", "gradientnorm", "gradientsnorm", "globalgradnorm", "totalnorm", "norm", "gnorm"),
}
"""The usual names of each column, as :func:`letters` spells them."""
_COLUMNS = {name: column for column, names in NAMES.items() for name in names}


def letters(name: str) -> str:
    """Return ``name`` in small letters and digits alone, without a leading "train"."""
    return "".join(filter(str.isalnum, name.lower())).removeprefix("train")


def column_of(name: str) -> Column | None:
    """Return the column that ``name`` usually means, or None."""
    return _COLUMNS.get(letters(name))
