"""The records of a run: its attempts, which of them counts, and what each wrote while it ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, cast

from analysis.records.events import PhaseMemory
from analysis.records.steps import Steps
from launch.contract.outcomes import Outcome
from launch.contract.records.clocks import Clocks
from launch.contract.records.gpu_rates import GpuRates
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.imported_module import ImportedModule
from launch.contract.records.inspection import Inspection
from launch.contract.records.kernels import Kernels
from launch.contract.records.probe import Launches, Probe
from launch.contract.records.sketch import ChangedTensor, Sketch
from launch.contract.records.state_changes import StateChanges
from launch.contract.records.step_check import StepCheck

Digests = tuple[tuple[str, str], ...]
"""What must agree before two runs may be compared, as (name, digest): code, libraries, data and a checkpoint."""

TIMED_STEPS = 10
"""Two runs never have bitwise equal times for this many steps, since a GPU's timer resolves half a microsecond."""


@dataclass(frozen=True)
class EndedAttempt:
    """How one attempt of a run ended. ``notes`` are the notes that its ranks recorded."""

    number: int
    outcome: Outcome
    environment: Mapping[str, Any]
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ending(self) -> str:
        return f"ended {self.outcome.outcome}"

    @property
    def made_elsewhere(self) -> bool:
        """Whether only the attempt's log is known (``wrap --from-logs``)."""
        return self.environment.get("made") == "elsewhere"

    def hardware(self, name: str) -> Sequence[object]:
        """Return one of the lists that describe the attempt's hardware; empty if it is not recorded."""
        hardware = self.environment.get("hardware")
        found = hardware.get(name) if isinstance(hardware, dict) else None
        return found if isinstance(found, list) else ()

    @cached_property
    def digests(self) -> Digests:
        """Return the digests that the attempt recorded; missing ones are left out."""
        return digests_of(self.environment)


@dataclass(frozen=True)
class Attempt(EndedAttempt):
    """An attempt and what it wrote while it ran. The mappings are by rank. ``pid`` is the process of rank 0."""

    pid: str
    steps: Steps
    memory: tuple[PhaseMemory, ...]
    captures: Mapping[int, GraphStats]
    proofs: Mapping[int, GraphStats]
    probes: Mapping[int, Probe]
    kernels: Mapping[int, Kernels]
    """The kernels of traced steps; ranks without any are left out."""
    launches: Mapping[int, Launches]
    """How they were launched; ranks without this record are left out."""
    rates: Mapping[int, GpuRates]
    """What each rank's GPU reached; ranks that did not measure it are left out."""
    inspections: Mapping[int, Inspection]
    step_checks: Mapping[int, Sequence[StepCheck]]
    clocks: Mapping[int, Clocks]
    """Clocks over the measured steps."""
    measured_seconds: float
    """How long rank 0 spent on the measured steps by its host's clock, or 0 if it did not record it."""
    parameters: Mapping[int, tuple[str, str]]
    """The digests of parameters after the capture and at the end; ranks that did not record both are left out."""
    parameter_ends: Mapping[tuple[int, str], ChangedTensor]
    """Parameters after the last step, by rank and name; empty if they were not recorded."""
    other_state: Mapping[int, StateChanges]
    """What changed after the capture although no optimizer steps it, of a user's program."""
    sketches: Mapping[int, Mapping[tuple[int, str], Sketch]]
    """Gradients by step, then by rank and parameter."""
    imports: Mapping[str, ImportedModule]
    """The modules of rank 0 that no version of a package covers, by name."""

    @property
    def updates(self) -> Mapping[int, bool]:
        """Whether the parameters of each rank changed after the capture."""
        return {rank: first != last for rank, (first, last) in self.parameters.items()}

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """Return what no two attempts share: the bytes of their steps and, if those are few, also start and process."""
        arrays = (self.steps.loss, self.steps.grad_norm, self.steps.step_time_ms)
        timed = len(self.steps) >= TIMED_STEPS and not self.made_elsewhere
        few = () if timed else (self.outcome.started, self.pid)
        return (*few, *(array.tobytes() for array in arrays))

    def without_records(self) -> Attempt:
        """Return only how the attempt ended, because the steps of a large sweep do not fit in memory.

        To read any other record of the result is a mistake and raises AttributeError.
        """
        ended = EndedAttempt(**{field.name: getattr(self, field.name) for field in fields(EndedAttempt)})
        return cast(Attempt, ended)


