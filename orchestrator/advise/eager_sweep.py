"""The sweep that `advise` runs: short, inspected eager runs of a recipe. Also the graph configurations to judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from analysis.records.load import load
from analysis.sweep.judge_cells import compare_cells, exit_code
from launch.common.atomic_files import write_json, write_text
from launch.contract.graph_impls import GRAPH_IMPLS, SCOPE_SETS
from launch.contract.paths import SweepPaths
from launch.contract.plan import Reason
from launch.contract.spec import CudaGraph, RunSpec
from launch.frameworks.megatron_spec import megatron_spec
from launch.support import known_faults, unsupported
from launch.support.rule import judge
from orchestrator.advise.advice import Candidates, advice_to_json, advise
from orchestrator.advise.render import render
from orchestrator.output.report import print_document
from orchestrator.plan.sound_fixes import keep_sound_fixes
from orchestrator.recipe.expand import ResolvedCell
from orchestrator.recipe.fields import OtherTrackers, Tracking
from orchestrator.recipe.recipe import Recipe
from orchestrator.rules import graph_capture, graph_scope, violations
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
    steps = min(spec.training.steps, spec.first_measured + MEASURED_STEPS)
    return replace(spec, training=spec.training.shortened(steps), inspect=True, profile="none")


def own_graphs(cells: Sequence[ResolvedCell]) -> tuple[CudaGraph, ...]:
    """Return the graphs that a recipe with engine command names itself, under ``command.graphs``."""
    return tuple(dict.fromkeys(cell.spec.cuda_graph for cell in cells if cell.spec.cuda_graph.name))


def list_candidates(eager: RunSpec, own: Sequence[CudaGraph] = ()) -> Candidates:
    """Return the recipe's ``own`` graphs, or every graph configuration that means something for the model and engine.

    Each has the reasons why it cannot work, except those that hold for the eager run too.
    """
    known = set(_reasons(eager))
    graphs = own or [graph for graph in _graphs(eager) if _means_something(replace(eager, cuda_graph=graph))]
    specs = (replace(eager, cuda_graph=graph) for graph in graphs)
    found = ((spec, tuple(reason for reason in _reasons(spec) if reason not in known)) for spec in specs)
    return {spec.cuda_graph: keep_sound_fixes(spec, reasons) for spec, reasons in found}


def _graphs(eager: RunSpec) -> Iterator[CudaGraph]:
    for impl, parts, optimizer in product(GRAPH_IMPLS, SCOPE_SETS, (False, True)):
        row = GRAPH_IMPLS[impl]
        has_optimizer = not optimizer or eager.engine in row.optimizer_engines
        if eager.engine in row.engines and has_optimizer and impl not in ("none", "command"):
            yield CudaGraph(impl, parts, eager.cuda_graph.warmup_steps, optimizer)


def _means_something(spec: RunSpec) -> bool:
    judged = (spec, *_described(spec))
    return not any(rule.judge(one) for rule in graph_scope.RULES for one in judged)


def _reasons(spec: RunSpec) -> tuple[Reason, ...]:
    refused = (reason for described in _described(spec) for reason in judge(graph_capture.RULES, described))
    return (*violations(spec), *(unsupported(spec) or known_faults(spec)), *refused)


def _described(spec: RunSpec) -> tuple[RunSpec, ...]:
    """Return what the words of a user's command say of a model in Megatron, if its framework turns the graphs on."""
    described = megatron_spec(spec) if spec.engine == "command" and spec.cuda_graph.impl != "command" else None
    return (described,) if described else ()


def write_advice(sweep: SweepPaths, own: Sequence[CudaGraph] = ()) -> int:
    """Write <sweep>/report/advice.md and advice.json from the records. Print advice.md and return the exit code.

    The same records and the recipe's ``own`` graphs give the same bytes.
    """
    records = load(sweep)
    eager = {cell.cell_id: list_candidates(cell.run_spec, own) for cell in records.plan.cells}
    advice = advise(records, eager)
    with report_disk_errors(sweep):
        write_text(sweep.report / "advice.md", render(records.plan, advice))
        write_json(sweep.report / "advice.json", advice_to_json(records.plan.name, advice))
    print_document(sweep.report / "advice.md", "advice")
    return exit_code(compare_cells(records))
