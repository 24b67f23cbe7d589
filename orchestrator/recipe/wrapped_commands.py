"""The recipe that compares two command lines, made from their common words and the words that differ. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from launch.common.flag_difference import FlagDifference, flag_differences
from launch.contract.plan import Margins
from launch.contract.spec import RunSpec
from launch.contract.spec_ids import digest
from launch.frameworks import FRAMEWORKS
from launch.frameworks.command_line import script_of
from orchestrator.errors import InputError, Problem, input_error
from orchestrator.recipe.fields import check_words
from orchestrator.recipe.yaml_reader import dump

_OF_GRAPHS = re.compile(r"graph|compile|eager|rng.tracker|check.for.nan", re.IGNORECASE)
"""Names that trainers give to graph settings, and to what their graphs need."""
_GRAPH_MODES = re.compile(r"reduce.overhead|max.autotune|(cuda.?)?graphs?|eager", re.IGNORECASE)
"""Values that a flag of any name may have for graphs, or for none: ``--mode reduce-overhead``."""


@dataclass(frozen=True)
class WrappedCommands:
    """Two command lines, as in a shell, and the settings of their runs."""

    eager: str
    graphed: str
    workdir: str
    code: str
    """The digest of the program's files. A changed program makes another sweep, and so do other steps or ranks."""
    steps: int
    repeats: int
    ranks: int
    margins: Margins

    @property
    def scripts(self) -> tuple[str, str]:
        """The script that each command runs; "" if the command does not show it."""
        return script_of(_words("--eager", self.eager)), script_of(_words("--graphed", self.graphed))

    @property
    def differences(self) -> tuple[FlagDifference, ...]:
        """The flags and variables in which the commands differ."""
        return flag_differences(*self._words)

    @property
    def _words(self) -> tuple[Sequence[str], Sequence[str]]:
        """The words of both commands. If one begins with variables, ``env`` is put before both, because no shell reads them."""
        commands = _words("--eager", self.eager), _words("--graphed", self.graphed)
        before = ["env"] if any("=" in words[0] for words in commands) else []
        return [*before, *commands[0]], [*before, *commands[1]]

    def _find_other_differences(self) -> Iterator[Problem]:
        """Yield the differences that are not graph settings, and that nobody allowed.

        A flag that only one command has may be the graph switch of any program, but not of a known trainer. It is not the
        switch if another flag has a name of graphs, or if there are several such flags.
        """
        trainer = _trainer_of([*self._words[0], *self._words[1]])
        allowed = {"", *(name.lstrip("-") for name in self.margins.allow_differences)}
        named = [found for found in self.differences if _is_of_graphs(found)]
        others = [one for one in self.differences if one not in named and one.name.lstrip("-") not in allowed]
        lone = [one for one in others if None in (one.eager, one.graphed)]
        switch = lone if len(lone) == 1 and not (named or trainer) else []
        for one in others:
            if one not in switch:
                why = f"it is not a graph setting of {trainer}" if trainer else "the programs may train differently"
                fix = f"make both commands equal in it, or allow it: --allow-difference {one.name.lstrip('-')}"
                yield Problem("--graphed", f"{one.text.replace('`', '')}; {why}", fix)

    @property
    def recipe(self) -> str:
        """Return the recipe as YAML.

        Raises:
            InputError: the commands are equal, begin differently, differ in more than graphs or cannot be read.
        """
        eager, graphed = self._words
        common = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(eager, graphed, strict=False))]
        if eager == graphed:
            raise input_error("--graphed", "it is the eager command", "add what turns the graphs on")
        if not self.differences:
            raise input_error("--graphed", "it has the eager command's words", "add what turns the graphs on")
        if not common:
            message = f"it begins with {graphed[0]!r}, but --eager with {eager[0]!r}"
            raise input_error("--graphed", message, "let both begin with one program, such as bash -c '...'")
        if problems := [*self._find_other_differences()]:
            raise InputError(problems)
        content: dict[str, Any] = {
            "name": f"wrap_{digest([eager, graphed, self.workdir, self.code, self.steps, self.ranks])}",
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


def _is_of_graphs(found: FlagDifference) -> bool:
    return bool(_OF_GRAPHS.search(found.name)) or any(
        map(_GRAPH_MODES.fullmatch, (found.eager or "", found.graphed or ""))
    )


def _words(option: str, command: str) -> Sequence[str]:
    """Return the words of a command."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise input_error(option, f"{command!r} cannot be read: {error}", "close its quotes") from None
    if not words:
        raise input_error(option, "the command is empty", "write it as in a shell, in quotes")
    if flaw := check_words(words):
        raise input_error(option, *flaw)
    return words


def _trainer_of(words: Iterable[str]) -> str:
    """Return the framework whose flag for the number of steps is among ``words``; "" if none is."""
    names = {word.partition("=")[0].lstrip("+") for word in words}
    for framework, known in FRAMEWORKS.items():
        flags = known.own_flags(RunSpec("command")).items()
        if any("{steps}" in f"{name} {values}" and name.partition("=")[0] in names for name, values in flags):
            return framework
    return ""
