"""The recipe that compares two command lines, made from their common words and the words that differ. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from launch.contract.plan import Margins
from launch.contract.spec_ids import digest
from launch.frameworks.command_line import script_of
from orchestrator.errors import input_error
from orchestrator.recipe.yaml_reader import dump


@dataclass(frozen=True)
class WrappedCommands:
    """Two command lines, as in a shell, and the settings of their runs."""

    eager: str
    graphed: str
    workdir: str
    code: str
    """The digest of the program's files. A changed program makes another sweep."""
    steps: int
    repeats: int
    ranks: int
    margins: Margins

    @property
    def scripts(self) -> tuple[str, str]:
        """The script that each command runs; "" if the command does not show it."""
        return script_of(_words("--eager", self.eager)), script_of(_words("--graphed", self.graphed))

    @property
    def recipe(self) -> str:
        """Return the recipe as YAML.

        Raises:
            InputError: the commands are equal, begin differently or cannot be read.
        """
        eager, graphed = _alike(_words("--eager", self.eager), _words("--graphed", self.graphed))
        common = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(eager, graphed, strict=False))]
        if eager == graphed:
            raise input_error("--graphed", "it is the eager command", "add what turns the graphs on")
        if not common:
            message = f"it begins with {graphed[0]!r}, and the eager one with {eager[0]!r}"
            raise input_error("--graphed", message, "let both begin with one program, such as bash -c '...'")
        content: dict[str, Any] = {
            "name": f"wrap_{digest([eager, graphed, self.workdir, self.code])}",
            "engine": "command",
            "command": {
                "run": shlex.join(common),
                "workdir": self.workdir,
                "graphs": {"none": eager[len(common) :], "graphed": graphed[len(common) :]},
            },
            "training": {"steps": self.steps},
            "repeats": self.repeats,
            "resources": {"gpus_per_node": self.ranks},
            "wandb": {"mode": "disabled"},
        }
        usual = asdict(Margins())
        if chosen := {name: value for name, value in asdict(self.margins).items() if value != usual[name]}:
            content["equivalence"] = {
                name: [*value] if isinstance(value, tuple) else value for name, value in chosen.items()
            }
        return dump(content)


def _words(option: str, command: str) -> Sequence[str]:
    """Return the words of a command."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise input_error(option, f"{command!r} cannot be read: {error}", "close its quotes") from None
    if not words:
        raise input_error(option, "the command is empty", "write it as in a shell, in quotes")
    return words


def _alike(*commands: Sequence[str]) -> list[Sequence[str]]:
    """Return the commands. If one begins with variables, put ``env`` before both, because no shell reads them."""
    before = ["env"] if any("=" in words[0] for words in commands) else []
    return [[*before, *words] for words in commands]