def digests_of(environment: Mapping[str, Any]) -> Digests:
    """Return :attr:`EndedAttempt.digests` from the content of environment.json."""
    digests = environment.get("digests")
    content = {**(digests if isinstance(digests, dict) else {}), "data": environment.get("data_digest")}
    return tuple(sorted((name, str(value)) for name, value in content.items() if value))


@dataclass(frozen=True)
class PartialAttempt:
    """An attempt other than the one that counts, without intact results.

    ``outcome`` is None if it has none. ``digests`` is empty if they are unknown: the attempt may have run any code. ``curve``
    is None once it has been judged.
    """

    number: int
    outcome: Outcome | None
    digests: Digests
    problems: tuple[str, ...]
    curve: Steps | None
    step_checks: Mapping[int, Sequence[StepCheck]] = field(default_factory=dict)

    @property
    def steps(self) -> Steps:
        assert self.curve is not None, "this attempt has been judged and let go"
        return self.curve

    @property
    def ending(self) -> str:
        return f"ended {self.outcome.outcome} in {self.outcome.phase}" if self.outcome else "has no outcome"


@dataclass(frozen=True)
class Run:
    """A cell's repeat. ``attempt`` is the one that counts (analysis.records.load.load_run)."""

    run_id: str
    repeat: int
    begun: int
    """The number of attempts that began, with or without an outcome."""
    attempt: Attempt | None
    earlier: tuple[Attempt, ...] = ()
    """Earlier attempts with intact results. Each may be the partner of a run in its own allocation."""
    partial: tuple[PartialAttempt, ...] = ()
    """All other attempts, before and after the one that counts."""
    damaged: tuple[str, ...] = ()
    """Outcomes that cannot be read, with the fix. Each may be a failure, so none of the run's attempts counts."""
    perturbed: bool = False
    """Whether it is the perturbed run of its cell, and not a repeat."""

    @property
    def whole(self) -> tuple[Attempt, ...]:
        """The attempts that are loaded with all their records."""
        return (*self.earlier, self.attempt) if self.attempt else ()

    def with_whole(self, change: Callable[[Attempt], Attempt]) -> Run:
        """Return this run with ``change`` applied to each of these attempts."""
        return replace(self, attempt=self.attempt and change(self.attempt), earlier=tuple(map(change, self.earlier)))

    @property
    def failed(self) -> Mapping[int, Outcome]:
        """Return the outcomes of failed attempts before the one that counts, by attempt number.

        Leave out attempts that the infrastructure ended, and those with other code, libraries or data.
        """
        return {
            one.number: one.outcome
            for one in self.partial
            if self.attempt and one.number < self.attempt.number and one.digests in (self.attempt.digests, ())
            if one.outcome and one.outcome.is_own_failure
        }

    def in_allocation_of(self, partner: Attempt) -> Run:
        """Return this run with the attempt that shared ``partner``'s allocation, unless a later one failed."""
        if self.attempt is None or not self.attempt.outcome.results_intact:
            return self
        shared = [a for a in self.earlier if a.outcome.allocation == partner.outcome.allocation]
        if not shared or self.attempt.outcome.allocation == partner.outcome.allocation:
            return self
        return replace(self, attempt=shared[-1])

    def without_records(self) -> Run:
        """Return this run without steps and other records of its attempts."""
        partial = tuple(replace(one, curve=None) for one in self.partial)
        return replace(self, attempt=self.attempt and self.attempt.without_records(), earlier=(), partial=partial)

    @property
    def status(self) -> str:
        """The outcome's name, or the reason for having none."""
        if self.attempt is not None:
            return self.attempt.outcome.outcome
        # Records do not show whether a run without an outcome is still running.
        return "NOT ENDED" if self.begun else "NOT RUN"


def attempts_of(runs: Iterable[Run]) -> list[Attempt]:
    """Return the attempts that count."""
    return [run.attempt for run in runs if run.attempt is not None]
