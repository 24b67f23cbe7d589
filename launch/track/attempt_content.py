"""The content of an attempt for trackers: its settings, a row for each step, and a summary."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch.common.typed_json import from_json
from launch.contract.outcomes import Outcome, read_outcome
from launch.contract.paths import AttemptPaths
from launch.contract.records.events import read_events
from launch.contract.records.memory import Memory
from launch.contract.records.step_check import StepCheck
from launch.contract.spec import RunSpec, spec_to_json

TIMED_PHASES = ("settle", "measure")
GIB = 1 << 30


def run_config(spec: RunSpec, attempt: AttemptPaths) -> dict[str, Any]:
    """Return the resolved spec, and the ids to group and filter by."""
    names = {"workload_id": spec.workload_id, "task_id": spec.task_id}
    return spec_to_json(spec) | names | {"run_id": attempt.run_id, "attempt": attempt.number}


def step_row(step: Mapping[str, Any], ranks: int, flops: float) -> dict[str, Any]:
    """Return the row for a line of metrics.jsonl. ``flops`` are the model's FLOPs per step on all GPUs, or 0 if unknown.

    Only timed steps have ``step_time_ms``. The capture takes a thousand times as long and would flatten the curve.
    """
    row = dict(step)
    milliseconds = row.pop("step_time_ms")
    if step["phase"] not in TIMED_PHASES:
        return row | {f"{step['phase']}_step_time_ms": milliseconds}
    rank_seconds = milliseconds / 1e3 * ranks if milliseconds > 0 else math.nan
    row |= {"step_time_ms": milliseconds, "tokens_per_second_per_rank": step["tokens"] / rank_seconds}
    return row | {"model_tflops_per_second_per_gpu": flops / rank_seconds / 1e12} if flops else row


def run_summary(attempt: AttemptPaths, spec: RunSpec, measured_ms: Sequence[float]) -> dict[str, Any]:
    """Return the summary of ``attempt``: outcome, times, memory by phase, graphs and step checks, as far as known."""
    events = [event for rank in range(spec.parallelism.world_size) for event in _events(attempt, rank)]
    checks = [from_json(StepCheck, event["check"]) for event in events if event["kind"] == "step_check"]
    return (
        _ending(read_outcome(attempt))
        | median_step_time(measured_ms)
        | _memory(events)
        | _graphs(events)
        | check_summary(checks)
    )


def _events(attempt: AttemptPaths, rank: int) -> Iterator[dict[str, Any]]:
    try:
        yield from read_events(attempt, rank)
    except FileNotFoundError:
        return


def _ending(outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return {}
    return {"outcome": outcome.outcome, "phase": outcome.phase, "failure_class": outcome.failure_class}


def median_step_time(measured_ms: Sequence[float]) -> dict[str, float]:
    if not measured_ms:
        return {}
    # A median with NaNs is undefined, because sorting depends on their positions.
    finite = all(map(math.isfinite, measured_ms))
    return {"median_step_time_ms": statistics.median(measured_ms) if finite else math.nan}


def _memory(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the peak of the fullest rank in each phase, in GiB, on its device or, without one, on its host."""
    peaks: dict[str, float] = {}
    for event in events:
        if event["kind"] == "phase" and event["memory"]:
            name = f"peak_memory_gib/{event['phase']}"
            peaks[name] = max(peaks.get(name, 0.0), _peak_bytes(from_json(Memory, event["memory"])) / GIB)
    return peaks


def _peak_bytes(memory: Memory) -> int:
    if memory.peak_reserved is None:
        return memory.host_peak_rss
    return memory.peak_reserved + (memory.device_outside or 0)


def _graphs(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the graphs of a rank and their replays, and the seconds of the longest capture."""
    stats = [event["graphs"] for event in events if event["kind"] == "proof"]
    if not stats or not stats[0]["graphs"]:
        return {}
    seconds = max(rank["capture_seconds"] for rank in stats)
    return {"graphs": stats[0]["graphs"], "replays": stats[0]["replays"], "capture_seconds": seconds}


def check_summary(checks: Sequence[StepCheck]) -> dict[str, Any]:
    """Return the number of step checks on all ranks, their faults, and the largest difference in units of its noise.

    Leave the largest difference out if the noise of one check is unknown.
    """
    done = [check for check in checks if not check.missing]
    if not checks:
        return {}
    rows = [row for check in done for row in check.rows]
    summary = {"step_checks": len(done), "step_check_faults": sum(row.is_fault for row in rows)}
    if any(check.lacks_noise for check in done):
        return summary
    return summary | {"step_check_largest_difference": max((row.in_noise for row in rows), default=0.0)}
