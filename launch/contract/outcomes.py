"""How an attempt ended: outcome.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args

from launch.common.atomic_files import RecordError, read_json
from launch.contract.paths import AttemptPaths
from launch.contract.records.events import PHASES, Phase

OutcomeName = Literal[
    "COMPLETED", "CUDA_OOM", "HOST_OOM", "CAPTURE_FAILED", "NUMERIC", "HANG", "TEARDOWN_HANG", "CONFIG", "ENVIRONMENT",
    "NODE_FAIL", "TIMEOUT", "PREEMPTED", "CANCELLED", "FAILED",
]  # fmt: skip
OUTCOMES: tuple[OutcomeName, ...] = get_args(OutcomeName)
RESULTS_INTACT: tuple[OutcomeName, ...] = ("COMPLETED", "TEARDOWN_HANG")
"""Outcomes after which every step of the run is on disk."""


@dataclass(frozen=True)
class Expectation:
    """What a recipe expects of a cell. ``phase`` None is any phase."""

    outcome: OutcomeName = "COMPLETED"
    phase: Phase | None = None


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. ``failure_class`` and ``remedy`` are empty where it completed."""

    outcome: OutcomeName
    phase: Phase
    allocation: str
    started: float
    ended: float
    rank: int | None = None
    failure_class: str = ""
    message: str = ""
    remedy: str = ""
    exit_code: int | None = None
    node: str = ""
    """Where the rank that failed first ran, as Slurm names it; empty where nobody knows, or there is no Slurm."""
    infrastructure: bool = False
    """Whether nodes, network or scheduler caused it: such an ending says nothing of the run."""

    @property
    def results_intact(self) -> bool:
        return self.outcome in RESULTS_INTACT

    def matches(self, expected: Expectation) -> bool:
        return self.outcome == expected.outcome and expected.phase in (None, self.phase)


def outcome_from_json(content: Mapping[str, Any]) -> Outcome:
    """Raises TypeError where a field is missing, unknown or of another kind."""
    outcome = Outcome(**content)
    texts = ("allocation", "failure_class", "message", "remedy", "node")
    sound = {
        "outcome": outcome.outcome in OUTCOMES,
        "phase": outcome.phase in PHASES,
        "infrastructure": type(outcome.infrastructure) is bool,
        **{name: type(getattr(outcome, name)) is str for name in texts},
        **{name: _is_time(getattr(outcome, name)) for name in ("started", "ended")},
        **{name: type(getattr(outcome, name)) in (int, NoneType) for name in ("rank", "exit_code")},
    }
    for name, right in sound.items():
        if not right:
            raise TypeError(f"{name} of an outcome is {getattr(outcome, name)!r}")
    return outcome


def _is_time(value: object) -> bool:
    """Whether it is in seconds since the epoch, of a year that has four digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 253_402_300_800


DAMAGED_OUTCOME_REMEDY = "move its folder away; resume makes the run again"
"""For an attempt whose outcome cannot be read."""


def read_outcome(attempt: AttemptPaths) -> Outcome | None:
    """How the attempt ended, or None where it has not.

    Raises:
        RecordError: it has, and its record is damaged.
    """
    try:
        return outcome_from_json(read_json(attempt.outcome))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise RecordError(f"{attempt.outcome.name}: not an outcome of this version ({error})") from error
