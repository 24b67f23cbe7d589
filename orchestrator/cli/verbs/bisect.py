"""The verb ``bisect``."""

from __future__ import annotations

import argparse

from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.bisect import layer_search, scope_search
from orchestrator.cli.arguments import Parser, add_budget, add_json, add_target, redirect_messages
from orchestrator.cli.planning import check_plan, find_target
from orchestrator.output.plan import print_plan_summary
from orchestrator.output.report import print_document
from orchestrator.submit.executor import resolve_executor
from orchestrator.sweeps.store import Store, read_plan
from orchestrator.workflow import run_sweep

EXAMPLE = "bisect qwen3_8l transformer_engine.attn.moe_router-1a2b"
EXIT_CODES = """exit codes:
  0  found: the smallest set that fails, or the first layer that differs
  1  the input is wrong (option, name), the run does not fail in this way, or there is no smaller set to try
  2  the system failed, or a run was lost or never began
  4  unknown: nothing fails any more, the result of a smaller set is unclear, or eager runs differ as early
"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("sweep", help="name of a sweep")
    parser.add_argument("run_id", metavar="run", help="id, or unique prefix, of a graphed run that failed or DIVERGED")
    parser.add_argument(
        "--layers",
        action="store_true",
        help="find the first layer that differs, of a run that DIVERGED or ended NUMERIC",
    )
    add_budget(parser)
    add_target(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    with redirect_messages(arguments):
        origin = Store(arguments.store).find(arguments.sweep)
        plan = read_plan(origin)
        cell = scope_search.cell_named(plan, arguments.run_id)
        executor = resolve_executor(arguments.executor)
        target = find_target(arguments, executor, plan.cluster)

        def execute(plan: Plan) -> None:
            check_plan(arguments, plan)
            print_plan_summary(plan)
            run_sweep.carry_out(_side_sweep(origin, plan.name), plan, target, "unfinished", executor, wait=True)

        if arguments.layers:
            layers = layer_search.start_layer_search(origin, plan, cell, target)
            paths = _side_sweep(origin, layers.name)
            layer_answer = layer_search.bisect_layers(paths, layers, target, execute)
            path, code = layer_search.write_answer(paths, layer_answer), layer_answer.exit_code
        else:
            scopes = scope_search.search_of(origin, plan, cell, target)
            paths = _side_sweep(origin, scopes.name)
            scope_answer = scope_search.bisect(paths, scopes, target, execute)
            path, code = scope_search.write_answer(paths, scope_answer), scope_answer.exit_code
        print_document(path, "answer")
        if not arguments.layers:
            print(f"report: {path.with_name('report.md')}")
    if arguments.json:
        print(path.with_suffix(".json").read_text(), end="")
    return code


def _side_sweep(origin: SweepPaths, name: str) -> SweepPaths:
    return SweepPaths(origin.root.with_name(name))
