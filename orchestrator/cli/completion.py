"""Complete commands in bash, zsh and fish with argcomplete, which calls this program with the line in $COMP_LINE."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import argcomplete
from argcomplete.completers import FilesCompleter

from orchestrator.recipe.recipe import recipe_names
from orchestrator.sweeps.store import Store


def complete(parser: argparse.ArgumentParser, verbs: Iterable[argparse.ArgumentParser]) -> None:
    """Print the words that may complete the line, and exit. Complete sweeps and recipes by their names."""
    for action in (action for verb in verbs for action in verb._actions):
        if action.dest in ("sweep", "sweeps", "before", "after"):
            action.completer = _sweeps  # type: ignore[attr-defined]  # argcomplete's own attribute
        elif action.dest == "recipe":
            action.completer = _recipes  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _sweeps(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    return Store(getattr(parsed_args, "store", None)).names()


def _recipes(prefix: str, **_: object) -> list[str]:
    files = FilesCompleter(("yaml",))(prefix)
    return [*recipe_names(), *files]
