"""Find in a log the error that ended a program. Pure.

A log may hold the errors of several ranks, since torchrun gives its ranks one log. Most of them are consequences: ranks that
lost another rank, or the end of a capture that an error had broken. A program also prints errors that it handles: one after which
it trains on did not end it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from launch.contract.metric_names import texts_in_line
from launch.contract.records.events import Phase
from launch.failures.classes import FailureClass, classify, is_consequence

_MOST_TEXT = 300
_TRAINED_ON = 3
"""The fewest lines with a step's loss that show that the program went on after an error. Another rank that shares the log may print
the loss of the step that failed, and one more."""
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Python 3.13 and loggers colour errors, if they are told to."""
_RANK = re.compile(r"\[rank(\d+)\]:\s?")
"""PyTorch's prefix for each line of a rank's traceback, and for lines of its C++ logger."""
_TEED = re.compile(r"\[[A-Za-z_]+\d+\]:(?!\[[A-Z]\d{4} )")
"""The prefix of ``torchrun --tee`` for each line of a process: its role and its number on the node, which is no rank."""
_LOGGED = re.compile(r"\[?[A-Z]\d{4} ")
"""A line of a C++ logger, or of torchrun's."""
_ENDED_BY_TORCHRUN = re.compile(r"torch/distributed/elastic/\S*\] .*(failed|closing signal)")
"""After such a line of its own, torchrun prints only that its ranks have failed."""
_SIGNAL = re.compile(r"Signal \d+ \((SIG(?!ABRT|TERM)\w+)\) received by PID")
"""Torchrun's words about its first failed rank, if a signal ended it."""

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_IGNORED = "Exception ignored "
_FRAME = re.compile(r' +File ".*", line \d+, in (.+)')
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: ?(.*)|$)")
_NAMED = re.compile(r"((?!nccl)[\w.]*(?:Error|Exception|Fault))(?:: ?(.*)|$)|(\S+): ((?:error: |can't open file ).*)")
"""An error without its traceback, as programs print it, and the interpreter's and argparse's own."""
_OF_CPP = re.compile(r".*(?:watchdog thread terminated with exception: |what\(\): +)(.*)")


@dataclass
class _Error:
    """An error of a log. ``frame`` is the function that raised it; ``cause`` is the error that Python prints before it."""

    position: int
    rank: int | None
    kind: str
    lines: list[str]
    frame: str = ""
    cause: _Error | None = None
    losses: int = 0
    """How many lines with a loss the stream had before it."""

    @property
    def root(self) -> _Error:
        """This error, or its cause if the end of a capture raised it, which another error had broken."""
        is_end = self.frame == "capture_end" or self.words.is_consequence
        return self.cause.root if self.cause is not None and is_end else self

    @property
    def words(self) -> LastWords:
        return LastWords(self.kind, "\n".join(self.lines).strip(), self.rank)


@dataclass(frozen=True)
class LastWords:
    """The error that a program printed last, or its last line, which has no ``kind``."""

    kind: str = ""
    message: str = ""
    rank: int | None = None
    """The rank that printed it, if PyTorch wrote the rank before it."""

    @property
    def text(self) -> str:
        line = " ".join(self.message.split())
        return (f"{self.kind}: {line}" if self.kind and line else self.kind or line)[:_MOST_TEXT]

    def row(self, phase: Phase) -> FailureClass | None:
        return classify(self.kind.rpartition(".")[2], self.message, phase)

    @property
    def is_consequence(self) -> bool:
        """Whether the error is about a rank that is gone."""
        return is_consequence(self.kind.rpartition(".")[2], self.message, "measure")


