"""Every error that ends a command, and the exit code it ends with.

OrchestratorError        2  the system failed
├── InputError           1  what the user wrote is wrong; every problem at once
└── SystemFault          2  the host, the disk or the scheduler did not do what was asked of it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing wrong with what the user wrote: where, what, and the way out."""

    place: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text}\n    {self.remedy}" if self.remedy else text


class OrchestratorError(Exception):
    """Base of the errors that a command reports without a traceback."""

    exit_code = 2


class InputError(OrchestratorError):
    """The user's input is wrong."""

    exit_code = 1

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class SystemFault(OrchestratorError):
    """The system failed; the message says at what, and what to do."""


def input_error(place: str, message: str, remedy: str = "") -> InputError:
    """An :class:`InputError` of one problem."""
    return InputError([Problem(place, message, remedy)])


def suggestion(value: object, known: Iterable[str], otherwise: str | None = None, cutoff: float = 0.6) -> str:
    """Return "did you mean ...?" for the closest of ``known``, else ``otherwise``, else the list of ``known``."""
    names = sorted(known)
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=cutoff)
    if close:
        return f"did you mean {close[0]!r}?"
    if otherwise is not None:
        return otherwise
    return f"known: {', '.join(names)}" if names else ""
