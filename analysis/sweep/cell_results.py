"""Pairs each graphed run with the eager run of its workload and repeat, and says of each cell what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.graphs.capture_cost import CaptureCost, capture_cost
from analysis.graphs.replay_check import Replay, worst
from analysis.limits.speedup_bound import SpeedupBound, cell_limit, eager_doubt
from analysis.limits.straggler import Straggler, cell_straggler
from analysis.limits.throttling import Throttling, Unthrottled, throttling_of, unthrottled
from analysis.memory import peaks as memory
from analysis.pairing.eager_baseline import EagerBaseline, eager_side
from analysis.pairing.flaky_attempts import contradictions
from analysis.pairing.pair import PairResult
from analysis.pairing.repeats import compare_pairs, margins_of
from analysis.records.load import Records
from analysis.records.run import Attempt, Run, attempts_of
from analysis.speed import pair_speed, speedup
from analysis.speed.step_time import StepTime, cell_step_time
from analysis.statistics.confidence_interval import Family, families
from analysis.sweep.loss_trajectory import LossTrajectory, loss_trajectory
from analysis.verdict.completeness import finite_steps, incomplete
from analysis.verdict.curve_difference import NoiseFloor
from analysis.verdict.verdict import PASSES, Verdict
from analysis.verdict.verdict import corrected as corrected_verdicts
from launch.contract.outcomes import RESULTS_INTACT
from launch.contract.plan import Cell, Margins
from launch.contract.spec import RunSpec

EXIT_PASS, EXIT_UNFINISHED, EXIT_FAILED, EXIT_INCONCLUSIVE = 0, 2, 3, 4


@dataclass(frozen=True)
class CellSpeed:
    """How long a cell's step takes, and how far it is from eager. Throttling, straggler and bound are measured on GPUs."""

    step_time: StepTime | None = None
    speedup: speedup.Speed | None = None
    bound: SpeedupBound | None = None
    throttling: Throttling | None = None
    unthrottled: Unthrottled = field(default_factory=Unthrottled)
    straggler: Straggler | None = None
    timing_doubt: str = ""
    """Why the step cannot have been as short as timed."""


@dataclass(frozen=True)
class CellGraphs:
    """The worst proof of replay over repeats, and what the capture cost."""

    replay: Replay | None = None
    capture_cost: CaptureCost | None = None


@dataclass(frozen=True)
class CellLoss:
    """The trajectory of the first run with complete records, and how far the repeats of an eager cell differ."""

    trajectory: LossTrajectory | None = None
    noise_floor: NoiseFloor | None = None


@dataclass(frozen=True)
class CellIntegrity:
    """What speaks against a cell's records: a cell with unsound records does not pass.

    ``unsound_records`` are damaged outcomes and flaws of runs that ended well, ``flaky_attempts`` earlier attempts with
    another result.
    """

    unsound_records: tuple[str, ...] = ()
    flaky_attempts: tuple[str, ...] = ()


@dataclass(frozen=True)
class CellResult:
    """What came of one cell. ``verdict`` is None for an eager cell and for one that failed as expected."""

    cell: Cell
    runs: tuple[Run, ...]
    pairs: tuple[PairResult, ...] = ()
    verdict: Verdict | None = None
    speed: CellSpeed = CellSpeed()
    memory: memory.CellMemory | None = None
    graphs: CellGraphs = CellGraphs()
    loss: CellLoss = CellLoss()
    integrity: CellIntegrity = CellIntegrity()

    @property
    def spec(self) -> RunSpec:
        return self.cell.run_spec

    @property
    def on_gpu(self) -> bool:
        return bool(self.cell.spec["placement"]["device"] == "cuda")

    @property
    def outcome(self) -> str:
        """The outcome of all runs, or of each kind how many: "COMPLETED x1, CUDA_OOM x1"."""
        counts = Counter(run.status for run in self.runs)
        if len(counts) <= 1:
            return next(iter(counts), "NOT RUN")
        return ", ".join(f"{status} x{count}" for status, count in sorted(counts.items()))

    @property
    def unfinished(self) -> bool:
        """Whether a run of a cell that was to run has no outcome."""
        return self.cell.state == "run" and (not self.runs or any(run.attempt is None for run in self.runs))

    @property
    def unexpected(self) -> bool:
        """Whether a run ended otherwise than the recipe expects of the cell."""
        return any(run.attempt and not run.attempt.outcome.matches(self.cell.expect) for run in self.runs)

    @property
    def max_loss_difference(self) -> float | None:
        """From the mean of the eager runs that a graphed run was judged with, of the repeat that is furthest from it."""
        verdicts = [*([self.verdict] if self.verdict else []), *(pair.verdict for pair in self.pairs)]
        return max((v.evidence.max_loss_difference for v in verdicts if v.evidence), default=None)

    def let_go(self) -> CellResult:
        """This result without what its attempts wrote while they ran."""
        pairs = (replace(p, eager=p.eager and p.eager.let_go(), graphed=p.graphed.let_go()) for p in self.pairs)
        return replace(self, runs=tuple(run.let_go() for run in self.runs), pairs=tuple(pairs))


