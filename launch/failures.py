"""From what was seen of an attempt to its outcome: class, phase, first failing rank and remedy. Pure.

What is seen: exceptions that ranks recorded, exit codes of ranks, the phase that each had entered, and whether the
supervisor ended the attempt itself. The first exception in time is the cause; what other ranks say after it (a closed
connection, a cancelled collective) is a consequence and is passed over.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Set
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
    """All that is known of an attempt that has ended. What ranks said after the supervisor began to end them is not."""

    ended_by: EndedBy
    exit_code: int
    phases: Mapping[int, Phase]
    """The last phase that each rank entered."""
    exceptions: tuple[RankException, ...] = ()
    exits: tuple[RankExit, ...] = ()
    """Ranks that failed, the first one first."""
    oom_killed: bool = False
    limit_seconds: float = 0.0

    @property
    def phase(self) -> Phase:
        return self.phases.get(0, "init")

    @property
    def results_intact(self) -> bool:
        """Rank 0 writes metrics, and enters the teardown when the last of them is on disk."""
        return self.phase == "teardown"


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
    """One kind of failure: which exceptions ("Type: message") it covers, what the outcome is, and the way out."""

    name: str
    outcome: OutcomeName
    remedy: str
    pattern: str = ""


# What other ranks say when one has gone: consequences, not causes.
_SECONDARY = re.compile(
    r"Connection (closed|reset) by peer|DistBackendError|cudaErrorStreamCaptureInvalidated|SIGTERM|Broken pipe"
)

# Sorted by priority: the first row that matches names the class.
EXCEPTION_CLASSES: tuple[FailureClass, ...] = (
    FailureClass("UNSUPPORTED", "CONFIG", "change the setting named, or use an engine that has it", r"^UnsupportedError:"),
    FailureClass("DATA", "CONFIG", "mend the data section of the recipe as the message says", r"^DataError:"),
    FailureClass("CHECKPOINT", "CONFIG", "mend model.weights, or the model section of the recipe, as the message says", r"^CheckpointError:"),
    FailureClass("SAFETENSORS", "CONFIG", "a file of model.weights changed after it was checked: let nothing write there while runs start, or copy it again", r"^SafetensorError:"),
    FailureClass("NUMERIC", "NUMERIC", "look at the eager twin at the same step: if it is finite, the capture changed the numbers; if not, lower training.learning_rate", r"^NumericError:"),
    FailureClass("CUDA_OOM", "CUDA_OOM", "capture fewer modules, lower training.micro_batch_size, or raise parallelism.pp or tp", r"OutOfMemoryError|CUDA out of memory"),
    FailureClass("HOST_OOM", "HOST_OOM", "give the job more host memory, or run fewer ranks on a node", r"^MemoryError|DefaultCPUAllocator: (can't allocate|not enough) memory"),
    FailureClass("COMPILER", "ENVIRONMENT", "install a C++ compiler and Python's headers (Debian: apt-get install g++ python3-dev)", r"InvalidCxxCompiler|No working C\+\+ compiler|Python\.h: No such file"),
    FailureClass("IMPORT", "ENVIRONMENT", "install the package named into the environment that runs the job", r"^(ModuleNotFoundError|ImportError):|undefined symbol"),
    FailureClass("ENVIRONMENT", "ENVIRONMENT", "give the host what the message names", r"^EnvironmentFault:"),
    FailureClass("DISK_FULL", "ENVIRONMENT", "free space under the sweep's folder, then resume", r"No space left on device|Disk quota exceeded"),
    FailureClass("CAPTURE", "CAPTURE_FAILED", "see the exception it names; a smaller scope narrows down the culprit", r"^CaptureError:"),
    FailureClass("STREAM_CAPTURE", "CAPTURE_FAILED", "the captured code synchronises with the host or leaves the capturing stream: look for .item(), .cpu() or a print of a tensor, or capture a smaller scope", r"cudaErrorStreamCapture|operation not permitted when stream is capturing"),
    FailureClass("ILLEGAL_ACCESS", "FAILED", "a stale pointer: look for an input freed before replay; with expandable segments set NCCL_GRAPH_REGISTER=0", r"illegal memory access|cudaErrorIllegalAddress"),
    FailureClass("COMMUNICATION", "FAILED", "see the log of the rank that failed first", r"Gloo|gloo|NCCL|ProcessGroup|collective|Connection (closed|reset) by peer"),
)  # fmt: skip

# How an attempt ends that no exception explains.
CANCELLED = FailureClass("CANCELLED", "CANCELLED", "resume the sweep to run it again")
TIMEOUT = FailureClass("TIMEOUT", "TIMEOUT", "raise resources.minutes_per_run, or lower training.steps")
HANG = FailureClass("HANG", "HANG", "the logs hold every rank's stack at that moment; raise resources.hang_minutes if a step may take so long")  # fmt: skip
TEARDOWN_HANG = FailureClass("TEARDOWN_HANG", "TEARDOWN_HANG", "delete graphs before process groups; the results count")
TEARDOWN_CRASH = FailureClass("TEARDOWN_CRASH", "FAILED", "see the logs; every step's metrics are recorded")
SPEC = FailureClass("SPEC", "CONFIG", "delete the run's spec.json and sweep again, which writes it anew")
KERNEL_OOM = FailureClass("KERNEL_OOM", "HOST_OOM", "give the job more host memory, or run fewer ranks on a node")
EXIT = FailureClass("EXIT", "FAILED", "see logs/launcher.log and the ranks' logs")
SIGNALS: tuple[FailureClass, ...] = (
    FailureClass("SIGKILL", "FAILED", "an operator or the kernel's memory killer: give the job more host memory, or ask who ended it"),
    FailureClass("SIGSEGV", "FAILED", "a fault in native code: the rank's log holds the Python stack"),
    FailureClass("SIGBUS", "FAILED", "a memory-mapped file was shortened while it was read, or its disk is at fault: look at data.path and model.weights"),
    FailureClass("SIGILL", "FAILED", "a library chose an instruction that this processor refuses, as virtual machines do that announce AMX: set environment.ONEDNN_MAX_CPU_ISA to AVX512_CORE_BF16 in the recipe"),
    FailureClass("SIGNAL", "FAILED", "ended by another signal, whose name is the class: the rank's log may hold the Python stack"),
)  # fmt: skip

FAILURE_CLASSES: tuple[FailureClass, ...] = (
    *EXCEPTION_CLASSES, CANCELLED, TIMEOUT, HANG, TEARDOWN_HANG, TEARDOWN_CRASH, SPEC, KERNEL_OOM, EXIT, *SIGNALS
)  # fmt: skip
"""Every class that a record may name, but for exceptions that no row covers: their class is their type."""


def diagnose(evidence: Evidence) -> Diagnosis:
    """The outcome of an attempt from what was seen of it."""
    if evidence.results_intact:
        return _after_results(evidence)
    if evidence.ended_by == "cancel":
        return _ended(CANCELLED, evidence.phase, "cancelled while it ran")
    exception = first_exception(evidence.exceptions)
    if exception is not None and not _is_secondary(exception):
        return _from_exception(exception)
    if any(rank_exit.code < 0 for rank_exit in evidence.exits):
        return _from_exit(evidence)
    if exception is not None:
        return _from_exception(exception)
    if evidence.ended_by == "deadline":
        return _ended(TIMEOUT, evidence.phase, f"not finished after {evidence.limit_seconds:g} s")
    if evidence.ended_by == "hang":
        return _ended(HANG, evidence.phase, f"no sign of life for {evidence.limit_seconds:g} s")
    return _from_exit(evidence)


def without_spec(error: Exception) -> Diagnosis:
    """Of an attempt whose spec cannot be read: nothing of it was started."""
    return _ended(SPEC, "init", f"spec.json cannot be read: {type(error).__name__}: {error}")


def first_exception(exceptions: tuple[RankException, ...]) -> Optional[RankException]:
    """The earliest exception that is not a consequence of another rank's; the earliest of all where each is."""
    ordered = sorted(exceptions, key=lambda exception: (exception.time, exception.rank))
    primary = [exception for exception in ordered if not _is_secondary(exception)]
    return next(iter(primary or ordered), None)


