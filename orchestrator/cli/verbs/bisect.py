"""The verb ``bisect``."""

from __future__ import annotations

import argparse

from launch.common.command_line import Parser
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.bisect import layer_search, scope_search
from orchestrator.bisect.search import Answer, Search
from orchestrator.bisect.side_sweep import run_search, write_answer
from orchestrator.cli.arguments import add_budget, add_json, add_target, redirect_messages
from orchestrator.cli.planning import check_plan, find_target
from orchestrator.output.plan import print_plan_summary
from orchestrator.output.report import print_document
from orchestrator.submit.executor import resolve_executor
from orchestrator.sweeps.store import Store, read_plan
from orchestrator.workflow import run_sweep

EXAMPLE = "bisect qwen3_8l transformer_engine.attn.moe_router-1a2b"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("sweep", help="name of a sweep")
    parser.add_argument("run_id", metavar="run", help="id, or unique prefix, of a graphed run that failed or DIVERGED")
    parser.add_argument(
        "--layers",
        action="store_true",
        help="for a run that DIVERGED or ended NUMERIC, find the first layer that differs",
    )
    add_budget(parser)
    add_target(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    with redirect_messages(arguments):
        origin = Store(arguments.store).find(arguments.sweep)
        plan = read_plan(origin)
        cell = scope_search.find_cell(plan, arguments.run_id)
        executor = resolve_executor(arguments.executor)
        target = find_target(arguments, executor, plan.cluster)

        kind = layer_search if arguments.layers else scope_search
        search: Search = kind.start_search(origin, plan, cell, target)
        paths = SweepPaths(origin.root.with_name(search.name))

        def execute(plan: Plan) -> None:
            check_plan(arguments, plan, target)
            print_plan_summary(plan)
            run_sweep.carry_out(paths, plan, target, "unfinished", executor, wait=True)

        answer: Answer = run_search(kind.read_answer, paths, search, target, execute)
        path = write_answer(paths, answer)
        print_document(path, "answer")
        if search.compares:
            print(f"report: {path.with_name('report.md')}")
    if arguments.json:
        print(path.with_suffix(".json").read_text(), end="")
    return answer.exit_code
