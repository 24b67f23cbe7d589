"""The verb ``plan``."""

from __future__ import annotations

import argparse

from launch.common.atomic_files import members
from launch.common.command_line import Parser
from orchestrator.cli.arguments import add_planning
from orchestrator.cli.planning import plan_recipe, read_named_cluster
from orchestrator.output.plan import print_not_checked, print_plan
from orchestrator.output.print_json import print_json
from orchestrator.plan.planner import gpu_hours
from orchestrator.submit.batch_script import batch_scripts
from orchestrator.submit.executor import silence
from orchestrator.sweeps.store import Store
from orchestrator.targets.slurm_cluster import Cluster

EXAMPLE = "plan gpt_oss_20b --only cuda_graph.impl=transformer_engine"


def add_arguments(parser: Parser) -> None:
    add_planning(parser)


def run(arguments: argparse.Namespace) -> int:
    plan, target, _ = plan_recipe(arguments, read_named_cluster(arguments))
    paths = Store(arguments.store).sweep(plan.name)
    scripts = batch_scripts(paths, plan, target) if isinstance(target, Cluster) else ()
    if arguments.json:
        more = {"gpu_hours": gpu_hours(plan), "batch_scripts": scripts, "not_checked": target.not_checked}
        print_json({**members(plan), **more})
    else:
        print_plan(plan, gpu_hours(plan), scripts)
        print_not_checked(target.not_checked, silence())
    return 0
