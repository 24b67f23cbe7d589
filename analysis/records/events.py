"""Read what the ranks of an attempt recorded: phases with memory and clocks, choices, captures, proof, probes, notes.

A damaged record becomes a sentence in ``problems`` and is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from launch.common.atomic_files import RecordError, amount
from launch.common.typed_json import from_json
from launch.contract.paths import AttemptPaths
from launch.contract.records.clocks import Clocks
from launch.contract.records.events import PHASES, Phase
from launch.contract.records.events import read_events as read_rank
from launch.contract.records.identity import without_identity
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
        events = [dict(event) for event in read_rank(paths, rank)]
        without_identity(paths, events[0] if events else {})
        return _that_count(events)
    except DAMAGE as error:
        problems.append(f"events of rank {rank} cannot be read: {describe_error(error)}")
        return []


def _that_count(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what was recorded of steps that were counted otherwise, before the program announced its first step."""
    first = max((place for place, event in enumerate(events) if is_of(event, "announced")), default=0)
    return [event for event in events[:first] if event.get("kind") not in ("gradients", "parameters")] + events[first:]


def _read_by_rank(
    events: Events, name: str, read: Callable[[Mapping[str, Any]], Found | None], problems: list[str]
) -> dict[int, list[Found]]:
    """Return what ``read`` finds in the events of each rank. ``read`` returns None for events of other kinds."""
    found: dict[int, list[Found]] = {}
    for rank, lines in events.items():
        try:
            found[rank] = [value for value in map(read, lines) if value is not None]
        except DAMAGE as error:
            problems.append(f"{name} of rank {rank} cannot be read: {describe_error(error)}")
    return found


def _last_by_rank(found: Mapping[int, Sequence[Found]]) -> dict[int, Found]:
    return {rank: values[-1] for rank, values in found.items() if values}


def memory_of(events: Events, problems: list[str]) -> tuple[PhaseMemory, ...]:
    def read(event: Mapping[str, Any]) -> tuple[Phase, Memory] | None:
        return (_phase(event["phase"]), _checked(Memory(**event["memory"]))) if is_of(event, "phase") else None

    found = _read_by_rank(events, "memory", read, problems)
    return tuple(PhaseMemory(rank, *each) for rank, values in found.items() for each in values)


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

    def read(event: Mapping[str, Any]) -> Clocks | None:
        return from_json(Clocks, event["clocks"]) if _is_measured(event) and event.get("clocks") else None

    return _last_by_rank(_read_by_rank(events, "clocks", read, problems))


def measured_seconds(events: Events, problems: list[str]) -> float:
    """Return how long rank 0 spent in phase "measure", or 0 if it did not finish the phase."""

    def read(event: Mapping[str, Any]) -> float | None:
        return amount(event["seconds"], "seconds") if _is_measured(event) else None

    return sum(_read_by_rank(events, "durations", read, problems).get(0, ()))


def _is_measured(event: Mapping[str, Any]) -> bool:
    return is_of(event, "phase") and event["phase"] == "measure"


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


def parameter_digests(events: Events) -> dict[int, tuple[str, str]]:
    """Return each rank's first and last digest of its parameters, if it recorded two."""
    digests = {
        rank: [str(event.get("digest")) for event in lines if is_of(event, "parameters")]
        for rank, lines in events.items()
    }
    return {rank: (found[0], found[-1]) for rank, found in digests.items() if len(found) > 1}


def last_of_kind(
    events: Events, kind: str, read: Callable[[Mapping[str, Any]], Found], problems: list[str]
) -> dict[int, Found]:
    """Return each rank's last event of ``kind``, read by ``read``."""
    return _last_by_rank(all_of_kind(events, kind, read, problems))


def all_of_kind(
    events: Events, kind: str, read: Callable[[Mapping[str, Any]], Found], problems: list[str]
) -> dict[int, list[Found]]:
    """Return each rank's events of ``kind``, read by ``read``."""
    return _read_by_rank(events, kind, lambda event: read(event) if is_of(event, kind) else None, problems)
