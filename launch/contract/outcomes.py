"""How an attempt ended (outcome.json), and what each outcome implies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from launch.common.atomic_files import RecordError, amount, members, read_json
from launch.common.typed_json import from_json
from launch.contract.paths import AttemptPaths
from launch.contract.records.events import Phase
from launch.contract.records.identity import identity_of, without_identity

OutcomeName = Literal[
    "COMPLETED", "CUDA_OOM", "HOST_OOM", "CAPTURE_FAILED", "NUMERIC", "HANG", "TEARDOWN_HANG", "CONFIG", "ENVIRONMENT",
    "NODE_FAIL", "TIMEOUT", "PREEMPTED", "CANCELLED", "FAILED",
]  # fmt: skip
Cause = Literal["none", "run", "limit", "setup", "outside"]
"""What caused the outcome. "none": nothing failed. "run": the run's code, libraries or data. "limit": a limit that may be
raised between attempts. "setup": settings or a host that cannot run this. "outside": a person, the scheduler or a node; such an
outcome says nothing about the run."""


@dataclass(frozen=True)
class OutcomeRow:
    """What an outcome implies."""

    cause: Cause
    infrastructure: bool = False
    """Whether the outcome always blames nodes, network or scheduler. Other outcomes blame them if the failure class does."""
    memory: Literal["", "gpu", "host"] = ""
    """The memory that ran out."""

    @property
    def results_intact(self) -> bool:
        """Whether every step of the run is on disk."""
        return self.cause == "none"


OUTCOME_TABLE: Mapping[OutcomeName, OutcomeRow] = {
    "COMPLETED": OutcomeRow("none"),
    "CUDA_OOM": OutcomeRow("run", memory="gpu"),
    "HOST_OOM": OutcomeRow("limit", memory="host"),
    "CAPTURE_FAILED": OutcomeRow("run"),
    "NUMERIC": OutcomeRow("run"),
    "HANG": OutcomeRow("run"),
    "TEARDOWN_HANG": OutcomeRow("none"),
    "CONFIG": OutcomeRow("setup"),
    "ENVIRONMENT": OutcomeRow("setup"),
    "NODE_FAIL": OutcomeRow("outside", infrastructure=True),
    "TIMEOUT": OutcomeRow("limit"),
    "PREEMPTED": OutcomeRow("outside", infrastructure=True),
    "CANCELLED": OutcomeRow("outside"),
    "FAILED": OutcomeRow("run"),
}
OUTCOMES: tuple[OutcomeName, ...] = get_args(OutcomeName)
RESULTS_INTACT = tuple(name for name in OUTCOMES if OUTCOME_TABLE[name].results_intact)

OUT_OF_MEMORY_IN_CHECK = "OOM_STEP_CHECK"
"""The failure class of a run in which only a step check lacked memory. Its supervisor begins it again without checks."""
_ENDED_FROM_OUTSIDE = ("SUPERVISOR", "SIGKILL")
"""Failure classes of FAILED runs that somebody else may have ended."""
_NO_NODE_AT_FAULT = {"PREEMPTED", "DISK_FULL", "JOB_GONE"}
"""Infrastructure outcomes and failure classes that other nodes would not avoid."""


@dataclass(frozen=True)
class Expectation:
    """What a recipe expects of a cell. ``phase`` None is any phase."""

    outcome: OutcomeName = "COMPLETED"
    phase: Phase | None = None

    @property
    def text(self) -> str:
        return f"{self.outcome} in {self.phase}" if self.phase else self.outcome


def _check_time(value: Any, name: str) -> None:
    """Check that ``value`` is in seconds since the epoch, in a year of at most four digits."""
    if amount(value, name) >= 253_402_300_800:
        raise ValueError(f"{name} is {value!r}, which is after the year 9999")


Time = Annotated[float, _check_time]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. ``failure_class`` and ``remedy`` (the fix) are empty if it completed."""

    outcome: OutcomeName
    phase: Phase
    allocation: str
    started: Time
    ended: Time
    rank: int | None = None
    failure_class: str = ""
    message: str = ""
    remedy: str = ""
    exit_code: int | None = None
    """The exit code of ``rank``'s process, or minus its signal. Without a ``rank``, that of the first to fail or of srun."""
    node: str = ""
    """The node of the rank that failed first, as Slurm names it; empty if unknown or without Slurm."""
    infrastructure: bool = False
    """Whether the failure class blames nodes, network or scheduler."""
    repeats_alike: bool = False
    """Whether the failure class blames settings or installed software, so that each repeat of the cell fails alike."""

    @property
    def row(self) -> OutcomeRow:
        return OUTCOME_TABLE[self.outcome]

    @property
    def results_intact(self) -> bool:
        """Whether every step of the run is on disk."""
        return self.row.results_intact

    @property
    def is_infrastructure(self) -> bool:
        """Whether nodes, network or scheduler caused it. A watching command retries only such runs by itself."""
        return self.infrastructure or self.row.infrastructure

    @property
    def blames_node(self) -> bool:
        """Whether the run should be retried on other nodes."""
        return self.is_infrastructure and not {self.outcome, self.failure_class} & _NO_NODE_AT_FAULT

    @property
    def is_informative(self) -> bool:
        """Whether the outcome is evidence about the run. If not, an earlier attempt's result counts."""
        is_about_check = self.failure_class == OUT_OF_MEMORY_IN_CHECK
        return self.row.cause != "outside" and not self.infrastructure and not is_about_check

    @property
    def is_own_failure(self) -> bool:
        """Whether the run's own code, libraries or data failed, so that it may fail again."""
        return self.is_informative and self.row.cause == "run" and self.failure_class not in _ENDED_FROM_OUTSIDE

    @property
    def is_command_failure(self) -> bool:
        """Whether every run whose command differs in numbers alone fails alike. A node may lack a program that others have."""
        return self.failure_class == "OPTIONS" or (self.failure_class == "NO_PROGRAM" and not self.node)

    @property
    def lacked_gpu_memory(self) -> bool:
        return self.is_own_failure and self.row.memory == "gpu"

    @property
    def needs_other_settings(self) -> bool:
        """Whether a new attempt fails alike, too, as long as the recipe is the same. A user's program may change meanwhile."""
        may_change = self.message.startswith("ProgramError:") or self.failure_class in ("OPTIONS", "OPTION_VALUE")
        return self.repeats_alike and self.outcome == "CONFIG" and not may_change

    def confirms(self, other: Outcome) -> bool:
        """Return whether a repeat that ended like this failed in the same way as ``other``, and nobody ended either."""
        kinds = {(one.outcome, one.failure_class, one.phase) for one in (self, other)}
        is_failure = self.is_informative and not self.results_intact and self.failure_class not in _ENDED_FROM_OUTSIDE
        return is_failure and len(kinds) == 1

    def matches(self, expected: Expectation) -> bool:
        return self.outcome == expected.outcome and expected.phase in (None, self.phase)


def outcome_to_json(attempt: AttemptPaths, outcome: Outcome) -> dict[str, Any]:
    """Return the content of the outcome.json of ``attempt``."""
    return identity_of(attempt) | members(outcome)


DAMAGED_OUTCOME_REMEDY = "move its folder away, then resume the sweep to run it again"
"""The fix for an attempt whose outcome cannot be read."""


def read_outcome(attempt: AttemptPaths) -> Outcome | None:
    """Return how the attempt ended, or None if it has not.

    Raises:
        RecordError: the record is damaged, or of another attempt.
    """
    try:
        return from_json(Outcome, without_identity(attempt, read_json(attempt.outcome_text)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RecordError(f"{attempt.outcome.name}: {error}") from error
    except (TypeError, AttributeError) as error:
        raise RecordError(f"{attempt.outcome.name}: not an outcome of this version ({error})") from error
