"""Turn command-line arguments into a checked plan, for the verbs that run something."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from analysis.memory.extrapolation import ProgramRuns
from launch.contract.plan import Plan
from orchestrator import PROGRAM
from orchestrator.cli.verbs import VERBS
from orchestrator.errors import InputError, input_error
from orchestrator.output.plan import warn_missing_programs, warn_other_steps
from orchestrator.plan.input_files import check_inputs, missing_programs
from orchestrator.plan.memory_check import MemoryCheck
from orchestrator.plan.planner import check_budget, gpu_hours, make_plan
from orchestrator.recipe.expand import ResolvedCell, expand, filter_cells
from orchestrator.recipe.recipe import Recipe, find_recipe, load
from orchestrator.submit.executor import Executor, resolve_executor, silence
from orchestrator.sweeps.site_constants import constants_file, read_constants
from orchestrator.sweeps.store import Store
from orchestrator.targets.host import this_host
from orchestrator.targets.profile import load_profile
from orchestrator.targets.slurm_cluster import Cluster, Target, find_cluster, read_cluster


def plan_recipe(arguments: argparse.Namespace, target: Target | None = None) -> tuple[Plan, MemoryCheck, Executor]:
    recipe, cells, target, executor = load_cells(arguments, target)
    memory = memory_check(arguments, recipe, target)
    return plan_cells(arguments, recipe, cells, memory), memory, executor


def memory_check(arguments: argparse.Namespace, recipe: Recipe, target: Target) -> MemoryCheck:
    store = Store(arguments.store)
    constants = read_constants(constants_file(store.root, target.cluster_name))
    return MemoryCheck(target, constants, ProgramRuns(store.sweep(recipe.name)))


def read_named_cluster(arguments: argparse.Namespace) -> Cluster | None:
    """Return the cluster of ``--cluster`` by its profile alone, or None if Slurm answers or no cluster is named."""
    if arguments.cluster is None or arguments.executor in ("local", "debug") or not silence():
        return None
    return read_cluster(load_profile(arguments.cluster), Store(arguments.store).root)


def load_recipe(arguments: argparse.Namespace) -> Recipe:
    try:
        path = find_recipe(arguments.recipe)
    except InputError:
        name = str(arguments.recipe)
        if name in VERBS:
            fix = f"write one of them: {PROGRAM} {arguments.verb} RECIPE"
            raise input_error("", f"{arguments.verb} and {name} are two verbs", fix) from None
        if not Store(arguments.store).sweep(name).plan.exists():
            raise
        fix = f"name a recipe; {PROGRAM} status {name} shows the sweep"
        raise input_error(name, "is a sweep, not a recipe", fix) from None
    return load(path, arguments.overrides)


def load_cells(
    arguments: argparse.Namespace, target: Target | None = None
) -> tuple[Recipe, Sequence[ResolvedCell], Target, Executor]:
    """Load the recipe and those of its cells that ``--only`` keeps. Without ``target``, find the one that runs them."""
    executor = "slurm" if target else resolve_executor(arguments.executor)
    recipe = load_recipe(arguments)
    target = target or find_target(arguments, executor, recipe.cluster)
    return recipe, filter_cells(expand(recipe, target.device), arguments.only), target, executor


def plan_cells(
    arguments: argparse.Namespace, recipe: Recipe, cells: Sequence[ResolvedCell], memory: MemoryCheck
) -> Plan:
    plan = make_plan(recipe, cells, memory.target, None if arguments.even_if_oom else memory)
    plan = replace(plan, only=tuple(arguments.only))
    check_plan(arguments, plan, memory.target)
    return plan


def check_plan(arguments: argparse.Namespace, plan: Plan, target: Target) -> None:
    """Raise InputError if ``plan`` exceeds ``--max-gpu-hours``, or a file that its runs need cannot be read.

    If other hosts run a user's program that this host lacks, only warn, because those hosts may have it.
    """
    check_budget(gpu_hours(plan), arguments.max_gpu_hours)
    if not target.not_checked:
        check_inputs(plan)
    missing = missing_programs(plan)
    if missing and target.scheduler == "host":
        raise InputError(missing)
    warn_missing_programs(missing)
    warn_other_steps(plan)


def find_target(arguments: argparse.Namespace, executor: Executor, profile: str) -> Target:
    """Return this host, or the Slurm cluster. ``profile`` is the cluster profile that the recipe or the plan names."""
    if executor == "slurm":
        name = profile if arguments.cluster is None else arguments.cluster
        return find_cluster(load_profile(name), Store(arguments.store).root)
    if arguments.cluster is not None:
        raise input_error(
            "--cluster",
            f"{arguments.cluster}: profiles are for Slurm, but the runs would start on this host",
            "leave it out, or submit with --executor slurm",
        )
    if profile:
        sys.stderr.write(f"cluster {profile!r} is ignored: profiles are for Slurm, but the runs start on this host\n")
    host = this_host()
    if host.gpus and host.gpu_memory_gib is None:
        sys.stderr.write("nvidia-smi does not tell the memory of this host's GPUs: no cell is checked against it\n")
    return host
