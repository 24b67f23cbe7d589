"""Pairs each graphed run with the eager run of its workload and repeat, and says of each cell what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Optional

from analysis import loss, memory, replay, speedup
from analysis.capture import Captured, cell_captured
from analysis.deviation import Floor, finite_steps, incomplete
from analysis.limit import Limit, cell_limit
from analysis.load import Attempt, Records, Run, attempts_of
from analysis.pair import EagerSide, PairResult, compare_pair, eager_side
from launch.record import RESULTS_INTACT, Cell, Margins
from launch.spec import RunSpec

EXIT_PASS, EXIT_UNFINISHED, EXIT_FAILED, EXIT_INCONCLUSIVE = 0, 2, 3, 4


@dataclass(frozen=True)
class CellResult:
    """What came of one cell. ``verdict`` is None for an eager cell and for one that failed as it was expected to."""

    cell: Cell
    runs: tuple[Run, ...]
    pairs: tuple[PairResult, ...] = ()
    verdict: Optional[loss.Verdict] = None
    memory: Optional[memory.CellMemory] = None
    speed: Optional[speedup.Speed] = None
    replay: Optional[replay.Replay] = None
    captured: Optional[Captured] = None
    limit: Optional[Limit] = None
    """For a graphed cell on GPUs."""
    floor: Optional[Floor] = None
    """For an eager cell: how far its repeats are apart over the whole run."""

    @cached_property
    def spec(self) -> RunSpec:
        return self.cell.run_spec

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
        return any(run.attempt and not run.attempt.outcome.meets(self.cell.expect) for run in self.runs)

    @cached_property
    def unsound(self) -> tuple[str, ...]:
        """What is wrong with runs whose outcome says that every step is on disk; a cell with any does not pass."""
        said = []
        for run in self.runs:
            if run.attempt is not None and run.attempt.outcome.results_intact:
                wrong = unsound(run.attempt, self.spec.training.steps)
                said += [f"{run.run_id}: {reason}" for reason in wrong]
        return tuple(said)

    @property
    def max_loss_difference(self) -> Optional[float]:
        found = [pair.verdict.evidence.max_loss_difference for pair in self.pairs if pair.verdict.evidence]
        return max(found, default=None)


def unsound(attempt: Attempt, steps: int) -> tuple[str, ...]:
    """Why ``attempt`` is not what a completed run of ``steps`` steps leaves behind."""
    gap = incomplete(attempt.steps, steps, "run")
    finite = bool(finite_steps(attempt.steps).all())
    return (
        *attempt.problems,
        *((gap,) if gap else ()),
        *(() if finite else ("a loss or gradient norm is not finite",)),
    )


def exit_code(results: Sequence[CellResult]) -> int:
    """0 all as it should be; 3 a failure that more runs will not undo; 2 runs without an outcome; 4 inconclusive.

    Cells that were rejected, or cannot run on this host, are no failure.
    """
    words = {result.verdict.word for result in results if result.verdict}
    if words & {"DIVERGED", "INCOMPARABLE"} or any(result.unexpected or result.unsound for result in results):
        return EXIT_FAILED
    if "UNFINISHED" in words or any(result.unfinished for result in results):
        return EXIT_UNFINISHED
    return EXIT_INCONCLUSIVE if words - set(loss.PASSES) else EXIT_PASS


def compare(records: Records) -> tuple[CellResult, ...]:
    """A result for each cell of the plan, in its order; rejected and not runnable ones hold no runs."""
    eager = {
        cell.workload_id: eager_side(records.runs[cell.cell_id], cell)
        for cell in records.plan.cells
        if cell.state == "run" and not cell.graphed
    }
    return tuple(_result(cell, records, eager.get(cell.workload_id)) for cell in records.plan.cells)


def _result(cell: Cell, records: Records, eager: Optional[EagerSide]) -> CellResult:
    if cell.state != "run":
        return CellResult(cell, ())
    runs = records.runs[cell.cell_id]
    if cell.graphed:
        return _graphed_result(cell, runs, eager or EagerSide((), {}), records.plan.margins)
    spread = next(iter(eager.spreads.values()), None) if eager else None
    return CellResult(
        cell,
        runs,
        memory=memory.cell_memory(attempts_of(runs), (), cell.run_spec.placement.device),
        floor=spread.floor(0) if spread else None,
    )


def _graphed_result(cell: Cell, runs: tuple[Run, ...], eager: EagerSide, margins: Margins) -> CellResult:
    spec = cell.run_spec
    pairs = tuple(compare_pair(run, eager, spec, margins) for run in runs)
    attempts = [(p.eager.attempt, p.graphed.attempt) for p in pairs if p.eager and p.verdict.word != "INCOMPARABLE"]
    proofs = [pair.replay for pair in pairs if pair.replay]
    failed_as_expected = cell.expect.outcome not in RESULTS_INTACT and all(
        run.attempt is not None and run.attempt.outcome.meets(cell.expect) for run in runs
    )
    return CellResult(
        cell,
        runs,
        pairs,
        verdict=None if failed_as_expected or not pairs else _combined(pairs),
        memory=memory.cell_memory(attempts_of(runs), [(e, g) for e, g in attempts if e and g], spec.placement.device),
        speed=speedup.cell_speed([pair.speed for pair in pairs]),
        captured=cell_captured(attempts_of(runs)),
        limit=cell_limit(pairs, spec.parallelism.world_size) if spec.placement.device == "cuda" else None,
        replay=replay.worst(proofs) if proofs else None,
    )


def _combined(pairs: Sequence[PairResult]) -> loss.Verdict:
    """The worst verdict of the pairs; its reason says which repeat it is of."""
    verdict = loss.worst([pair.verdict for pair in pairs])
    repeat = next(pair.repeat for pair in pairs if pair.verdict is verdict)
    return replace(verdict, reason=f"repeat {repeat}: {verdict.reason}") if verdict.reason else verdict
