"""The plan of runs that were made elsewhere: an eager and a graphed cell, whose repeats are logs. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from analysis.curves.curve import Curve
from analysis.curves.curve_files import CurveFiles
from launch.common.redact import redact
from launch.contract.outcomes import Expectation
from launch.contract.plan import Cell, Margins, Plan, PlannedBundle
from launch.contract.spec import Command, CudaGraph, Placement, RunSpec, Training, spec_to_json
from launch.contract.spec_ids import digest, run_id
from orchestrator.recipe.yaml_reader import dump


def plan_logs(files: CurveFiles, capture_step: int | None, margins: Margins | None = None) -> Plan:
    """Return the plan of the runs in ``files``. Its name is a digest of their numbers and of their sides.

    Raises:
        CurveError: no step is after ``capture_step``.
    """
    first = files.first_after(capture_step)
    logs = digest([_numbers(files.eager), _numbers(files.graphed), capture_step])
    eager, graphed = (
        RunSpec(
            "command",
            training=Training(steps=len(files.steps)),
            cuda_graph=replace(graph, warmup_steps=max(first - 1, 0)),
            command=Command("logs", run="logs", flags=(logs,)),
            placement=Placement("cuda"),
        )
        for graph in (CudaGraph(), CudaGraph("command", name="graphed"))
    )
    cells = (_cell(eager, len(files.eager)), _cell(graphed, len(files.graphed)))
    # Nothing runs, so repeats are not interleaved, and the sides may have different numbers of them.
    bundles = tuple(PlannedBundle(cell.cell_id, cell.workload_id, cell.run_ids) for cell in cells)
    eager_names, graphed_names = ([redact(name) for name in side] for side in (files.eager, files.graphed))
    said = {"eager": eager_names, "graphed": graphed_names, "capture_step": capture_step}
    return Plan(
        f"wrap_{logs}", dump({"wrap --from-logs": said}), "wrap --from-logs", margins or Margins(), cells, bundles
    )


def _numbers(side: Mapping[str, Curve]) -> list[list[str]]:
    """Return, for each curve, the digests of its steps, metrics and printed units, and its settings as text."""
    arrays = (
        [curve.steps.step, *(curve.steps.of(name) for name in curve.units), *curve.units.values()]
        for curve in side.values()
    )
    digests = [[hashlib.sha256(array.tobytes()).hexdigest() for array in each] for each in arrays]
    return [[*each, str(curve.settings)] for each, curve in zip(digests, side.values(), strict=True)]


def _cell(spec: RunSpec, repeats: int) -> Cell:
    runs = tuple(run_id(spec.cell_id, repeat) for repeat in range(repeats))
    described = spec_to_json(spec)
    label = spec.cuda_graph.label
    return Cell(spec.cell_id, label, spec.workload_id, spec.task_id, described, "run", (), Expectation(), runs)
