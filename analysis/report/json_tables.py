"""The tables of a whole sweep as plain values, for report.json:

    "rankings": [{"task_id", "name", "device", "allocations", "machines": [text], "left_out": [[label, why]],
                  "cells": [{"label", "sets_apart": [text], "ranks", "nodes", "runs", "relative" (step time, first = 1),
                             "peak" (bytes), "on_front", "told_apart", and on a GPU "step_ms", "low_ms", "high_ms",
                             "tokens_per_second_per_rank", "tflops"}]}],
    "fits": [{"eager", "graphed", "cells": [label]}],
    "metric_changes": [{"metric", "graphs", "cells": [{"label", "relative", "sure", "eager", "graphed"}]}],
    "memory_risks": [{"graphs", "fitting", "out_of_memory": [label]}],
    "failure_modes": [{"name", "ending", "message", "remedy", "graphed": [label], "eager": [label]}]

Times and rates of a CPU are left out: "eager" and "graphed" are then null, of memory alone they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from analysis.sweep.cell_results import CellResult
from analysis.sweep.failure_modes import failure_modes
from analysis.sweep.fit_matrix import outcome_matrix
from analysis.sweep.metric_changes import MEMORY_METRICS, MetricChange, memory_risks, metric_changes
from analysis.sweep.ranking import Ranked, Ranking, rank


def tables_of(results: Sequence[CellResult]) -> dict[str, Any]:
    matrix, on_gpu = outcome_matrix(results), any(result.on_gpu for result in results)
    return {
        "rankings": [_ranking(ranking) for ranking in rank(results)],
        "fits": [
            {"eager": eager, "graphed": graphed, "cells": matrix.labels[eager, graphed]}
            for eager in matrix.eager
            for graphed in matrix.graphed
            if (eager, graphed) in matrix.labels
        ],
        "metric_changes": [_change(change, on_gpu) for change in metric_changes(results)],
        "memory_risks": [asdict(risk) for risk in memory_risks(results)],
        "failure_modes": [asdict(mode) for mode in failure_modes(results)],
    }


def _ranking(ranking: Ranking) -> dict[str, Any]:
    first = ranking.best.step.milliseconds
    return {
        "task_id": ranking.task_id,
        "name": ranking.name,
        "device": ranking.device,
        "allocations": ranking.allocations,
        "machines": ranking.machines,
        "left_out": ranking.left_out,
        "cells": [_ranked(cell, first, ranking.device == "cuda") for cell in ranking.cells],
    }


def _ranked(cell: Ranked, first: float, on_gpu: bool) -> dict[str, Any]:
    content = {key: value for key, value in asdict(cell).items() if key not in ("step", "tflops")}
    del content["tokens_per_second_per_rank"]
    content |= {"runs": cell.step.runs, "relative": cell.step.milliseconds / first}
    if not on_gpu:
        return content
    times = {"step_ms": cell.step.milliseconds, "low_ms": cell.step.low, "high_ms": cell.step.high}
    return content | times | {
        "tokens_per_second_per_rank": cell.tokens_per_second_per_rank, "tflops": cell.tflops
    }  # fmt: skip


def _change(change: MetricChange, on_gpu: bool) -> dict[str, Any]:
    absolute = on_gpu or change.metric in MEMORY_METRICS
    cells = [
        {"label": each.label, "relative": each.relative, "sure": each.sure}
        | {"eager": each.eager if absolute else None, "graphed": each.graphed if absolute else None}
        for each in change.changes
    ]
    return {"metric": change.metric, "graphs": change.graphs, "cells": cells}
