"""What ``--json`` prints: one object with its ``format``, described in docs/schemas.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.common.atomic_files import dumps

FORMAT = 1
"""Goes up where a field is renamed, removed, or means something else. Fields may be added without."""


def print_json(content: Mapping[str, Any]) -> None:
    print(dumps({"format": FORMAT, **content}, indent=1))
