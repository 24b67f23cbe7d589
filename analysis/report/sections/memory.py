"""Memory: which cells fit, peaks by phase, the graph pool and the headroom."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.memory.forecast import forecast
from analysis.memory.peaks import KIND_WORDS, CellMemory
from analysis.memory.static_memory import state_bytes
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import how_to_read, table
from analysis.sweep.cell_results import CellResult
from analysis.sweep.memory_fit import states_of
from launch.common.text import size
from launch.contract.records.events import Phase

PHASES: tuple[Phase, ...] = ("build", "warmup", "capture", "settle", "measure")
HOST_PHASES: tuple[Phase, ...] = ("init", *PHASES)
"""On a CPU, imports may hold more memory than training does later."""
NOTES = (
    "Columns up to measure: the peak of each phase, the maximum over ranks and repeats, in {kind}. Build makes the model, "
    "warmup runs eager steps, settle runs the untimed steps after the capture, and measure runs the timed steps.",
    "Held above eager: memory that the graphed run holds at the end of phase measure, minus that of the eager run. The "
    "table has the maximum over ranks and repeats. Unlike a peak, it excludes memory that was freed before.",
)
NOTES_GPU = (
    "Headroom: the memory of the smallest GPU minus the peak of training.",
    "State, activations, graph pool, outside: the parts of the peak of phase measure on the fullest rank.",
    "State: weights, gradients and optimizer state, computed from the recipe. For a user's program it is unknown and counts as "
    "activations.",
    "Graph pool: the allocator's memory for graphs, including captured activations.",
    "Outside: memory outside the allocator, such as graph executables, communicators and the CUDA context.",
    "Activations: the rest, including workspaces and blocks that the allocator keeps unused.",
)
NOTE_FORECAST = "Forecast: the peak of a phase on the fullest rank, computed from the recipe alone (docs/memory.md), next to the measured peak."
FORECAST_PHASES: tuple[Phase, ...] = ("warmup", "capture", "measure")
PARTS = ("state", "activations", "graph pool", "outside", "peak of measure")


def render(report: ReportData) -> list[str]:
    blocks = [*_peaks(report.shown), *_shared(report.shown)]
    return ["## Memory", *blocks] if blocks else []


def _peaks(shown: Sequence[CellResult]) -> list[str]:
    cells = [(result, result.memory) for result in shown if result.memory]
    if not cells:
        return []
    on_gpu = any(result.on_gpu for result, _ in cells)
    columns = PHASES if on_gpu else HOST_PHASES
    header = ["cell", "ended", *columns, "held above eager", *(["headroom"] if on_gpu else [])]
    kind = " or ".join(sorted({KIND_WORDS[memory.kind] for _, memory in cells}))
    rows = [_row(result, memory, columns, on_gpu) for result, memory in cells]
    parts = [table(("cell", *PARTS), [_parts(result, memory) for result, memory in cells])] if on_gpu else []
    forecasts = [row for result, memory in cells if (row := _forecasts(result, memory))]
    about = [note.format(kind=kind) for note in NOTES]
    notes = [*about, *(NOTES_GPU if on_gpu else []), *([NOTE_FORECAST] if forecasts else [])]
    head = ["cell", *(f"{phase}{what}" for phase in FORECAST_PHASES for what in ("", ", forecast"))]
    return [table(header, rows), *parts, *([table(head, forecasts)] if forecasts else []), *how_to_read(*notes)]


def _shared(shown: Sequence[CellResult]) -> list[str]:
    """Return the runs that no table of memory counts."""
    lines = [
        f"- {result.name}: {run_id} does not count, because other processes held {size(held)} of one of its GPUs when it began."
        for result in shown
        for run_id, held in result.foreign_memory.items()
    ]
    return ["\n".join(lines)] if lines else []


def _row(result: CellResult, memory: CellMemory, columns: Sequence[Phase], on_gpu: bool) -> list[str]:
    phases = {phase.phase: phase for phase in memory.phases}
    peaks = [_bytes(phases[phase].peak) if phase in phases else "-" for phase in columns]
    row = [result.name, states_of(result), *peaks, _bytes(memory.added, signed=True)]
    return [*row, _headroom(memory.headroom, memory.device_total)] if on_gpu else row


def _parts(result: CellResult, memory: CellMemory) -> list[str]:
    """Return the parts of the peak. For a cell that never reached phase measure, only the state is known."""
    state, parts = _bytes(state_bytes(result.spec) or None), memory.parts
    if parts is None:
        return [result.name, state, *["-"] * (len(PARTS) - 1)]
    return [result.name, state, *map(_bytes, (parts.activations, parts.graph_pool, parts.outside, parts.total))]


def _forecasts(result: CellResult, memory: CellMemory) -> list[str]:
    """Return the measured and the forecast peak of each phase; nothing where there is no forecast."""
    measured, ranks = {phase.phase: phase.peak for phase in memory.phases}, forecast(result.spec)
    if not ranks:
        return []
    row = [result.name]
    for phase in FORECAST_PHASES:
        expected = max((rank.device(phase) for rank in ranks if phase in rank.phases), default=None)
        row += [_bytes(measured.get(phase)), _bytes(expected)]
    return row


def _headroom(headroom: int | None, total: int | None) -> str:
    if headroom is None or total is None:
        return "-"
    return f"{size(headroom)} of {size(total)} ({headroom / total:.0%})"


def _bytes(value: int | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return ("+" if signed and value >= 0 else "") + size(value)
