"""The events that a rank records during a run: events/rank<r>.jsonl.

Every event has time (seconds since the epoch), kind, phase and step. The kinds are "enter" (a phase begins; the first also
has the rank's pid and the identity of launch.contract.records.identity), "phase" (a phase ended: memory, clocks, seconds),
"choices" (what the engine chose), "imports" (ImportedModule by name, as modules: of rank 0, without installed packages,
before the first step and after the last), "capture" and "proof" (GraphStats), "parameters" (digest: of the rank's parameters
before the first step after the capture, and after the last step; and then ChangedTensor of each, as sketches), "other_state" (StateChanges as changes: the buffers, and the
parameters that no optimizer steps, that a user's program has changed after its second step from the capture on, and what it
has not changed since the middle of the run), "gradients" (StepSketch), "announced" (a user's program announces its first
step: the rank's sketches and digests before it do not count, because their steps were counted otherwise), "step_check"
(StepCheck), "probe" (Probe, Kernels and Launches, as probe, kernels and launches), "inspection" (Inspection), "rates" (GpuRates), "note" (message) and
"exception" (type, message, traceback).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from launch.common.atomic_files import read_json_lines
from launch.contract.paths import AttemptPaths

Phase = Literal["init", "build", "warmup", "capture", "settle", "measure", "probe", "teardown"]
StepPhase = Phase | Literal["check"]
"""The phase of a step. Steps that a step check, sketches or a digest may slow down have phase "check", while the rank stays in
"measure"."""
PHASES: tuple[Phase, ...] = get_args(Phase)
BEFORE_CAPTURE: tuple[Phase, ...] = ("init", "build", "warmup")
"""The phases that the eager baseline has too."""
SETTLE_STEPS = 2
"""Steps excluded from the measured window after a capture, or after the warm-up of an eager run."""


def read_events(attempt: AttemptPaths, rank: int) -> Iterator[dict[str, Any]]:
    return read_json_lines(attempt.events(rank), attempt.read)