@dataclass
class _Stream:
    """The lines of one rank, or those without a rank."""

    rank: int | None
    errors: list[_Error] = field(default_factory=list)
    in_traceback: bool = False
    frame: str = ""
    source: str = ""
    """The line of code that raised the error. It stands for the message of an error without one, as of a bare assertion."""
    is_chained: bool = False
    is_ignored: bool = False
    is_open: bool = False
    """Whether the next lines may continue the last error's message."""
    losses: int = 0
    """How many lines with the loss of a step were read."""

    @property
    def last_errors(self) -> list[_Error]:
        """The errors after which the program did not train on."""
        return [error for error in self.errors if self.losses - error.losses < _TRAINED_ON]

    def read(self, position: int, line: str) -> None:
        """Read the next line."""
        said = _OF_CPP.match(line)
        if said is not None:
            self._add(position, "", said[1])
            self.is_open = False
        elif _LOGGED.match(line):
            pass
        elif line.startswith(_TRACEBACK):
            self.in_traceback, self.frame, self.source, self.is_open = True, "", "", False
        elif line.startswith(_CHAINED):
            self.is_chained, self.is_open = True, False
        elif line.startswith(_IGNORED):
            self.is_ignored, self.is_open = True, False
        elif self.in_traceback and (not line.strip() or line[0] == " "):
            self._read_frame(line)
        else:
            self._read_error(position, line)

    def _read_frame(self, line: str) -> None:
        if found := _FRAME.match(line):
            self.frame = found[1]
        elif line.strip(" ^~"):
            self.source = line.strip()

    def _read_error(self, position: int, line: str) -> None:
        found = _EXCEPTION.match(line) if self.in_traceback else _NAMED.match(line)
        if self.is_open and self.rank is not None:
            self.errors[-1].lines.append(line)
        elif found is not None:
            kind, message, *program = found.groups()
            self._add(position, *(program if kind is None else (kind, message or self.source)))
        elif texts_in_line(line):
            self.losses += 1
        self.in_traceback = False

    def _add(self, position: int, kind: str, message: str) -> None:
        if not self.is_ignored:
            cause = self.errors[-1] if self.is_chained and self.errors else None
            self.errors.append(_Error(position, self.rank, kind, [message], self.frame, cause, self.losses))
        self.is_open = not self.is_ignored
        self.is_chained = self.is_ignored = False
        self.frame = self.source = ""


def last_words(log: str) -> LastWords:
    """Return the error that ended the program of ``log``, else its last line.

    A rank's last error counts, unless it is a consequence of an earlier one. Among ranks, the first such error in the log
    counts. Lines without a rank count where no rank names a cause.
    """
    lines = _COLOUR.sub("", log).splitlines()
    said = [line for line in takewhile(lambda line: not _ENDED_BY_TORCHRUN.search(line), lines) if line.strip()]
    streams = _streams(said)
    of_ranks = _first_causes(stream for stream in streams if stream.rank is not None)
    signal = _SIGNAL.search(log)
    if signal is not None and not of_ranks:
        return LastWords(signal[1], signal[0])
    unnamed = [stream for stream in streams if stream.rank is None]
    consequences = (stream.last_errors[-1] for stream in (*unnamed, *streams) if stream.last_errors)
    error = next(iter([*of_ranks, *_first_causes(unnamed), *consequences]), None)
    return error.words if error else LastWords(message=said[-1].strip() if said else "")


def _streams(lines: list[str]) -> list[_Stream]:
    streams: dict[int | str | None, _Stream] = {}
    for position, line in enumerate(lines):
        of_rank = _RANK.match(line)
        teed = None if of_rank else _TEED.match(line)
        rest = line[teed.end() :].removeprefix(" ") if teed else line
        prefix = of_rank or _RANK.match(rest)
        rank, rest = (int(prefix[1]), rest[prefix.end() :]) if prefix else (None, rest)
        key = rank if rank is not None or teed is None else teed[0]
        streams.setdefault(key, _Stream(rank)).read(position, rest)
    return list(streams.values())


def _first_causes(streams: Iterable[_Stream]) -> list[_Error]:
    causes = (cause for stream in streams for cause in _causes(stream))
    return sorted(causes, key=lambda cause: cause.position)


def _causes(stream: _Stream) -> Iterator[_Error]:
    """Yield the stream's last error that is no consequence, if there is one."""
    causes = (error.root for error in reversed(stream.last_errors))
    cause = next((error for error in causes if not error.words.is_consequence), None)
    if cause is not None:
        yield cause
