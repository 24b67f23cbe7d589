"""Validate what ``--json`` prints against docs/schemas.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = json.loads((Path(__file__).parents[1] / "docs" / "schemas.json").read_text())


def validated(name: str, text: str) -> dict[str, Any]:
    """Return the object in ``text``, which has the schema ``name``."""
    content: dict[str, Any] = json.loads(text)
    Draft202012Validator({**SCHEMAS, "$ref": f"#/$defs/{name}"}).validate(content)
    return content
