"""Read what the ranks of an attempt recorded: phases with memory and clocks, choices, captures, proof, probes, notes.

A damaged record becomes a sentence in ``problems`` and is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from launch.common.atomic_files import RecordError, read_json_lines
from launch.contract.paths import AttemptPaths
from launch.contract.records.clocks import Clocks, clocks_from_json
from launch.contract.records.events import PHASES, Phase
from launch.contract.records.memory import Memory

Found = TypeVar("Found")
Events = Mapping[int, list[dict[str, Any]]]
"""Events by rank."""

DAMAGE = (RecordError, OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""Errors of a damaged record: not JSON, unreadable, or JSON of another shape."""
MOST_BYTES = 1 << 60
"""An exbibyte. No host or GPU has more."""


@dataclass(frozen=True)
class PhaseMemory:
    """One rank's memory at the end of one phase."""

    rank: int
    phase: Phase
    memory: Memory


def describe_error(error: Exception) -> str:
    """Describe an error without paths of this machine."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def is_of(event: Mapping[str, Any], kind: str) -> bool:
    return event.get("kind") == kind


def read_events(paths: AttemptPaths, ranks: int, problems: list[str]) -> Events:
    return {rank: _read_rank(paths, rank, problems) for rank in range(ranks)}


def _read_rank(paths: AttemptPaths, rank: int, problems: list[str]) -> list[dict[str, Any]]:
    try:
        return [dict(event) for event in read_json_lines(paths.events(rank))]
    except DAMAGE as error:
        problems.append(f"events of rank {rank} cannot be read: {describe_error(error)}")
        return []


def memory_of(events: Events, problems: list[str]) -> Iterable[PhaseMemory]:
    for rank, lines in events.items():
        try:
            yield from [
                PhaseMemory(rank, _phase(e["phase"]), _checked(Memory(**e["memory"])))
                for e in lines
                if is_of(e, "phase")
            ]
        except DAMAGE as error:
            problems.append(f"memory of rank {rank} cannot be read: {describe_error(error)}")


def _phase(name: Any) -> Phase:
    if name not in PHASES:
        raise ValueError(f"{name!r} is not a phase")
    return cast(Phase, name)


def _checked(memory: Memory) -> Memory:
    for name, value in vars(memory).items():
        least = -MOST_BYTES if name == "device_outside" else 0
        if value is not None and not (type(value) is int and least <= value <= MOST_BYTES):
            raise TypeError(f"{name} is {value!r}, not a number of bytes")
    return memory


def measured_clocks(events: Events, problems: list[str]) -> dict[int, Clocks]:
    """Return the clocks of phase "measure", for each rank whose driver reports any."""
    found = {}
    for rank, lines in events.items():
        try:
            for event in lines:
                if is_of(event, "phase") and event["phase"] == "measure" and event.get("clocks"):
                    found[rank] = clocks_from_json(event["clocks"])
        except DAMAGE as error:
            problems.append(f"clocks of rank {rank} cannot be read: {describe_error(error)}")
    return found


def choices_of(events: Events) -> dict[str, Any]:
    """Return the engine's choices for what the spec leaves open. If ranks differ, the value lists all choices."""
    found: dict[str, set[str]] = {}
    for lines in events.values():
        for event in lines:
            if is_of(event, "choices") and isinstance(event.get("choices"), dict):
                for name, choice in event["choices"].items():
                    found.setdefault(str(name), set()).add(str(choice))
    return {"choices": {name: ", ".join(sorted(found[name])) for name in sorted(found)}} if found else {}


def notes_of(events: Events) -> tuple[str, ...]:
    """Return the notes of all ranks, rank by rank."""
    return tuple(str(event.get("message", "")) for rank in events for event in events[rank] if is_of(event, "note"))


def last_of_kind(
    events: Events, kind: str, read: Callable[[Mapping[str, Any]], Found], problems: list[str]
) -> dict[int, Found]:
    """Return each rank's last event of ``kind``, read by ``read``."""
    found = {}
    for rank, lines in events.items():
        try:
            for event in lines:
                if is_of(event, kind):
                    found[rank] = read(event)
        except DAMAGE as error:
            problems.append(f"{kind} of rank {rank} cannot be read: {describe_error(error)}")
    return found
