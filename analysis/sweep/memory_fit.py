"""Say whether a cell's runs fit into memory.

The phase distinguishes out-of-memory errors. Before the capture a graphed run is eager. At the capture graphs allocate their
memory. During replay they keep it.
"""

from __future__ import annotations

from collections import Counter

from analysis.records.run import Run
from analysis.sweep.cell_results import CellResult
from launch.contract.records.events import BEFORE_CAPTURE

FITS, NOT_ENDED = "fits", "not ended"
EAGER_OOM, BEFORE, AT_CAPTURE, AT_REPLAY, HOST_OOM = (
    "OOM", "OOM before capture", "OOM at capture", "OOM at replay", "host OOM",
)  # fmt: skip
STATES = (FITS, NOT_ENDED, HOST_OOM, AT_REPLAY, AT_CAPTURE, BEFORE, EAGER_OOM)
"""States in order of rising severity for memory. All other outcomes rank just before ``HOST_OOM``."""


def state_of(result: CellResult) -> str:
    """Return the state of the cell's runs, or the most severe one for memory if they differ."""
    return max((_state(run, result.cell.graphed) for run in result.runs), key=_weight, default=NOT_ENDED)


def states_of(result: CellResult) -> str:
    """Describe the state. If runs differ, add how many have it: "OOM at capture (1 of 2 runs)"."""
    counts = Counter(_state(run, result.cell.graphed) for run in result.runs)
    state = state_of(result)
    return state if len(counts) < 2 else f"{state} ({counts[state]} of {len(result.runs)} runs)"


def _state(run: Run, graphed: bool) -> str:
    if run.attempt is None:
        return NOT_ENDED
    outcome = run.attempt.outcome
    if outcome.results_intact:
        return FITS
    if outcome.row.memory == "host":
        return HOST_OOM
    if outcome.row.memory != "gpu":
        return outcome.outcome
    if not graphed:
        return EAGER_OOM
    if outcome.phase in BEFORE_CAPTURE:
        return BEFORE
    return AT_CAPTURE if outcome.phase == "capture" else AT_REPLAY


def _weight(state: str) -> float:
    return STATES.index(state) if state in STATES else STATES.index(HOST_OOM) - 0.5
