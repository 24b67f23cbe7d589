"""Print what ``--json`` asks for: one object with its ``format``, which docs/schemas.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.common.atomic_files import dumps

FORMAT = 1
"""The version of the output. It increases if a field is renamed, removed or changes its meaning, not if one is added."""


def print_json(content: Mapping[str, Any]) -> None:
    print(dumps({"format": FORMAT, **content}, indent=1))
