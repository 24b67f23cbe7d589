"""A Slurm job, parsed from what squeue and sacct print. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from launch.slurm.job_states import stage_of

GONE = "GONE"
"""The state of a job whose end is unknown: neither squeue nor sacct lists it."""
UNHEARD = "UNKNOWN"
"""The state of a job that neither squeue nor sacct has listed yet."""


@dataclass(frozen=True)
class Job:
    """A job, or an element of an array, as Slurm last listed it."""

    job_id: str
    """ "123", or "123_4" of an array."""
    name: str
    state: str
    """Slurm's name of the state, or GONE or UNKNOWN."""
    reason: str = ""
    """Why the job waits."""
    expected_start: float | None = None
    """The expected start of a waiting job, in seconds since the epoch. None if Slurm has no estimate."""
    nodes: str = ""
    """The nodes as Slurm writes them: "node[1-2,7]". Empty before the job has nodes."""

    @property
    def ended(self) -> bool:
        return stage_of(self.state) == "ended"


SQUEUE_FORMAT = ("%V", "%i", "%T", "%r", "%S", "%N", "%j")
SACCT_FORMAT = "Submit,JobID,State,NodeList,JobName"


def parse_squeue(text: str, separator: str) -> Iterator[tuple[float, Job]]:
    """Yield (time of submission, job) from lines of SQUEUE_FORMAT."""
    for submitted, job_id, state, reason, start, nodes, name in _rows(text, separator, 7):
        waits = stage_of(state) == "waits"
        for each in _elements(job_id):
            why = reason if waits and reason != "None" else ""
            job = Job(each, name, state, why, _time(start) if waits else None, _nodes(nodes))
            yield _time(submitted) or 0.0, job


def parse_sacct(text: str, separator: str) -> Iterator[tuple[float, Job]]:
    """Yield (time of submission, job) from lines of SACCT_FORMAT."""
    for submitted, job_id, state, nodes, name in _rows(text, separator, 5):
        word = state.partition(" ")[0]  # "CANCELLED by 1000"
        for each in _elements(job_id):
            yield _time(submitted) or 0.0, Job(each, name, word, nodes=_nodes(nodes))


def _rows(text: str, separator: str, count: int) -> Iterator[list[str]]:
    """Yield rows of ``count`` values. Only the last one, a job's name, may contain a line break."""
    row: list[str] = []
    for chunk in text.split(separator):
        row.append(chunk)
        if len(row) == count:
            row[-1], _, first = chunk.rpartition("\n")
            yield row
            row = [first]


def _elements(job_id: str) -> Iterator[str]:
    """Yield the ids that ``job_id`` stands for. "12_[0-2,7%4]" stands for an array's elements that have not started."""
    base, bracket, places = job_id.partition("_[")
    if not bracket:
        yield job_id
        return
    for part in re.sub(r"(%\d+)?\]$", "", places).split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if span is not None:
            first, last, step = int(span[1]), int(span[2] or span[1]), int(span[3] or 1)
            yield from (f"{base}_{place}" for place in range(first, last + 1, step))


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def _nodes(text: str) -> str:
    return "" if text in ("None assigned", "(null)", "n/a") else text
