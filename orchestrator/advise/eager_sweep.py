"""The sweep that `advise` runs: short, inspected eager runs of a recipe. Also the graph configurations to judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from analysis.records.load import load
from analysis.sweep.judge_cells import compare_cells, exit_code
from launch.common.atomic_files import write_json, write_text
from launch.contract.graph_impls import GRAPH_IMPLS, SCOPE_SETS
from launch.contract.paths import SweepPaths
from launch.contract.plan import Reason
from launch.contract.spec import CudaGraph, RunSpec
from launch.support import known_faults, unsupported
from orchestrator.advise.advice import Candidates, advice_to_json, advise
from orchestrator.advise.render import render
from orchestrator.output.report import print_document
from orchestrator.recipe.expand import ResolvedCell
from orchestrator.recipe.fields import OtherTrackers, Tracking
from orchestrator.recipe.recipe import Recipe
from orchestrator.rules import graph_scope, violations
from orchestrator.rules.training import CAPTURE_STEPS, SETTLE_STEPS
from orchestrator.sweeps.store import report_disk_errors

MEASURED_STEPS = 20


def advice_recipe(recipe: Recipe) -> Recipe:
    """Return ``recipe`` as a separate sweep, with one repeat and without tracking."""
    untracked = replace(recipe, wandb=Tracking(mode="disabled"), tracking=OtherTrackers())
    return replace(untracked, name=f"{recipe.name}-advice", repeats=1, perturbed=False)


def inspected_eager_cells(cells: Sequence[ResolvedCell]) -> tuple[ResolvedCell, ...]:
    """Return the eager cell of each workload, shortened and inspected. Merge workloads that differ only in steps."""
    short = (
        replace(cell, spec=_shorten(cell.spec), is_added_baseline=False) for cell in cells if not cell.spec.graphed
    )
    return tuple({cell.spec.cell_id: cell for cell in short}.values())


def _shorten(spec: RunSpec) -> RunSpec:
    steps = min(spec.training.steps, spec.cuda_graph.warmup_steps + CAPTURE_STEPS + SETTLE_STEPS + MEASURED_STEPS)
    warmup = min(spec.training.learning_rate_warmup_steps, steps)
    training = replace(spec.training, steps=steps, learning_rate_warmup_steps=warmup)
    return replace(spec, training=training, inspect=True, profile="none")


def list_candidates(eager: RunSpec) -> Candidates:
    """Return every graph configuration that means something for the model and engine of ``eager``.

    Each has the reasons why it cannot work, except those that hold for the eager run too.
    """
    own = set(_reasons(eager))
    warmup_steps = eager.cuda_graph.warmup_steps
    specs = (
        replace(eager, cuda_graph=CudaGraph(impl, parts, warmup_steps, optimizer))
        for impl, parts, optimizer in product(GRAPH_IMPLS, SCOPE_SETS, (False, True))
        if impl != "none"
    )
    return {
        spec.cuda_graph: tuple(reason for reason in _reasons(spec) if reason not in own)
        for spec in specs
        if not any(rule.judge(spec) for rule in graph_scope.RULES)
    }


def _reasons(spec: RunSpec) -> tuple[Reason, ...]:
    return (*violations(spec), *(unsupported(spec) or known_faults(spec)))


def write_advice(sweep: SweepPaths) -> int:
    """Write <sweep>/report/advice.md and advice.json from the records. Print advice.md and return the exit code.

    The same records give the same bytes.
    """
    records = load(sweep)
    eager = {cell.cell_id: list_candidates(cell.run_spec) for cell in records.plan.cells}
    advice = advise(records, eager)
    with report_disk_errors(sweep):
        write_text(sweep.report / "advice.md", render(records.plan, advice))
        write_json(sweep.report / "advice.json", advice_to_json(records.plan.name, advice))
    print_document(sweep.report / "advice.md", "advice")
    return exit_code(compare_cells(records))
