"""Rank the cells of a task, fastest first: layouts, dispatchers, engines and graph configurations.

Cells of one task compute the same model. They need not share an allocation, so the order is by absolute step time. The order of
two cells of different workloads is undecided if a difference between allocations may explain it. The ranking has eager
cells that ended well and graphed cells that pass, if they train the same model as the task's first cell
(analysis/sweep/loss_trajectory.py). It lists the other cells with the reason.

The Pareto front has each cell that no other cell dominates in step time, peak memory per rank and number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from analysis.limits.throttling import Throttling, least_beside
from analysis.records.provenance import differing_fields
from analysis.records.run import attempts_of
from analysis.speed.confidence_interval import MINIMUM_PAIRS, Correction, EvenSplit, families, interval_of
from analysis.speed.pair_speed import PairSpeed, pair_of_graphed
from analysis.speed.ratios import ratios_of
from analysis.speed.speed_verdict import BAND, SpeedVerdict, classify
from analysis.speed.step_time import StepTime
from analysis.sweep.cell_results import CellResult
from analysis.sweep.labels import task_words
from analysis.sweep.loss_trajectory import describe_divergence
from launch.common.grouped import grouped
from launch.common.text import count
from launch.contract.model_flops import model_flops, tokens_per_step
from launch.contract.spec import Device, RunSpec

ALLOCATION_ALLOWANCE = 0.05
"""The relative difference of step times that another allocation may cause, by other hosts, clocks, temperatures and network
neighbours. A workload usually has one allocation, so a sweep cannot estimate this difference."""

Order = Literal["best", "slower", "equal", "undecided"]
"""A cell against the first of its ranking: "equal" if their ratio is NEUTRAL."""

Point = tuple[float, float, int]
"""Step time in milliseconds, peak memory in bytes (infinite if unknown), and number of ranks."""


@dataclass(frozen=True)
class Ranked:
    """A cell that users may choose."""

    label: str
    ranks: int
    nodes: int
    memory_per_rank: int | None
    """Peak memory in bytes of the rank with the highest peak; None if unknown."""
    on_pareto_front: bool
    against_best: Order
    """Whether this cell is certainly slower than the first.

    Cells of one workload are compared by their pairs. In other cases both cells need two runs, and every run of the first cell
    must be faster than every run of this one by more than ``ALLOCATION_ALLOWANCE``.
    """
    step: StepTime
    tokens_per_second_per_rank: float
    tflops: float
    """Model TFLOP/s per rank (launch/contract/model_flops.py)."""


@dataclass(frozen=True)
class Ranking:
    """The ranking of one task, fastest first.

    ``machines`` lists the fields of the environment in which the ranked runs differ. ``not_ranked`` has the label and the
    reason of each cell that is not ranked.
    """

    task_id: str
    name: str
    """Model, batch and precision."""
    device: Device
    allocations: int
    machines: tuple[str, ...]
    not_ranked: tuple[tuple[str, str], ...]
    cells: tuple[Ranked, ...]

    @property
    def best(self) -> Ranked:
        return self.cells[0]

    def against_best(self, order: Order) -> tuple[Ranked, ...]:
        """Return the cells that have this order."""
        return tuple(cell for cell in self.cells if cell.against_best == order)

    @property
    def not_slower(self) -> str:
        """Describe in words the cells that are not certainly slower than the first; "" if there are none."""
        equal, undecided = len(self.against_best("equal")), len(self.against_best("undecided"))
        as_fast = f"{count('other', equal)} {'is' if equal == 1 else 'are'} within {BAND:.0%}" if equal else ""
        return ", ".join(filter(None, (as_fast, f"{count('other', undecided)} may be as fast" if undecided else "")))

    @property
    def most_of_a_rank(self) -> Ranked:
        """The cell with the most tokens per second per rank."""
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
    """Return the eligible cells whose loss trajectory differs from the first cell of their task, with the reason."""
    reasons = (
        (result, _loss_divergence(result, cells))
        for cells in _tasks(results).values()
        for result in cells
        if not _exclusion(result)
    )
    return tuple((result, reason) for result, reason in reasons if reason)


def _tasks(results: Sequence[CellResult]) -> dict[tuple[str, Device], list[CellResult]]:
    ran = (result for result in results if result.cell.state == "run")
    return grouped(((result.cell.task_id, result.spec.placement.device), result) for result in ran)


def _ranking(task_id: str, device: Device, results: Sequence[CellResult]) -> Ranking | None:
    reasons = [_exclusion(result) or _loss_divergence(result, results) for result in results]
    candidates = [
        _Candidate(result, result.speed.step_time, result.spec)
        for result, reason in zip(results, reasons, strict=True)
        if result.speed.step_time and not reason
    ]
    if len(candidates) < 2:
        return None
    candidates.sort(key=lambda candidate: candidate.step.milliseconds)
    front = _front([candidate.point for candidate in candidates])
    neighbours = _compare_graphed(candidates[0].result, [candidate.result for candidate in candidates[1:]])
    orders: list[Order] = ["best", *(_order(candidates[0], candidate, neighbours) for candidate in candidates[1:])]
    cells = tuple(_ranked(each, front, order) for each, order in zip(candidates, orders, strict=True))
    environments = {id(a.environment): a.environment for c in candidates for a in attempts_of(c.result.runs)}
    return Ranking(
        task_id,
        task_words(candidates[0].spec),
        device,
        len({allocation for candidate in candidates for allocation in candidate.step.allocations}),
        differing_fields(list(environments.values())),
        tuple((result.cell.label, reason) for result, reason in zip(results, reasons, strict=True) if reason),
        cells,
    )


def _exclusion(result: CellResult) -> str:
    """Return why the cell is not eligible for the ranking; "" if it is."""
    if result.integrity.unsound_records:
        return "records unsound"
    if result.unfinished or any(run.attempt and not run.attempt.outcome.results_intact for run in result.runs):
        return result.outcome
    if result.cell.graphed and not result.passes:
        return result.verdict.verdict if result.verdict else "no verdict"
    speed = result.speed
    if speed.timing_doubt:
        return speed.timing_doubt
    if speed.throttling and speed.throttling.own.slowed:
        return f"its GPUs were slowed down by {speed.throttling.own.slowed}"
    return "" if speed.step_time else "no step was timed"


def _loss_divergence(result: CellResult, task: Sequence[CellResult]) -> str:
    """Describe how the loss differs from the loss of the first eligible cell of ``task``; return "" if it does not."""
    first = next((other for other in task if other.loss.trajectory and not _exclusion(other)), result)
    if not (result.loss.trajectory and first.loss.trajectory):
        return ""
    difference = describe_divergence(result.loss.trajectory, first.loss.trajectory)
    return f"losses unlike those of {first.name or first.cell.label}: {difference}" if difference else ""


def _ranked(candidate: _Candidate, front: set[Point], order: Order) -> Ranked:
    spec, step = candidate.spec, candidate.step
    ranks = spec.parallelism.world_size
    return Ranked(
        label=candidate.result.cell.label,
        ranks=ranks,
        nodes=spec.placement.nodes,
        memory_per_rank=candidate.result.memory.peak if candidate.result.memory else None,
        on_pareto_front=candidate.point in front,
        against_best=order,
        step=step,
        tokens_per_second_per_rank=tokens_per_step(spec) / ranks / step.milliseconds * 1e3,
        tflops=model_flops(spec) / ranks / step.milliseconds / 1e9,
    )


def _order(first: _Candidate, other: _Candidate, graphed: Mapping[str, Order]) -> Order:
    """Return the order of ``other`` against the ``first`` cell.

    Compare cells of one workload by their pairs, and other cells by absolute step times. ``graphed`` has the orders of graphed
    cells that have pairs with the first.
    """
    fast, slow = first.result, other.result
    if fast.cell.workload_id == slow.cell.workload_id and fast.cell.graphed != slow.cell.graphed:
        speed = fast.speed.speedup or slow.speed.speedup
        return _order_of(speed.verdict, "FASTER" if fast.cell.graphed else "SLOWER") if speed else "undecided"
    if fast.cell.workload_id == slow.cell.workload_id:
        return graphed.get(slow.cell.cell_id, "undecided")
    least = least_beside(fast.speed.throttling, slow.speed.throttling)
    separated = other.step.low * least > first.step.high * (1 + ALLOCATION_ALLOWANCE)
    return "slower" if min(first.step.runs, other.step.runs) > 1 and separated else "undecided"


def _order_of(verdict: SpeedVerdict, slower: SpeedVerdict) -> Order:
    return "slower" if verdict == slower else "equal" if verdict == "NEUTRAL" else "undecided"


def _compare_graphed(fast: CellResult, others: Sequence[CellResult]) -> dict[str, Order]:
    """Return the orders, by cell id, of graphed cells of the same workload against the graphed cell ``fast``.

    Compare runs of the same repeat and allocation. Any of these cells could have been the fastest, so all comparisons of two
    cells form one family of tests.
    """
    neighbours = {o.cell.cell_id: o for o in others if o.cell.workload_id == fast.cell.workload_id and o.cell.graphed}
    pairs = {cell_id: _pair_by_repeat(fast, other) for cell_id, other in neighbours.items() if fast.cell.graphed}
    tested = {cell_id: each for cell_id, each in pairs.items() if len(each) >= MINIMUM_PAIRS}
    comparisons = len(tested) * (len(tested) + 1) // 2
    corrections: Sequence[Correction] = families(
        [(fast.cell.cell_id, ratios_of(each)) for each in tested.values()], comparisons
    )
    if fast.looks:
        corrections = [EvenSplit(comparisons, len(fast.looks))] * len(tested)
    return {
        cell_id: _order_by_pairs(each, family, fast.speed.throttling, neighbours[cell_id].speed.throttling)
        for (cell_id, each), family in zip(tested.items(), corrections, strict=True)
    }


def _order_by_pairs(
    pairs: Sequence[PairSpeed], family: Correction, fast: Throttling | None, slow: Throttling | None
) -> Order:
    """Return the order by the ratios of ``pairs``. It must hold even if throttling explains as much of the difference as it
    can."""
    interval, least = interval_of(ratios_of(pairs), family), least_beside(fast, slow)
    order = _order_of(classify(pairs, family)[0], "FASTER")
    if order == "slower":
        return order if interval is not None and interval[0] * least > 1 else "undecided"
    return order if least == least_beside(slow, fast) == 1 else "undecided"


def _pair_by_repeat(fast: CellResult, slow: CellResult) -> list[PairSpeed]:
    """Return the speed of ``fast`` relative to ``slow``, for each repeat that both ran in the same allocation."""
    faster, slower = ({pair.repeat: pair.speed for pair in cell.pairs if pair.speed.ratio} for cell in (fast, slow))
    repeats = sorted(
        repeat for repeat in faster if repeat in slower and faster[repeat].allocation == slower[repeat].allocation
    )
    return [pair_of_graphed(slower[repeat], faster[repeat]) for repeat in repeats]


def _front(points: Sequence[Point]) -> set[Point]:
    """Return the Pareto front, the points that no other point dominates."""
    front: list[Point] = []
    # Points are sorted by step time, so a later point never dominates an earlier one.
    for point in sorted(set(points)):
        if not any(peak <= point[1] and ranks <= point[2] for _, peak, ranks in front):
            front.append(point)
    return set(front)
