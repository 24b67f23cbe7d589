"""The plan of runs that were made elsewhere: an eager and a graphed cell, whose repeats are logs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.curves.curve import CurveError
from analysis.curves.curve_files import CurveFiles
from launch.contract.outcomes import Expectation
from launch.contract.plan import Cell, Margins, Plan, PlannedBundle
from launch.contract.spec import Command, CudaGraph, Placement, RunSpec, Training, spec_to_json
from launch.contract.spec_ids import digest, run_id
from orchestrator.recipe.yaml_reader import dump


def plan_logs(files: CurveFiles, contents: Sequence[str], capture_step: int | None) -> Plan:
    """Return the plan of the runs in ``files``. Its name follows from their ``contents``, digests in order.

    Raises:
        CurveError: no step is after ``capture_step``.
    """
    first = files.first_after(capture_step)
    if first == len(files.steps):
        raise CurveError(f"no step is after {capture_step}, the capture step; the last one is {files.steps[-1]}")
    logs = digest([*contents, capture_step])
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
    # Nothing runs, so nothing is interleaved: sides may have unlike numbers of repeats.
    bundles = tuple(PlannedBundle(cell.cell_id, cell.workload_id, cell.run_ids) for cell in cells)
    said = {"eager": [*files.eager], "graphed": [*files.graphed], "capture_step": capture_step}
    return Plan(f"wrap_{logs}", dump({"wrap --from-logs": said}), "wrap --from-logs", Margins(), cells, bundles)


def _cell(spec: RunSpec, repeats: int) -> Cell:
    runs = tuple(run_id(spec.cell_id, repeat) for repeat in range(repeats))
    described = spec_to_json(spec)
    label = spec.cuda_graph.label
    return Cell(spec.cell_id, label, spec.workload_id, spec.task_id, described, "run", (), Expectation(), runs)
