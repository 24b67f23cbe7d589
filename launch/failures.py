"""From what was seen of an attempt to its outcome: class, phase, first failing rank and remedy. Pure.

What is seen: exceptions that ranks recorded, exit codes of ranks, the phase that each had entered, and whether the
supervisor ended the attempt itself. The first exception in time is the cause; what other ranks say after it (a closed
connection, a cancelled collective) is a consequence and is passed over.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Literal, Optional

from launch.record import OutcomeName, Phase

EndedBy = Literal["itself", "cancel", "deadline", "hang"]


@dataclass(frozen=True)
class RankException:
    """An exception as a rank recorded it. ``time`` is in seconds since the epoch."""

    rank: int
    time: float
    phase: Phase
    type: str
    message: str


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended: an exit code, or minus the signal that ended it."""

    rank: int
    code: int


@dataclass(frozen=True)
class Evidence:
    """All that is known of an attempt that has ended."""

    ended_by: EndedBy
    exit_code: int
    phase: Phase
    """The last phase that rank 0 entered."""
    results_intact: bool
    exceptions: tuple[RankException, ...] = ()
    exits: tuple[RankExit, ...] = ()
    oom_killed: bool = False
    limit_seconds: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    outcome: OutcomeName
    phase: Phase
    rank: Optional[int] = None
    failure_class: str = ""
    message: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class FailureClass:
    """One row of the table: which exception texts it covers, what the outcome is, and the way out."""

    name: str
    pattern: str
    outcome: OutcomeName
    remedy: str


_SECONDARY = re.compile(r"Connection (closed|reset) by peer|DistBackendError|cudaErrorStreamCaptureInvalidated|SIGTERM")

# Sorted by priority: the first row that matches "Type: message" names the class.
FAILURE_CLASSES: tuple[FailureClass, ...] = (
    FailureClass("UNSUPPORTED", r"^UnsupportedError:", "CONFIG", "change the setting named, or use an engine that has it"),
    FailureClass("DATA", r"^DataError:", "CONFIG", "mend the data section of the recipe as the message says"),
    FailureClass("NUMERIC", r"^NumericError:", "NUMERIC", "look at the eager twin at the same step: if it is finite, the capture changed the numbers; if not, lower training.learning_rate"),
    FailureClass("CUDA_OOM", r"OutOfMemoryError|CUDA out of memory", "CUDA_OOM", "capture fewer modules, lower training.micro_batch_size, or raise parallelism.pp or tp"),
    FailureClass("HOST_OOM", r"^MemoryError|DefaultCPUAllocator: can't allocate memory|DefaultCPUAllocator: not enough memory", "HOST_OOM", "give the job more host memory, or run fewer ranks on a node"),
    FailureClass("COMPILER", r"InvalidCxxCompiler|No working C\+\+ compiler", "ENVIRONMENT", "install a C++ compiler (Debian: apt-get install g++)"),
    FailureClass("IMPORT", r"^(ModuleNotFoundError|ImportError):|undefined symbol", "ENVIRONMENT", "install the package named into the environment that runs the job"),
    FailureClass("ENVIRONMENT", r"^EnvironmentFault:", "ENVIRONMENT", "give the host what the message names"),
    FailureClass("DISK_FULL", r"No space left on device|Disk quota exceeded", "ENVIRONMENT", "free space under the sweep's folder, then resume"),
    FailureClass("CAPTURE", r"^CaptureError:", "CAPTURE_FAILED", "see the exception it names; a smaller scope narrows down the culprit"),
    FailureClass("STREAM_CAPTURE", r"cudaErrorStreamCapture|operation not permitted when stream is capturing", "CAPTURE_FAILED", "the captured code synchronises with the host or leaves the capturing stream; docs/failures.md lists causes by code"),
    FailureClass("ILLEGAL_ACCESS", r"illegal memory access|cudaErrorIllegalAddress", "FAILED", "a stale pointer: look for an input freed before replay; with expandable segments set NCCL_GRAPH_REGISTER=0"),
    FailureClass("COMMUNICATION", r"Gloo|NCCL|ProcessGroup|collective", "FAILED", "see the log of the rank that failed first"),
)  # fmt: skip


