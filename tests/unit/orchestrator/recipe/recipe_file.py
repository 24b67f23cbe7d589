"""A recipe in a file, and what is read from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import InputError, Problem
from orchestrator.recipe.recipe import Recipe, load

HEAD_LINES = "name: x\nmodel: {preset: tiny_dense}\n"
"""Two lines that form a complete recipe. The lines that a test adds begin at line 3."""


def read(folder: Path, text: str | bytes, *overrides: str) -> Recipe:
    path = folder / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(path, overrides)


def problems(folder: Path, text: str | bytes, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(InputError) as caught:
        read(folder, text, *overrides)
    return caught.value.problems


def said(folder: Path, found: tuple[Problem, ...]) -> list[tuple[str, str, str]]:
    return [(p.place.replace(f"{folder}/", ""), p.message, p.fix) for p in found]