def unsound(attempt: Attempt, steps: int) -> tuple[str, ...]:
    """Why ``attempt`` is not what a completed run of ``steps`` steps leaves behind."""
    gap = incomplete(attempt.steps, np.arange(steps), "run")
    finite = bool(finite_steps(attempt.steps).all())
    return (
        *attempt.problems,
        *((gap,) if gap else ()),
        *(() if finite else ("a loss or gradient norm is not finite",)),
    )


def _unsound_runs(runs: Sequence[Run], steps: int) -> tuple[str, ...]:
    ended = ((run, run.attempt) for run in runs if run.attempt is not None and run.attempt.outcome.results_intact)
    return (
        *(reason for run in runs for reason in run.damaged),
        *(f"{run.run_id}: {reason}" for run, attempt in ended for reason in unsound(attempt, steps)),
    )


def exit_code(results: Sequence[CellResult]) -> int:
    """0 all as it should be; 3 a failure that more runs will not undo; 2 runs without an outcome; 4 inconclusive.

    Cells that were rejected, or cannot run on this host, are no failure.
    """
    words = {result.verdict.word for result in results if result.verdict}
    if words & {"DIVERGED", "INCOMPARABLE"} or any(
        result.unexpected or result.integrity.unsound_records for result in results
    ):
        return EXIT_FAILED
    if "UNFINISHED" in words or any(result.unfinished for result in results):
        return EXIT_UNFINISHED
    return EXIT_INCONCLUSIVE if words - set(PASSES) else EXIT_PASS


def compare_cells(records: Records) -> tuple[CellResult, ...]:
    """A result for each cell of the plan, in its order; rejected and not runnable ones hold no runs."""
    eager = {
        cell.workload_id: eager_side(records.runs[cell.cell_id], cell)
        for cell in records.plan.cells
        if cell.state == "run" and not cell.graphed
    }
    return tuple(_result(cell, records, eager.get(cell.workload_id)) for cell in records.plan.cells)


def corrected(results: Sequence[CellResult]) -> tuple[CellResult, ...]:
    """The results of a whole sweep, whose cells were compared workload by workload, with verdicts that count as one
    family, and speeds of those that pass as another: the more cells are tested, the surer each has to be."""
    return _timed_as_family(_judged_as_family(results))


def _judged_as_family(results: Sequence[CellResult]) -> tuple[CellResult, ...]:
    judged = [result for result in results if result.verdict]
    verdicts = corrected_verdicts([result.verdict for result in judged if result.verdict])
    changed = {old.cell.cell_id: new for old, new in zip(judged, verdicts, strict=True) if new is not old.verdict}
    return tuple(_less_sure(r, changed[r.cell.cell_id]) if r.cell.cell_id in changed else r for r in results)


def _timed_as_family(results: Sequence[CellResult]) -> tuple[CellResult, ...]:
    timed = [r for r in results if r.speed.speedup and r.speed.speedup.tells and r.verdict and r.verdict.passes]
    pairs = {result.cell.cell_id: [pair.speed for pair in result.pairs] for result in timed}
    found = families([(r.cell.workload_id, speedup.ratios_of(pairs[r.cell.cell_id])) for r in timed])
    speeds = {
        result.cell.cell_id: _speedup(pairs[result.cell.cell_id], result.spec, result.speed.unthrottled, family)
        for result, family in zip(timed, found, strict=True)
    }
    return tuple(
        replace(r, speed=replace(r.speed, speedup=speeds.get(r.cell.cell_id, r.speed.speedup))) for r in results
    )


def _speedup(
    pairs: Sequence[pair_speed.PairSpeed], spec: RunSpec, without: Unthrottled, family: Family | None = None
) -> speedup.Speed | None:
    """What ``pairs`` say, as far as throttling leaves it."""
    speed = speedup.cell_speed(pairs, spec, family)
    return speed and speed.with_bounds(without.least, without.most, without.reason)


