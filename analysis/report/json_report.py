"""The content of report.json.

    {"format": 1, "sweep": name, "recipe_file": name,
     "exit_code": 0 | 2 | 3 | 4,
     "summary": {"text", "verdicts": {word: cells}, "cells": {state: cells}, "unexpected": cells, "unfinished_runs"},
     "margins": {"loss": nats, "grad_norm": relative},
     "cells": [one object a cell of the plan that ran or was to run, in the plan's order:
        {"cell_id", "label", "workload_id", "task_id", "impl", "scope", "effective_scope", "device",
         "expect": {"outcome", "phase"}, "outcome", "unexpected", "unsound": [text], "retried": [text], "unfinished",
         "verdict": null | VERDICT, "max_loss_difference", "floor": null | FLOOR,
         "memory": null | {"kind": "device" | "host", "peak", "added", "device_total", "headroom", "whole",
                           "phases": [...]}   (bytes),
         "state_forecast": bytes of the fullest rank's weights, gradients and optimizer state,
         "straggler": null | {"rank", "what": "computing" | "host", "milliseconds", "others_ms", "throttled"},
         "throttling": null | {"own": THROTTLED, "eager": null | THROTTLED},
         "speed": null | {"word", "ratio", "low", "high", "own_low", "own_high", "pairs", "steps", "left_out", "settling",
                          "off_counts", "break_even_steps", "reason", and on a GPU "eager_ms", "graphed_ms",
                          "eager_tokens_per_second", "graphed_tokens_per_second", "eager_tflops", "graphed_tflops"};
                          the word is null of a cell that does not pass, the bounds of one pair, of a step that cannot have
                          been so short, and where throttling leaves none,
         "replay": null | {"proven", "reason", "ranks", "stats": GraphStats, and on a GPU "bare_ranks", "launches_seen"},
         and of a graphed cell on a GPU
         "captured": null | {"graphs", "seconds"},
         "limit": {"reason", "eager": null | {"step_ms", "busy_ms", "computing_ms", "host_ms": null | ms, "kernels", "communicates"},
                   "graphed": null | {"step_ms", "host_ms": null | ms, "kernels", "graph_launches", "computing_ms", "busy_ms"},
                   "doubt", "eager_doubt",
                   "launch_bound", "not_computing", "largest_speedup", "largest_speedup_computing", "times_busy",
                   "times_computing", "attained", "attained_computing", "bound": null |
                   analysis.limits.speedup_bound.Bound};
                  the largest speed-up, times busy and attained that count communication are null where ranks communicate,
         "runs": [{"run_id", "repeat", "attempt", "attempts_begun", "status", "outcome": null | Outcome, "problems"}],
         "pairs": [{"repeat", "eager_run", "graphed_run", "verdict": VERDICT, "ratio", "ratio_steps", "ratio_reason",
                    "replay", "environment_differences"}]}],
     "not_run": [{"cell_id", "label", "workload_id", "state", "reasons": [{"rule", "message", "remedy", "source"}]}],
     "tasks": [[{"label", "first_loss", "last_loss", "steps", "loss_difference", "loss_step", "grad_norm_difference"}]],
     and the tables of analysis/report/json_tables.py: "rankings", "fits", "metric_changes", "memory_risks",
     "failure_modes", "plots": {"drawn": {workload: [files]}, "left_out_workloads": [...], "left_out_cells": [...]},
     "notes": {message: runs}, "provenance": {key: [[value, runs], ...]}, "recipe": YAML}

VERDICT is {"word", "reason", "remedy", "evidence": null | {...}, "deviation": null | {"step", "metric", "size"}} with
the fields of analysis.verdict.verdict.Verdict; FLOOR is {"repeats", "loss", "grad_norm"}; THROTTLED is {"most":
{reason: [share, rank]}, "seen": [reason], "unknown": [text], "power_limits": [watts], "sm_mhz": null | [lowest,
highest], "slowed"}. NaN and the infinities are strings.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from analysis.graphs.replay_check import Replay
from analysis.limits.speedup_bound import SpeedupBound
from analysis.limits.throttling import Throttling
from analysis.memory.peaks import CellMemory
from analysis.memory.static_memory import state_bytes
from analysis.pairing.pair import PairResult
from analysis.records.provenance import provenance
from analysis.records.run import Run, attempts_of
from analysis.report.json_tables import tables_of
from analysis.report.selection import Selection
from analysis.report.summary import Summary
from analysis.sweep.cell_results import CellResult
from analysis.sweep.task_agreement import Trained
from launch.contract.plan import Plan

FORMAT = 1
ABSOLUTE = tuple(f"{side}_{what}" for side in ("eager", "graphed") for what in ("ms", "tokens_per_second", "tflops"))


def content_of(
    plan: Plan,
    results: Sequence[CellResult],
    summary: Summary,
    selection: Selection,
    trained: Sequence[Sequence[Trained]],
    files: dict[str, list[str]],
) -> dict[str, Any]:
    """report.json as plain values, "cells" and "not_run" as iterators, for there may be many. ``files`` are the plots
    drawn, by workload."""
    attempts = attempts_of(run for result in results for run in result.runs)
    return {
        "format": FORMAT,
        "sweep": plan.name,
        "recipe_file": plan.recipe_file,
        "exit_code": summary.exit_code,
        "summary": _summary(summary),
        "margins": dataclasses.asdict(plan.margins),
        "cells": (_cell(result) for result in results if result.cell.state == "run"),
        "not_run": (_not_run(result) for result in results if result.cell.state != "run"),
        "tasks": [[dataclasses.asdict(cell) for cell in task] for task in trained],
        **tables_of(results),
        "plots": {
            "drawn": files,
            "left_out_workloads": list(selection.left_out_workloads),
            "left_out_cells": list(selection.left_out_cells),
        },
        "notes": dict(sorted(Counter(note for a in attempts for note in sorted(set(a.notes))).items())),
        "provenance": provenance([attempt.environment for attempt in attempts]),
        "recipe": plan.recipe,
    }


def summary_of(plan: Plan, results: Sequence[CellResult], summary: Summary, selection: Selection) -> dict[str, Any]:
    """summary.json: of report.json what a terminal shows, short however large the sweep is."""
    cells = [_cell(result) for result in selection.shown]
    return {
        "format": FORMAT,
        "sweep": plan.name,
        "exit_code": summary.exit_code,
        "summary": _summary(summary),
        "cells_in_all": sum(result.cell.state == "run" for result in results),
        "cells": [{key: value for key, value in cell.items() if key not in ("runs", "pairs")} for cell in cells],
    }


def _summary(summary: Summary) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(summary).items() if key != "exit_code"}


def _cell(result: CellResult) -> dict[str, Any]:
    cell, graph, speed, graphs = result.cell, result.spec.cuda_graph, result.speed, result.graphs
    return {
        "cell_id": cell.cell_id,
        "label": cell.label,
        "workload_id": cell.workload_id,
        "task_id": cell.task_id,
        "impl": graph.impl,
        "scope": graph.scope,
        "effective_scope": graphs.replay.stats.effective_scope if graphs.replay else None,
        "device": result.spec.placement.device,
        "expect": dataclasses.asdict(cell.expect),
        "outcome": result.outcome,
        "unexpected": result.unexpected,
        "unsound": result.integrity.unsound_records,
        "retried": result.integrity.flaky_attempts,
        "unfinished": result.unfinished,
        "verdict": _fields(result.verdict),
        "max_loss_difference": result.max_loss_difference,
        "floor": _fields(result.loss.noise_floor),
        "memory": _memory(result.memory),
        "state_forecast": state_bytes(result.spec),
        "straggler": _fields(speed.straggler),
        "throttling": _throttling(speed.throttling),
        "speed": _speed(result),
        "replay": _replay(graphs.replay, result.on_gpu),
        **({"captured": _fields(graphs.capture_cost), "limit": _limit(speed.bound)} if speed.bound else {}),
        "runs": [_run(run) for run in result.runs],
        "pairs": [_pair(pair) for pair in result.pairs],
    }


def _fields(value: Any) -> Any:
    return None if value is None else dataclasses.asdict(value)


def _memory(memory: CellMemory | None) -> Any:
    return None if memory is None else {**_fields(memory), "peak": memory.peak, "headroom": memory.headroom}


def _throttling(throttling: Throttling | None) -> Any:
    sides = {name: getattr(throttling, name, None) for name in ("own", "eager")}
    return throttling and {name: side and {**_fields(side), "slowed": side.slowed} for name, side in sides.items()}


def _speed(result: CellResult) -> Any:
    """Absolute figures are left out on a CPU, where they mean nothing, and the word of a cell that does not pass."""
    if result.speed.speedup is None:
        return None
    told = {key: value for key, value in _fields(result.speed.speedup).items() if result.on_gpu or key not in ABSOLUTE}
    return told if result.verdict and result.verdict.passes else {**told, "word": None}


def _replay(replay: Replay | None, on_gpu: bool) -> Any:
    """Launches are of CUDA graphs, and left out on a CPU."""
    if replay is None or on_gpu:
        return _fields(replay)
    content = _fields(replay)
    del content["bare_ranks"], content["launches_seen"], content["stats"]["launches_per_step"]
    return content


def _limit(limit: SpeedupBound) -> dict[str, Any]:
    eager = limit.eager
    return {
        **_fields(limit),
        "launch_bound": eager and eager.launch_bound,
        "not_computing": eager and eager.not_computing,
        "largest_speedup": eager and eager.largest_speedup,
        "largest_speedup_computing": eager and eager.largest_speedup_computing,
        "times_busy": limit.times_busy,
        "times_computing": limit.times_computing,
        "attained": limit.attained,
        "attained_computing": limit.attained_computing,
        "bound": limit.bound,
    }


def _run(run: Run) -> dict[str, Any]:
    attempt = run.attempt
    return {
        "run_id": run.run_id,
        "repeat": run.repeat,
        "attempt": attempt.number if attempt else None,
        "attempts_begun": run.begun,
        "status": run.status,
        "outcome": _fields(attempt.outcome) if attempt else None,
        "problems": (*run.damaged, *(attempt.problems if attempt else ())),
    }


def _pair(pair: PairResult) -> dict[str, Any]:
    return {
        "repeat": pair.repeat,
        "eager_run": pair.eager.run_id if pair.eager else None,
        "graphed_run": pair.graphed.run_id,
        "verdict": _fields(pair.verdict),
        "ratio": pair.speed.ratio,
        "ratio_steps": pair.speed.steps,
        "ratio_reason": pair.speed.reason,
        "replay": pair.replay.summary if pair.replay else None,
        "environment_differences": pair.differences,
    }


def _not_run(result: CellResult) -> dict[str, Any]:
    cell = result.cell
    return {
        "cell_id": cell.cell_id,
        "label": cell.label,
        "workload_id": cell.workload_id,
        "state": cell.state,
        "reasons": [dataclasses.asdict(reason) for reason in cell.reasons],
    }