def diagnose(evidence: Evidence) -> Diagnosis:
    """The outcome of an attempt from what was seen of it."""
    if evidence.results_intact:
        return _after_results(evidence)
    if evidence.ended_by == "cancel":
        return Diagnosis(
            "CANCELLED", evidence.phase, message="cancelled while it ran", remedy="resume it with --failed"
        )
    exception = first_exception(evidence.exceptions)
    if exception is not None:
        return _from_exception(exception)
    if evidence.ended_by == "deadline":
        return Diagnosis("TIMEOUT", evidence.phase, None, "TIMEOUT", f"not finished after {evidence.limit_seconds:g} s",
                         "raise resources.minutes_per_run, or lower training.steps")  # fmt: skip
    if evidence.ended_by == "hang":
        return Diagnosis("HANG", evidence.phase, None, "HANG", f"no sign of life for {evidence.limit_seconds:g} s",
                         "the logs hold every rank's stack at that moment; raise resources.hang_minutes if a step may take so long")  # fmt: skip
    return _from_exit(evidence)


def first_exception(exceptions: tuple[RankException, ...]) -> Optional[RankException]:
    """The earliest exception that is not a consequence of another rank's; the earliest of all where each is."""
    ordered = sorted(exceptions, key=lambda exception: (exception.time, exception.rank))
    primary = [e for e in ordered if not _SECONDARY.search(f"{e.type}: {e.message}")]
    return next(iter(primary or ordered), None)


def classify(type_name: str, message: str) -> Optional[FailureClass]:
    """The row of the table for an exception, None where none covers it."""
    text = f"{type_name}: {message}"
    return next((row for row in FAILURE_CLASSES if re.search(row.pattern, text)), None)


def _after_results(evidence: Evidence) -> Diagnosis:
    if evidence.ended_by == "itself" and evidence.exit_code == 0:
        return Diagnosis("COMPLETED", "teardown")
    if evidence.ended_by == "itself":
        return Diagnosis("FAILED", "teardown", None, "TEARDOWN_CRASH", f"exit code {evidence.exit_code} after the results were on disk",
                         "see the logs; every step's metrics are recorded")  # fmt: skip
    return Diagnosis("TEARDOWN_HANG", "teardown", None, "TEARDOWN_HANG", "results are on disk, but the processes did not end",
                     "delete graphs before process groups; the results count")  # fmt: skip


def _from_exception(exception: RankException) -> Diagnosis:
    row = classify(exception.type, exception.message)
    message = f"{exception.type}: {exception.message}"
    if row is None:
        outcome: OutcomeName = "CAPTURE_FAILED" if exception.phase == "capture" else "FAILED"
        return Diagnosis(outcome, exception.phase, exception.rank, exception.type, message, "see the rank's log")
    return Diagnosis(row.outcome, exception.phase, exception.rank, row.name, message, row.remedy)


_SIGNAL_REMEDIES = {
    "SIGKILL": "an operator or the kernel's memory killer: give the job more host memory, or ask who ended it",
    "SIGSEGV": "a fault in native code: the rank's log holds the Python stack",
    "SIGILL": "a library chose an instruction that this processor refuses, as virtual machines do that announce AMX: "
    "set environment.ONEDNN_MAX_CPU_ISA to AVX512_CORE_BF16 in the recipe",
}


def _from_exit(evidence: Evidence) -> Diagnosis:
    worst = next(iter(evidence.exits), None)
    rank = worst.rank if worst else None
    code = worst.code if worst else evidence.exit_code
    if evidence.oom_killed:
        return Diagnosis("HOST_OOM", evidence.phase, rank, "HOST_OOM", "the kernel ended a process for want of host memory",
                         "give the job more host memory, or run fewer ranks on a node")  # fmt: skip
    if code < 0:
        name = signal.Signals(-code).name
        message = f"ended by {name}, which the supervisor did not send"
        remedy = _SIGNAL_REMEDIES.get(name, "the rank's log holds the Python stack")
        return Diagnosis("FAILED", evidence.phase, rank, name, message, remedy)
    return Diagnosis("FAILED", evidence.phase, rank, "EXIT", f"exit code {code}, and no rank recorded an exception",
                     "see logs/launcher.log")  # fmt: skip
