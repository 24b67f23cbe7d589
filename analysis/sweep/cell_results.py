"""The result of a cell, grouped by subject."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from analysis.graphs.capture_cost import CaptureCost
from analysis.graphs.replay_check import Replay
from analysis.limits.roofline import Roofline
from analysis.limits.speedup_bound import SpeedupBound
from analysis.limits.straggler import Straggler
from analysis.limits.throttling import Throttling
from analysis.memory.peaks import CellMemory
from analysis.pairing.pair import Pair
from analysis.pairing.step_checks import StepChecks
from analysis.records.run import Run
from analysis.speed.speedup import Speed
from analysis.speed.step_time import StepTime
from analysis.sweep.loss_trajectory import LossTrajectory
from analysis.verdict.noise import NoiseFloor
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Cell
from launch.contract.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class PairResult(Pair):
    """A pair and its verdict."""

    verdict: Verdict


@dataclass(frozen=True)
class CellSpeed:
    """A cell's step time and its speed-up over eager. Only GPU cells have a throttling, straggler, upper bound and roofline."""

    step_time: StepTime | None = None
    speedup: Speed | None = None
    bound: SpeedupBound | None = None
    throttling: Throttling | None = None
    straggler: Straggler | None = None
    roofline: Roofline | None = None
    timing_doubt: str = ""
    """Why the step cannot be as short as measured; empty if it can."""

    @property
    def of_hardware(self) -> float | None:
        """The share of the step that the hardware needs, or None if it is unknown."""
        if self.roofline is None or self.step_time is None or self.timing_doubt:
            return None
        return self.roofline.share(self.step_time.milliseconds)


@dataclass(frozen=True)
class CellGraphs:
    """The weakest proof of replay over all repeats, the cost of the capture, and the findings of step checks."""

    replay: Replay | None = None
    capture_cost: CaptureCost | None = None
    step_checks: StepChecks | None = None


@dataclass(frozen=True)
class CellLoss:
    """The loss trajectory of the first run with complete records, and the noise floor of an eager cell."""

    trajectory: LossTrajectory | None = None
    noise_floor: NoiseFloor | None = None


@dataclass(frozen=True)
class CellIntegrity:
    """Problems with a cell's records. A cell with unsound records does not pass.

    ``unsound_records`` lists damaged outcomes, and defects in the records of runs that ended well. ``flaky_attempts`` lists
    other attempts with a different result. ``uncompared_attempts`` lists attempts that cannot be compared, because of other
    code, libraries or data, or damaged records, and those without an outcome.
    """

    unsound_records: tuple[str, ...] = ()
    flaky_attempts: tuple[str, ...] = ()
    uncompared_attempts: tuple[str, ...] = ()


@dataclass(frozen=True)
class CellResult:
    """The result of one cell. ``verdict`` is None for an eager cell, and for one that failed as expected."""

    cell: Cell
    runs: tuple[Run, ...]
    pairs: tuple[PairResult, ...] = ()
    verdict: Verdict | None = None
    speed: CellSpeed = CellSpeed()
    memory: CellMemory | None = None
    graphs: CellGraphs = CellGraphs()
    loss: CellLoss = CellLoss()
    integrity: CellIntegrity = CellIntegrity()
    looks: tuple[int, ...] = ()
    """The numbers of repeats after which its verdicts are judged (Plan.looks). The looks share the error."""
    skipped: Mapping[int, str] = field(default_factory=dict)
    """Why repeats were not begun, by the repeat. ``runs`` leaves them out."""
    foreign_memory: Mapping[str, int] = field(default_factory=dict)
    """The bytes that other processes held on a GPU of a run when it began, by run id. Such runs do not count in ``memory``."""
    name: str = ""
    """A short name within a report: "B2" is the second graphed cell of the second workload, "B0" its eager cell."""

    @property
    def spec(self) -> RunSpec:
        return self.cell.run_spec

    @property
    def on_gpu(self) -> bool:
        return bool(self.cell.spec["placement"]["device"] == "cuda")

    @property
    def outcome(self) -> str:
        """The outcome of all runs, or counts if they differ: "COMPLETED x1, CUDA_OOM x1"."""
        counts = Counter(run.status for run in self.runs)
        if len(counts) <= 1:
            return next(iter(counts), "SKIPPED" if self.skipped else "NOT RUN")
        return ", ".join(f"{status} x{count}" for status, count in sorted(counts.items()))

    @property
    def seconds(self) -> float:
        """The run time of the attempts that count, summed over repeats."""
        return sum(
            max(run.attempt.outcome.ended - run.attempt.outcome.started, 0.0) for run in self.runs if run.attempt
        )

    @property
    def validated(self) -> bool:
        """Whether the plan runs this cell and it is graphed, so that it has a verdict or fails as the recipe expects."""
        return self.cell.graphed and self.cell.state == "run"

    @property
    def unfinished(self) -> bool:
        """Whether the plan runs this cell and some run has no outcome yet. Skipped runs get none."""
        unbegun = not self.runs and not self.skipped
        return self.cell.state == "run" and (unbegun or any(run.attempt is None for run in self.runs))

    @property
    def unexpected(self) -> bool:
        """Whether the outcome of some run differs from the one that the recipe expects."""
        return any(run.attempt and not run.attempt.outcome.matches(self.cell.expect) for run in self.runs)

    @property
    def passes(self) -> bool:
        return self.verdict is not None and self.verdict.passes

    @property
    def name_with_verdict(self) -> str:
        """The short name, followed by the verdict if it does not pass."""
        return self.name + ("" if self.passes or not self.verdict else f" (**{self.verdict.verdict}**)")

    @property
    def compared_steps(self) -> int:
        """The number of compared steps in the repeat with the fewest, or 0."""
        return min((pair.verdict.evidence.steps for pair in self.pairs if pair.verdict.evidence), default=0)

    @property
    def max_loss_difference(self) -> float | None:
        """The largest loss difference of any repeat from the mean of its eager runs, in nats; None if unknown."""
        verdicts = [*([self.verdict] if self.verdict else []), *(pair.verdict for pair in self.pairs)]
        return max((v.evidence.max_loss_difference for v in verdicts if v.evidence), default=None)


def eager_results(results: Iterable[CellResult]) -> dict[str, CellResult]:
    """Return the result of the eager cell of each workload that the plan runs."""
    return {each.cell.workload_id: each for each in results if each.cell.state == "run" and not each.cell.graphed}