def _less_sure(result: CellResult, verdict: Verdict) -> CellResult:
    pairs = (
        replace(pair, verdict=replace(verdict, evidence=pair.verdict.evidence))
        if pair.verdict.word == "EQUIVALENT"
        else pair
        for pair in result.pairs
    )
    return replace(result, verdict=verdict, pairs=tuple(pairs))


def _result(cell: Cell, records: Records, eager: EagerBaseline | None) -> CellResult:
    if cell.state != "run":
        return CellResult(cell, ())
    runs, spec = records.runs[cell.cell_id], cell.run_spec
    integrity = CellIntegrity(
        _unsound_runs(runs, spec.training.steps), _flaky(runs, margins_of(spec, records.plan.margins))
    )
    if cell.graphed:
        return _graphed_result(cell, runs, eager or EagerBaseline((), {}), records.plan.margins, integrity)
    return _eager_result(cell, runs, eager.noise_floor if eager else None, integrity)


def _flaky(runs: Sequence[Run], margins: Margins) -> tuple[str, ...]:
    return tuple(f"repeat {run.repeat}: {said}" for run in runs for said in contradictions(run, margins))


def _speed(spec: RunSpec, runs: Sequence[Run], compared: Sequence[tuple[Attempt, Attempt]] = ()) -> CellSpeed:
    """What the ``runs`` of a cell say of their speed; ``compared`` are pairs of it, (eager, graphed)."""
    attempts, ranks = attempts_of(runs), spec.parallelism.world_size
    step_time = cell_step_time(attempts)
    if spec.placement.device != "cuda":
        return CellSpeed(step_time)
    return CellSpeed(
        step_time,
        throttling=throttling_of(attempts, compared, ranks),
        straggler=cell_straggler(attempts, spec.parallelism, step_time.milliseconds) if step_time else None,
        timing_doubt="" if spec.graphed else eager_doubt(attempts, ranks),
    )


def _eager_result(
    cell: Cell, runs: tuple[Run, ...], noise_floor: NoiseFloor | None, integrity: CellIntegrity
) -> CellResult:
    spec, attempts = cell.run_spec, attempts_of(runs)
    return CellResult(
        cell,
        runs,
        speed=_speed(spec, runs),
        memory=memory.cell_memory(attempts, (), spec.placement.device),
        loss=CellLoss(loss_trajectory(attempts), noise_floor),
        integrity=integrity,
    )


def _graphed_result(
    cell: Cell, runs: tuple[Run, ...], eager: EagerBaseline, margins: Margins, integrity: CellIntegrity
) -> CellResult:
    spec, attempts = cell.run_spec, attempts_of(runs)
    untimed, verdict = compare_pairs(runs, eager, spec, margins)
    pairs = _timed_together(untimed)
    sides = [(p.eager.attempt, p.graphed.attempt) for p in pairs if p.eager and p.verdict.word != "INCOMPARABLE"]
    compared = [(before, after) for before, after in sides if before and after]
    proofs = [pair.replay for pair in pairs if pair.replay]
    failed_as_expected = cell.expect.outcome not in RESULTS_INTACT and all(
        run.attempt is not None and run.attempt.outcome.matches(cell.expect) for run in runs
    )
    return CellResult(
        cell,
        runs,
        pairs=pairs,
        verdict=None if failed_as_expected else verdict,
        speed=_with_pairs(_speed(spec, runs, compared), pairs, spec),
        memory=memory.cell_memory(attempts, compared, spec.placement.device),
        graphs=CellGraphs(worst(proofs) if proofs else None, capture_cost(attempts)),
        loss=CellLoss(loss_trajectory(attempts)),
        integrity=integrity,
    )


def _with_pairs(speed: CellSpeed, pairs: Sequence[PairResult], spec: RunSpec) -> CellSpeed:
    """``speed`` with what the pairs say of it."""
    ranks = spec.parallelism.world_size
    slowed = speed.throttling.eager.slowed if speed.throttling and speed.throttling.eager else ""
    bound = cell_limit(pairs, ranks, slowed) if spec.placement.device == "cuda" else None
    without = unthrottled(pairs, ranks)
    ratio = _speedup([pair.speed for pair in pairs], spec, without)
    doubt = bound and (bound.doubt or bound.eager_doubt)
    return replace(
        speed,
        speedup=ratio.with_doubt(doubt) if ratio and doubt else ratio,
        bound=bound,
        unthrottled=without,
        timing_doubt=bound.doubt if bound else "",
    )


def _timed_together(pairs: Sequence[PairResult]) -> tuple[PairResult, ...]:
    speeds = pair_speed.pool_pairs([pair.speed for pair in pairs])
    return tuple(replace(pair, speed=speed) for pair, speed in zip(pairs, speeds, strict=True))
