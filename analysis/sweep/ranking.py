"""Which cell of a task to take: layouts, dispatchers, engines and graph configurations, fastest first.

Cells of one task compute the same thing. They need not share an allocation, so that nothing here is a paired comparison:
the order is that of absolute step times, and it says nothing where two cells are no further apart than two allocations
may be. Ranked are eager cells that ended well and graphed cells that pass, and of them those that train what the task's
first cell trains (analysis/sweep/loss_trajectory.py); the others are named with the reason.

On the Pareto front is a cell where no other is at least as good in step time, peak memory a rank and number of ranks, and
better in one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.limits.throttling import least_beside
from analysis.records.provenance import differing_fields
from analysis.records.run import attempts_of
from analysis.speed.flops import model_flops, tokens_per_step
from analysis.speed.pair_speed import PairSpeed, overlaps
from analysis.speed.speedup import classify, ratios_of
from analysis.speed.step_time import StepTime
from analysis.statistics.confidence_interval import MINIMUM_PAIRS, Family, families, interval_of
from analysis.sweep.cell_results import CellResult
from analysis.sweep.labels import task_words
from analysis.sweep.loss_trajectory import describe_divergence
from launch.contract.spec import Device, RunSpec
from launch.contract.spec_ids import LAYOUT_ONLY

ALLOCATION_ALLOWANCE = 0.05
"""The relative difference of step times that another allocation may cause: other hosts, clocks, temperatures and network
neighbours. A workload usually has one allocation, so that a sweep cannot estimate it."""

Point = tuple[float, float, int]
"""Step time in milliseconds, peak memory in bytes (infinite where unknown), and ranks."""


@dataclass(frozen=True)
class Ranked:
    """A cell that users may choose. ``sets_apart`` lists its differences from others of its task: "pp=2"."""

    label: str
    sets_apart: tuple[str, ...]
    step: StepTime
    ranks: int
    nodes: int
    tokens_per_second_per_rank: float
    tflops: float
    """Of the model, a rank (analysis/speed/flops.py)."""
    peak: int | None
    """Bytes, of the rank with the highest peak."""
    on_front: bool
    told_apart: bool
    """Whether the first cell is faster for certain: cells of one workload by their pairs; others where all of its runs are
    faster than all of this cell's, of two each or more, by more than the allowance for their allocations."""


@dataclass(frozen=True)
class Ranking:
    """One task, fastest first. ``left_out`` are labels with the reason; ``machines`` is where ranked runs differ."""

    task_id: str
    name: str
    """Model, batch and precision."""
    device: Device
    cells: tuple[Ranked, ...]
    left_out: tuple[tuple[str, str], ...]
    allocations: int
    machines: tuple[str, ...]

    @property
    def best(self) -> Ranked:
        return self.cells[0]

    @property
    def most_of_a_rank(self) -> Ranked:
        """The cell with the most tokens per second and rank."""
        return max(self.cells, key=lambda cell: cell.tokens_per_second_per_rank)


@dataclass(frozen=True)
class _Candidate:
    """A cell that users may choose, with its step time and spec."""

    result: CellResult
    step: StepTime
    spec: RunSpec

    @property
    def point(self) -> Point:
        memory = self.result.memory
        return self.step.milliseconds, memory.peak if memory else math.inf, self.spec.parallelism.world_size


def rank(results: Sequence[CellResult]) -> tuple[Ranking, ...]:
    """Rank each task that has two or more eligible cells, in the plan's order."""
    found = (_ranking(task_id, device, cells) for (task_id, device), cells in _tasks(results).items())
    return tuple(ranking for ranking in found if ranking)


def diverging_cells(results: Sequence[CellResult]) -> tuple[tuple[CellResult, str], ...]:
    """Return otherwise eligible cells whose loss trajectory differs from that of the first cell of their task, with the reason."""
    found = (
        (result, _other_course(result, cells))
        for cells in _tasks(results).values()
        for result in cells
        if not _left_out(result)
    )
    return tuple((result, why) for result, why in found if why)


def _tasks(results: Sequence[CellResult]) -> dict[tuple[str, Device], list[CellResult]]:
    tasks: dict[tuple[str, Device], list[CellResult]] = {}
    for result in results:
        if result.cell.state == "run":
            tasks.setdefault((result.cell.task_id, "cuda" if result.on_gpu else "cpu"), []).append(result)
    return tasks


def _ranking(task_id: str, device: Device, results: Sequence[CellResult]) -> Ranking | None:
    why = [_left_out(result) or _other_course(result, results) for result in results]
    taken = [
        _Candidate(result, result.speed.step_time, result.spec)
        for result, reason in zip(results, why, strict=True)
        if result.speed.step_time and not reason
    ]
    if len(taken) < 2:
        return None
    taken.sort(key=lambda candidate: candidate.step.milliseconds)
    told = [_told(candidate.spec) for candidate in taken]
    vary = [key for key in dict.fromkeys(key for each in told for key in each) if len({e.get(key) for e in told}) > 1]
    front = _front([candidate.point for candidate in taken])
    slower = _slower_beside(taken[0].result, [candidate.result for candidate in taken[1:]])
    cells = tuple(
        _ranked(candidate, tuple(f"{key}={each[key]}" for key in vary if key in each), front, slower, taken[0])
        for candidate, each in zip(taken, told, strict=True)
    )
    environments = {id(a.environment): a.environment for c in taken for a in attempts_of(c.result.runs)}
    return Ranking(
        task_id,
        task_words(taken[0].spec),
        device,
        cells,
        tuple((result.cell.label, reason) for result, reason in zip(results, why, strict=True) if reason),
        len({allocation for candidate in taken for allocation in candidate.step.allocations}),
        differing_fields(list(environments.values())),
    )


