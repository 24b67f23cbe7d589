"""Group the failures of a sweep's runs by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.records.run import attempts_of
from analysis.sweep.cell_results import CellResult
from launch.common.grouped import grouped
from launch.contract.outcomes import Outcome


@dataclass(frozen=True)
class FailureMode:
    """One kind of failure. ``name`` is its failure class.

    ``ending`` says how it ended, such as "CUDA_OOM in capture". ``graphed`` and ``eager`` are the labels of the affected cells.
    ``message`` and ``remedy`` are those of the first cell.
    """

    name: str
    ending: str
    message: str
    remedy: str
    graphed: tuple[str, ...]
    eager: tuple[str, ...]


def failure_modes(results: Sequence[CellResult]) -> tuple[FailureMode, ...]:
    """Return the failures of runs, the most frequent first. Equally frequent ones keep the plan's order."""
    failed = grouped((key, (result, outcome)) for result in results for key, outcome in _failures(result).items())
    return tuple(_mode(key, found) for key, found in sorted(failed.items(), key=lambda item: -len(item[1])))


def _failures(result: CellResult) -> dict[tuple[str, str], Outcome]:
    """Return one outcome of each kind, so a cell that fails in the same way in several repeats counts once."""
    outcomes: dict[tuple[str, str], Outcome] = {}
    for attempt in attempts_of(result.runs):
        if not (outcome := attempt.outcome).results_intact:
            outcomes.setdefault(kind_of(outcome), outcome)
    return outcomes


def kind_of(outcome: Outcome) -> tuple[str, str]:
    """Return the name and the ending of the failure mode of ``outcome``."""
    return outcome.failure_class or outcome.outcome, f"{outcome.outcome} in {outcome.phase}"


def _mode(key: tuple[str, str], found: Sequence[tuple[CellResult, Outcome]]) -> FailureMode:
    first = found[0][1]
    eager, graphed = (
        tuple(result.cell.label for result, _ in found if result.cell.graphed == side) for side in (False, True)
    )
    return FailureMode(*key, first.message, first.remedy, graphed, eager)