def classify(type_name: str, message: str) -> Optional[FailureClass]:
    """The row of the table for an exception, None where none covers it."""
    text = f"{type_name}: {message}"
    return next((row for row in EXCEPTION_CLASSES if re.search(row.pattern, text)), None)


def _is_secondary(exception: RankException) -> bool:
    return bool(_SECONDARY.search(f"{exception.type}: {exception.message}"))


def _ended(failure: FailureClass, phase: Phase, message: str, rank: Optional[int] = None) -> Diagnosis:
    return Diagnosis(failure.outcome, phase, rank, failure.name, message, failure.remedy)


def _after_results(evidence: Evidence) -> Diagnosis:
    if evidence.ended_by == "cancel":
        return Diagnosis("COMPLETED", "teardown", message="cancelled in its teardown, after its last result")
    if evidence.ended_by != "itself":
        return _ended(TEARDOWN_HANG, "teardown", "results are on disk, but the processes did not end")
    exception, first = first_exception(evidence.exceptions), next(iter(evidence.exits), None)
    if exception is not None:
        return _ended(TEARDOWN_CRASH, "teardown", f"{exception.type}: {exception.message}", exception.rank)
    if evidence.exit_code == 0:
        return Diagnosis("COMPLETED", "teardown")
    code, rank = (first.code, first.rank) if first else (evidence.exit_code, None)
    return _ended(TEARDOWN_CRASH, "teardown", f"{_exit_words(code)} after the results were on disk", rank)


