"""Advice on a recipe: its eager cells alone, run briefly and looked at closely, and what could be swept beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from launch.common.atomic_files import dumps, write_text
from launch.contract.graph_impls import GRAPH_IMPLS, GRAPH_SCOPES
from launch.contract.paths import SweepPaths
from launch.contract.plan import Reason
from launch.contract.spec import CudaGraph, RunSpec
from launch.support import known_faults, unsupported
from orchestrator.output.report import print_document
from orchestrator.recipe.expand import ResolvedCell
from orchestrator.recipe.fields import Tracking
from orchestrator.recipe.recipe import Recipe
from orchestrator.rules import graph_scope, violations
from orchestrator.rules.training import CAPTURE_STEPS, SETTLE_STEPS
from orchestrator.sweeps.store import report_disk_errors

if TYPE_CHECKING:
    from orchestrator.advise.advice import Candidate

MEASURED_STEPS = 20


def advice_recipe(recipe: Recipe) -> Recipe:
    """``recipe`` as a sweep of its own beside it: one repeat, told to nobody else."""
    return replace(recipe, name=f"{recipe.name}-advice", repeats=1, wandb=Tracking(mode="disabled"))


def eager_alone(cells: Sequence[ResolvedCell]) -> tuple[ResolvedCell, ...]:
    """The eager cell of each workload, cut short and told to look closely. Workloads that differ in steps alone are one."""
    briefly = (
        replace(cell, spec=_briefly(cell.spec), is_added_baseline=False) for cell in cells if not cell.spec.graphed
    )
    return tuple({cell.spec.cell_id: cell for cell in briefly}.values())


def _briefly(spec: RunSpec) -> RunSpec:
    enough = spec.cuda_graph.warmup_steps + CAPTURE_STEPS + SETTLE_STEPS + MEASURED_STEPS
    steps = min(spec.training.steps, enough)
    warmup = min(spec.training.learning_rate_warmup_steps, steps)
    return replace(spec, training=replace(spec.training, steps=steps, learning_rate_warmup_steps=warmup), inspect=True)


def candidates(eager: RunSpec) -> tuple[Candidate, ...]:
    """Every graph configuration that means something for the model and the engine of ``eager``, with the reasons for which
    it cannot work. What keeps the eager run itself from working is none of them."""
    from orchestrator.advise.advice import Candidate

    own = set(_reasons(eager))
    specs = (replace(eager, cuda_graph=graph) for graph in _graphs(eager.cuda_graph.warmup_steps))
    return tuple(
        Candidate(spec.cuda_graph, tuple(reason for reason in _reasons(spec) if reason not in own))
        for spec in specs
        if not any(rule.judge(spec) for rule in graph_scope.RULES)
    )


def _graphs(warmup_steps: int) -> Iterator[CudaGraph]:
    for impl in (impl for impl in GRAPH_IMPLS if impl != "none"):
        for size in range(len(GRAPH_SCOPES) + 1):
            for parts in combinations(GRAPH_SCOPES, size):
                for optimizer in (False, True):
                    yield CudaGraph(impl, parts, warmup_steps, optimizer)


def _reasons(spec: RunSpec) -> tuple[Reason, ...]:
    return (*violations(spec), *(unsupported(spec) or known_faults(spec)))


def write_advice(sweep: SweepPaths) -> int:
    """Write <sweep>/report/advice.md and advice.json from the records, and show the first; the value is the exit code.

    The same records give the same bytes.
    """
    from analysis.records.load import load
    from analysis.sweep.cell_results import exit_code
    from analysis.sweep.judge_cells import compare_cells
    from orchestrator.advise.advice import advice_to_json, advise
    from orchestrator.advise.render import render

    records = load(sweep)
    eager = {cell.cell_id: candidates(cell.run_spec) for cell in records.plan.cells}
    advice = advise(records, eager)
    with report_disk_errors(sweep):
        write_text(sweep.report / "advice.md", render(records.plan, advice))
        write_text(sweep.report / "advice.json", dumps(advice_to_json(records.plan.name, advice), indent=1) + "\n")
    print_document(sweep.report / "advice.md", "advice")
    return exit_code(compare_cells(records))
