"""The section ``command`` of a recipe: the words of its flags, and one cell for each of its named graphs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.contract.spec import Command
from orchestrator.recipe.recipe import Recipe
from orchestrator.recipe.source_fields import Tree

_FLAGS, _GRAPHS = "flags.", "graphs."


def command_of(section: Mapping[str, Any], folder: Path) -> Command:
    """Return the command that ``section`` describes, without graphs. Its ``workdir`` is relative to ``folder``."""
    fields = {key: value for key, value in section.items() if not key.startswith((_FLAGS, _GRAPHS))}
    if fields:
        fields["workdir"] = str(folder / fields.get("workdir", ""))
    flags = (_flag(key.removeprefix(_FLAGS), value) for key, value in section.items() if key.startswith(_FLAGS))
    eager = section.get(f"{_GRAPHS}none", ())
    return Command(**fields, flags=tuple(word for words in flags for word in words), eager=tuple(map(str, eager)))


def graphs_axis(recipe: Recipe) -> list[tuple[Tree, ...]]:
    """Return the axis over the recipe's named graphs without eager, in a list; an empty list if there are none."""
    named = {
        key.removeprefix(_GRAPHS): tuple(map(str, words))
        for key, words in recipe.base.get("command", {}).items()
        if key.startswith(_GRAPHS) and key != f"{_GRAPHS}none"
    }
    cells = [{"impl": "command", "name": name, "arguments": words} for name, words in named.items()]
    return [tuple({"cuda_graph": cell} for cell in cells)] if cells else []


def _flag(name: str, value: Any) -> Iterator[str]:
    """Yield the words of one flag: none for null and false, the bare flag for true."""
    if value is None or value is False:
        return
    yield name if name.startswith("-") else f"--{name}"
    yield from () if value is True else map(str, value if isinstance(value, list) else [value])
