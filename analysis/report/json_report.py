"""The content of report.json. Numbers that are not finite are strings.

    {"format": 2, "sweep": name, "recipe_file": name,
     "exit_code": 0 | 2 | 3 | 4,
     "summary": {"headline", "notes": [text], "text": both, "verdicts": {verdict: cells}, "cells": {state: cells}, "unexpected":
     cells, "unfinished_runs",
                 "unvalidated": which graphed cells could not run},
     "margins": {"loss": nats, "grad_norm": relative},
     "looks": [repeats] after which verdicts are judged with `repeats: auto`, the last one being all; empty for fixed repeats,
     "cells": [one object per cell of the plan that ran or was to run, in the plan's order:
        {"cell_id", "label", "name": short, as in report.md, "workload_id", "task_id", "impl", "scope", "effective_scope",
        "device",
         "known_faults": [{"rule", "message", "fix", "source"}], why its results are known to be wrong,
         "expect": {"outcome", "phase"}, "outcome", "unexpected", "unsound_records": [text], "flaky_attempts": [text],
         "uncompared_attempts": [text],
         "unfinished", "seconds": how long the attempts that count ran,
         "verdict": null | VERDICT, "max_loss_difference", "noise_floor": null | FLOOR,
         "memory": null | {"kind": "device" | "host", "peak", "added", "device_total", "headroom", "whole",
                           "phases": [...], "parts": null | {"state", "activations", "graph_pool", "outside"}}   (bytes),
         "foreign_memory": {run_id: bytes that other processes held on one of its GPUs when it began},
         "static_memory": bytes of the fullest rank's weights, gradients and optimizer state,
         "memory_forecast": {phase: {"allocated", "device"}}   (bytes of the fullest rank; empty where nothing is forecast),
         "straggler": null | {"rank", "what": "computing" | "host", "milliseconds", "others_ms", "throttled"},
         "throttling": null | {"own": THROTTLED, "eager": null | THROTTLED},
         "roofline": null | {"stage", "limit_ms", "of_hardware": limit / step, "reason": why both are null,
                             "rates": null | {"precision", "flops", "bandwidth"}   (per second),
                             "work": {kind: {"operations", "bytes", "milliseconds": null | ms}}}   (analysis.limits.roofline, per step of a rank),
         "speed": null | {"verdict", "ratio", "low", "high", "own_low", "own_high", "pairs", "steps", "outliers", "settling",
                          "outliers_kept", "break_even_step", "reason", "repeats_to_decide", and on a GPU "eager_ms", "graphed_ms",
                          "eager_tokens_per_second", "graphed_tokens_per_second", "eager_tflops", "graphed_tflops"};
                  the verdict is null for a cell that does not pass. The bounds are null for one pair, for a step that
                  cannot have been so short, and where throttling leaves none. outliers_kept says why outliers count,
         "replay": null | {"proven", "reason", "ranks", "stats": GraphStats, and on a GPU "bare_ranks", "launches_seen",
                    "launches": null | {"by_graphs", "one_by_one", "unknown"}},
         "step_checks": null | {"steps": [step], "runs", "tensors", "unequal", "most": null | number, "moved_tokens",
                                "seconds", "fault", "left_out", "undecided"} with the fields of analysis.pairing.step_checks.StepChecks,
         and for a graphed cell on a GPU
         "capture_cost": null | {"graphs", "seconds"},
         "speedup_bound": {"reason",
                   "eager": null | {"step_ms", "busy_ms", "computing_ms", "host_ms": null | ms, "kernels", "communicates"},
                   "graphed": null | {"step_ms", "busy_ms", "computing_ms", "host_ms": null | ms, "kernels", "graph_launches"},
                   "doubt", "eager_doubt", "launch_bound", "not_computing", "upper_bound", "times_bound", "attained",
                   "bound": null | analysis.limits.speedup_bound.Bound};
                  upper_bound, times_bound and attained leave out communication where ranks communicate. They are null
                  where the bound is "other kernels", since the baseline's kernels do not bound others,
         "runs": [{"run_id", "repeat", "attempt", "attempts_begun", "status", "outcome": null | Outcome, "problems"}],
         "pairs": [{"repeat", "eager_run", "graphed_run", "verdict": VERDICT, "ratio", "ratio_steps", "ratio_reason",
                    "replay", "environment_differences"}]}],
     "not_run": [{"cell_id", "label", "workload_id", "state", "reasons": [{"rule", "message", "fix", "source"}]}],
     "rankings": [{"task_id", "name", "device", "allocations", "machines": [text], "not_ranked": [[label, reason]],
                   "cells": [{"label", "ranks", "nodes", "runs", "relative" (step time, first = 1),
                              "memory_per_rank" (bytes), "on_pareto_front", "against_best", and on a GPU "step_ms", "low_ms",
                              "high_ms", "tokens_per_second_per_rank", "tflops"}]}],
     "metric_changes": [{"metric", "graphs", "cells": [{"label", "relative", "sure", "eager", "graphed"}]}],
                  where eager and graphed are null for times and rates of a CPU,
     "memory_risks": [{"graphs", "fitting", "out_of_memory": [label]}],
     "failure_modes": [{"name", "ending", "message", "fix", "graphed": [label], "eager": [label]}],
     "plots": {"drawn": {workload, or "sweep": [files]}, "undrawn": {file: reason}, "left_out_workloads": [...],
     "left_out_cells": [...]}, "wandb": {"urls": {run id, or "analysis": url}, "offline": [run id]}, "notes": {message: runs},
     "provenance": {key: [[value, runs], ...]}, "recipe": YAML}

VERDICT is {"verdict", "reason", "fix", "alternatives": [text], "evidence": null | {...}, "deviation": null | {"step", "metric", "size"}, "noisy",
"needed_run", "copied_logs": [text]} with the fields of analysis.verdict.verdict.Verdict. FLOOR is {"repeats", "loss", "grad_norm"}. THROTTLED is
{"most": {reason: [share, rank]}, "seen": [reason], "unknown": [text], "power_limits": [watts], "sm_mhz": null | [lowest,
highest], "cap_depth", "slowed"}.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from analysis.graphs.replay_check import Replay
from analysis.limits.speedup_bound import SpeedupBound
from analysis.limits.throttling import Throttling
from analysis.memory.forecast import forecast
from analysis.memory.peaks import CellMemory
from analysis.memory.static_memory import state_bytes
from analysis.records.provenance import provenance
from analysis.records.run import Run, attempts_of
from analysis.report.report_data import ReportData
from analysis.report.summary import Summary
from analysis.sweep.cell_results import CellResult, CellSpeed, PairResult
from analysis.sweep.failure_modes import failure_modes
from analysis.sweep.metric_changes import MEMORY_METRICS, MetricChange, memory_risks, metric_changes
from analysis.sweep.ranking import Ranked, Ranking, rank
from launch.common.redact import redact
from launch.contract.spec import RunSpec

FORMAT = 2
KEYS = {"remedy": "fix"}
"""Keys of report.json that differ from the names of dataclass fields, which records keep."""
CPU_MEANINGLESS = tuple(
    f"{side}_{figure}" for side in ("eager", "graphed") for figure in ("ms", "tokens_per_second", "tflops")
)


def report_to_json(report: ReportData) -> dict[str, Any]:
    """Return report.json as plain values. Its long lists "cells" and "not_run" are iterators."""
    plan, results = report.sweep.plan, report.sweep.results
    attempts = attempts_of(run for result in results for run in result.runs)
    return {
        "format": FORMAT,
        "sweep": plan.name,
        "recipe_file": plan.recipe_file,
        "exit_code": report.summary.exit_code,
        "summary": _summary(report.summary),
        "margins": to_json(plan.margins),
        "looks": plan.looks,
        "cells": map(_cell, report.ran),
        "not_run": (
            _pick(result.cell, "cell_id", "label", "workload_id", "state", "reasons")
            for result in results
            if result.cell.state != "run"
        ),
        **_tables(results),
        "plots": {
            "drawn": report.plots,
            "undrawn": report.undrawn,
            "left_out_workloads": report.selection.left_out_workloads,
            "left_out_cells": report.selection.left_out_cells,
        },
        "wandb": to_json(report.wandb),
        "notes": dict(sorted(Counter(note for a in attempts for note in sorted(set(a.notes))).items())),
        "provenance": provenance([attempt.environment for attempt in attempts]),
        "recipe": redact(plan.recipe),
    }


def summary_to_json(report: ReportData) -> dict[str, Any]:
    """Return summary.json: the part of report.json that a terminal shows. It is short however large the sweep is."""
    return {
        "format": FORMAT,
        "sweep": report.sweep.plan.name,
        "exit_code": report.summary.exit_code,
        "summary": _summary(report.summary),
        "needed_runs": sorted(
            {each.verdict.needed_run for each in report.ran if each.verdict and each.verdict.needed_run}
        ),
        "total_cells": len(report.ran),
        "cells": [_without(_cell(result), "runs", "pairs") for result in report.shown],
    }


def to_json(value: Any) -> Any:
    """Return dataclasses, and lists of them, as plain values with the keys of report.json."""
    if dataclasses.is_dataclass(value):
        fields = (field.name for field in dataclasses.fields(value))
        return {KEYS.get(name, name): to_json(getattr(value, name)) for name in fields}
    return [to_json(each) for each in value] if isinstance(value, (list, tuple)) else value


def _pick(value: Any, *names: str) -> dict[str, Any]:
    """Return the named fields and properties of a dataclass, converted by :func:`to_json`."""
    return {name: to_json(getattr(value, name)) for name in names}


def _without(content: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in keys}


def _summary(summary: Summary) -> dict[str, Any]:
    return {**_without(to_json(summary), "exit_code"), "text": summary.text}


# --- cells ----------------------------------------------------------------------------------------------------------


def _cell(result: CellResult) -> dict[str, Any]:
    cell, graph, speed, graphs = result.cell, result.spec.cuda_graph, result.speed, result.graphs
    content = {
        **_pick(cell, "cell_id", "label"),
        "name": result.name,
        **_pick(cell, "workload_id", "task_id"),
        **_pick(graph, "impl", "scope"),
        "effective_scope": graphs.replay.stats.effective_scope if graphs.replay else None,
        "device": result.spec.placement.device,
        **_pick(cell, "known_faults"),
        "expect": to_json(cell.expect),
        **_pick(result, "outcome", "unexpected"),
        **to_json(result.integrity),
        **_pick(result, "unfinished", "seconds", "verdict", "max_loss_difference"),
        "noise_floor": to_json(result.loss.noise_floor),
        "memory": _memory(result.memory),
        "foreign_memory": to_json(result.foreign_memory),
        "static_memory": state_bytes(result.spec),
        "memory_forecast": _memory_forecast(result.spec),
        "straggler": to_json(speed.straggler),
        "throttling": _throttling(speed.throttling),
        "roofline": _roofline(speed),
        "speed": _speed(result),
        "replay": _replay(graphs.replay, result.on_gpu),
        "step_checks": to_json(graphs.step_checks),
    }
    if speed.bound:
        content |= {"capture_cost": to_json(graphs.capture_cost), "speedup_bound": _speedup_bound(speed.bound)}
    return {**content, "runs": list(map(_run, result.runs)), "pairs": list(map(_pair, result.pairs))}


def _memory_forecast(spec: RunSpec) -> dict[str, dict[str, int]]:
    ranks = forecast(spec)
    return {
        phase: {name: max(getattr(rank, name)(phase) for rank in ranks) for name in ("allocated", "device")}
        for phase in (ranks[0].phases if ranks else ())
    }


def _memory(memory: CellMemory | None) -> Any:
    return memory and {**to_json(memory), "peak": memory.peak, "headroom": memory.headroom}


def _throttling(throttling: Throttling | None) -> Any:
    sides = {name: getattr(throttling, name, None) for name in ("own", "eager")}
    return throttling and {name: side and {**to_json(side), "slowed": side.slowed} for name, side in sides.items()}


def _roofline(speed: CellSpeed) -> Any:
    roofline = speed.roofline
    return roofline and {
        **_pick(roofline, "stage", "limit_ms", "reason", "rates"),
        "of_hardware": speed.of_hardware,
        "work": {
            kind: {**to_json(work), "milliseconds": roofline.milliseconds.get(kind)}
            for kind, work in roofline.work.items()
        },
    }


def _speed(result: CellResult) -> Any:
    if result.speed.speedup is None:
        return None
    content = to_json(result.speed.speedup)
    if not result.on_gpu:
        content = _without(content, *CPU_MEANINGLESS)
    # A cell that does not pass may compute something else, so it is neither faster nor slower.
    return content if result.passes else {**content, "verdict": None}


def _replay(replay: Replay | None, on_gpu: bool) -> Any:
    if replay is None or on_gpu:
        return to_json(replay)
    # A CPU launches no CUDA graphs.
    stats = _without(to_json(replay.stats), "launches_per_step")
    return {**_without(to_json(replay), "bare_ranks", "launches_seen", "launches"), "stats": stats}


def _speedup_bound(bound: SpeedupBound) -> dict[str, Any]:
    eager = bound.eager
    return {
        **to_json(bound),
        "launch_bound": eager and eager.launch_bound,
        "not_computing": eager and eager.not_computing,
        **_pick(bound, "upper_bound", "times_bound", "attained", "bound"),
    }


def _run(run: Run) -> dict[str, Any]:
    attempt = run.attempt
    return {
        **_pick(run, "run_id", "repeat"),
        "attempt": attempt.number if attempt else None,
        "attempts_begun": run.begun,
        "status": run.status,
        "outcome": to_json(attempt.outcome) if attempt else None,
        "problems": (*run.damaged, *(attempt.problems if attempt else ())),
    }


def _pair(pair: PairResult) -> dict[str, Any]:
    return {
        "repeat": pair.repeat,
        "eager_run": pair.eager.run_id if pair.eager else None,
        "graphed_run": pair.graphed.run_id,
        "verdict": to_json(pair.verdict),
        "ratio": pair.speed.ratio,
        "ratio_steps": pair.speed.steps,
        "ratio_reason": pair.speed.reason,
        "replay": pair.replay.summary if pair.replay else None,
        "environment_differences": pair.differences,
    }


# --- tables of the whole sweep --------------------------------------------------------------------------------------


def _tables(results: Sequence[CellResult]) -> dict[str, Any]:
    on_gpu = any(result.on_gpu for result in results)
    return {
        "rankings": list(map(_ranking, rank(results))),
        "metric_changes": [_change(change, on_gpu) for change in metric_changes(results)],
        "memory_risks": to_json(memory_risks(results)),
        "failure_modes": to_json(failure_modes(results)),
    }


def _ranking(ranking: Ranking) -> dict[str, Any]:
    return {**to_json(ranking), "cells": [_ranked(cell, ranking) for cell in ranking.cells]}


def _ranked(cell: Ranked, ranking: Ranking) -> dict[str, Any]:
    step, rates = cell.step, ("tokens_per_second_per_rank", "tflops")
    content = _without(to_json(cell), "step", *rates)
    content |= {"runs": step.runs, "relative": step.milliseconds / ranking.best.step.milliseconds}
    if ranking.device == "cuda":
        content |= {"step_ms": step.milliseconds, "low_ms": step.low, "high_ms": step.high}
        content |= {name: getattr(cell, name) for name in rates}
    return content


def _change(change: MetricChange, on_gpu: bool) -> dict[str, Any]:
    absolute = on_gpu or change.metric in MEMORY_METRICS
    cells = [
        {"label": each.label, "relative": each.relative, "sure": each.sure}
        | {"eager": each.eager if absolute else None, "graphed": each.graphed if absolute else None}
        for each in change.changes
    ]
    return {"metric": change.metric, "graphs": change.graphs, "cells": cells}
