"""The errors of the login node, which end a command. The errors of the job, and their base, are in launch.contract.errors.

OrchestratorError        exit code 2
├── InputError           exit code 1: the user's input is wrong; it lists every problem
└── SystemFault          exit code 2: the host, the disk or Slurm failed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.contract.errors import OrchestratorError
from launch.contract.exit_codes import ExitCode


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the user's input."""

    place: str
    """The file and line, the option, or the field. It may be empty."""
    message: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text}\n    {self.fix}" if self.fix else text


class InputError(OrchestratorError):
    """The user's input is wrong."""

    exit_code = ExitCode.WRONG_INPUT

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class SystemFault(OrchestratorError):
    """The host, the disk or Slurm failed. The message names the failure and its fix."""


def input_error(place: str, message: str, fix: str = "") -> InputError:
    """Return an :class:`InputError` with one problem."""
    return InputError([Problem(place, message, fix)])