def _from_exception(exception: RankException) -> Diagnosis:
    row = classify(exception.type, exception.message)
    message = f"{exception.type}: {exception.message}"
    if row is None:
        outcome: OutcomeName = "CAPTURE_FAILED" if exception.phase == "capture" else "FAILED"
        return Diagnosis(outcome, exception.phase, exception.rank, exception.type, message, "see the rank's log")
    return _ended(row, exception.phase, message, exception.rank)


def _from_exit(evidence: Evidence) -> Diagnosis:
    """From exit codes alone, of the rank that is most likely the cause; the earliest of equals."""
    said = {exception.rank for exception in evidence.exceptions}
    first = min(evidence.exits, key=lambda rank_exit: _consequence(rank_exit, said), default=None)
    rank, code = (first.rank, first.code) if first else (None, evidence.exit_code)
    phase = evidence.phases.get(rank or 0, "init")
    if code == -signal.SIGKILL and evidence.oom_killed:
        return _ended(KERNEL_OOM, phase, "the kernel ended it for want of host memory", rank)
    if code >= 0:
        return _ended(EXIT, phase, f"{_exit_words(code)}, and no rank recorded an exception", rank)
    name = _signal_name(code)
    row = next(row for row in SIGNALS if row.name in (name, "SIGNAL"))
    message = f"{_exit_words(code)}, which the supervisor did not send"
    return Diagnosis(row.outcome, phase, rank, name, message, row.remedy)


def _consequence(rank_exit: RankExit, said: Set[int]) -> int:
    """How likely an exit is a consequence of another rank's: torchrun ends those that are left by SIGTERM, and who said
    something has said that another had gone."""
    if rank_exit.code == -signal.SIGTERM:
        return 2
    if rank_exit.code >= 0:
        return 3 if rank_exit.rank in said else 1
    return 0


def _exit_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by {_signal_name(code)}"


def _signal_name(code: int) -> str:
    """Real-time signals have numbers, but all between the first and the last have no name."""
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