def _left_out(result: CellResult) -> str:
    """Return why the cell is not ranked; empty where it is."""
    if result.integrity.unsound_records:
        return "records unsound"
    if result.unfinished or any(run.attempt and not run.attempt.outcome.results_intact for run in result.runs):
        return result.outcome
    if result.cell.graphed and not (result.verdict and result.verdict.passes):
        return result.verdict.verdict if result.verdict else "no verdict"
    speed = result.speed
    if speed.timing_doubt:
        return speed.timing_doubt
    if speed.throttling and speed.throttling.own.slowed:
        return f"its GPUs were slowed down by {speed.throttling.own.slowed}"
    return "" if speed.step_time else "no step was timed"


def _other_course(result: CellResult, task: Sequence[CellResult]) -> str:
    """Describe how the loss of the cell differs from that of the first eligible cell of its ``task``; empty where it does not."""
    first = next((other for other in task if other.loss.trajectory and not _left_out(other)), result)
    if not (result.loss.trajectory and first.loss.trajectory):
        return ""
    apart = describe_divergence(result.loss.trajectory, first.loss.trajectory)
    return f"trains something else than {first.cell.label}: {apart}" if apart else ""


def _ranked(
    candidate: _Candidate, sets_apart: tuple[str, ...], front: set[Point], slower: set[str], first: _Candidate
) -> Ranked:
    spec, step = candidate.spec, candidate.step
    ranks = spec.parallelism.world_size
    return Ranked(
        label=candidate.result.cell.label,
        sets_apart=sets_apart,
        step=step,
        ranks=ranks,
        nodes=spec.placement.nodes,
        tokens_per_second_per_rank=tokens_per_step(spec) / ranks / step.milliseconds * 1e3,
        tflops=model_flops(spec) / ranks / step.milliseconds / 1e9,
        peak=candidate.result.memory.peak if candidate.result.memory else None,
        on_front=candidate.point in front,
        told_apart=_told_apart(first, candidate, slower),
    )


def _told_apart(first: _Candidate, other: _Candidate, slower: set[str]) -> bool:
    """Whether the first cell is faster for certain: cells of one workload by their pairs, others by absolute times. ``slower``
    are graphed cells that are by the first one's pairs."""
    fast, slow = first.result, other.result
    if fast.cell.workload_id == slow.cell.workload_id and fast.cell.graphed != slow.cell.graphed:
        speed = fast.speed.speedup or slow.speed.speedup
        return speed is not None and speed.verdict == ("FASTER" if fast.cell.graphed else "SLOWER")
    if fast.cell.workload_id == slow.cell.workload_id:
        return slow.cell.cell_id in slower
    least = least_beside(fast.speed.throttling, slow.speed.throttling)
    apart = other.step.low * least > first.step.high * (1 + ALLOCATION_ALLOWANCE)
    return min(first.step.runs, other.step.runs) > 1 and apart


def _slower_beside(fast: CellResult, others: Sequence[CellResult]) -> set[str]:
    """Which graphed cells of its workload a graphed one is faster than, by the runs that share a repeat and its eager run.
    Any two of them might have been held against each other, and all of these words count as one family."""
    beside_it = [other for other in others if other.cell.workload_id == fast.cell.workload_id]
    pairs = {
        other.cell.cell_id: _beside(fast, other) for other in beside_it if other.cell.graphed and fast.cell.graphed
    }
    tested = {cell_id: found for cell_id, found in pairs.items() if len(found) >= MINIMUM_PAIRS}
    words = len(tested) * (len(tested) + 1) // 2
    found = families([(fast.cell.cell_id, ratios_of(each)) for each in tested.values()], words)
    least = {other.cell.cell_id: least_beside(fast.speed.throttling, other.speed.throttling) for other in beside_it}
    return {
        cell_id
        for (cell_id, each), family in zip(tested.items(), found, strict=True)
        if _faster(each, family, least[cell_id])
    }


def _faster(pairs: Sequence[PairSpeed], family: Family, least: float) -> bool:
    """Though the ratios be only ``least`` times what was measured."""
    interval = interval_of(ratios_of(pairs), family)
    return classify(pairs, family)[0] == "FASTER" and interval is not None and interval[0] * least > 1


def _beside(fast: CellResult, slow: CellResult) -> list[PairSpeed]:
    quick, dull = ({pair.repeat: pair.speed for pair in cell.pairs if pair.speed.ratio} for cell in (fast, slow))
    both = sorted(repeat for repeat in quick if repeat in dull and quick[repeat].allocation == dull[repeat].allocation)
    return [overlaps(dull[repeat], quick[repeat]) for repeat in both]


def _told(spec: RunSpec) -> dict[str, str]:
    """Return the settings in which cells of one task may differ."""
    training = {name: getattr(spec.training, name) for name in LAYOUT_ONLY}
    values = {"engine": spec.engine, **vars(spec.parallelism), **training, **spec.environment}
    told = {"graphs": spec.cuda_graph.label, **{name: str(value) for name, value in values.items()}}
    return told | {"warmup_steps": str(spec.cuda_graph.warmup_steps)}


def _front(points: Sequence[Point]) -> set[Point]:
    """Return the Pareto front: points that no other point dominates."""
    front: list[Point] = []
    for point in sorted(set(points)):  # what comes later is no faster, and dominates none before it
        if not any(peak <= point[1] and ranks <= point[2] for _, peak, ranks in front):
            front.append(point)
    return set(front)
