"""Whether cells fit: what graphs do to that, peaks by phase, what graphs hold, and what is left."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.memory.peaks import KIND_WORDS
from analysis.memory.static_memory import state_bytes
from analysis.report.sections.tables import table
from analysis.sweep.cell_results import CellResult
from analysis.sweep.fit_matrix import OutcomeMatrix, outcome_matrix, states_of
from launch.common.text import size
from launch.contract.records.events import Phase

NAMED = 3
PHASES: tuple[Phase, ...] = ("build", "warmup", "capture", "settle", "measure")
HOW = (
    "The most of ranks and repeats, in {kind}, at its peak in each phase; above eager is what a graphed run holds beyond its "
    "eager twin at the end of phase measure."
)
HOW_GPU = (
    "Forecast is what weights, gradients and optimizer state take of the fullest rank by the recipe; all else comes on top. "
    "The graph pool is what the allocator holds for graphs; outside it are graph executables, communicators and the "
    "context; both at the end of phase measure. Headroom is what the smallest GPU has beyond the peak of training."
)


def memories(results: Sequence[CellResult], shown: Sequence[CellResult]) -> list[str]:
    """The matrix is of all ``results``, the table of the cells ``shown``."""
    matrix = outcome_matrix(results)
    rows = [result for result in shown if result.memory]
    if not matrix.labels and not rows:
        return []
    return ["## Memory", *_matrix(matrix), *_table(rows)]


def _matrix(matrix: OutcomeMatrix) -> list[str]:
    if not matrix.labels:
        return []
    header = ["eager twin / graphed cell", *matrix.graphed]
    rows = [
        [before, *(_named(matrix.labels.get((before, after), ())) for after in matrix.graphed)]
        for before in matrix.eager
    ]
    return [table(header, rows)]


def _named(labels: Sequence[str]) -> str:
    if not labels:
        return "-"
    rest = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
    return f"{len(labels)}: " + ", ".join(f"`{label}`" for label in labels[:NAMED]) + rest


def _table(rows: Sequence[CellResult]) -> list[str]:
    if not rows:
        return []
    on_gpu = any(result.on_gpu for result in rows)
    own = ["graph pool", "outside", "headroom"]
    header = ["cell", "ended", *(["forecast"] if on_gpu else []), *PHASES, "above eager", *(own if on_gpu else [])]
    kinds = " or ".join(sorted({KIND_WORDS[result.memory.kind] for result in rows if result.memory}))
    how = [HOW.format(kind=kinds), *([HOW_GPU] if on_gpu else [])]
    return [table(header, (_row(result, on_gpu) for result in rows)), " ".join(how)]


def _row(result: CellResult, on_gpu: bool) -> list[str]:
    memory = result.memory
    assert memory is not None  # rows are of cells that have it
    phases = {phase.phase: phase for phase in memory.phases}
    row = [f"`{result.cell.label}`", states_of(result), *([size(state_bytes(result.spec))] if on_gpu else [])]
    row += [_bytes(phases[phase].peak) if phase in phases else "-" for phase in PHASES]
    row += [_bytes(memory.added, signed=True)]
    if not on_gpu:
        return row
    measure = phases.get("measure")
    held = (measure.graph_pool, measure.device_outside) if measure else (None, None)
    return [*row, *map(_bytes, held), _headroom(memory.headroom, memory.device_total)]


def _headroom(headroom: int | None, total: int | None) -> str:
    if headroom is None or total is None:
        return "-"
    return f"{size(headroom)} of {size(total)} ({headroom / total:.0%})"


def _bytes(value: int | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return ("+" if signed and value >= 0 else "") + size(value)
