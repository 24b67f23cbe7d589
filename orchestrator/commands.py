"""What each verb does: load, decide, act, print.

Imported above is what every verb needs; what only some need they import themselves, so that ``status`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Optional, TextIO

from launch.files import dumps
from launch.paths import RunPaths, SweepPaths
from launch.record import Plan, plan_to_json
from orchestrator import show
from orchestrator.errors import SystemFault, wrong
from orchestrator.next_steps import after
from orchestrator.slurm import Jobs, Scheduler
from orchestrator.state import open_submissions, read_states
from orchestrator.store import Store, read_plan, writing
from orchestrator.submission import Submission

if TYPE_CHECKING:
    from orchestrator.executor import Executor
    from orchestrator.plan import Policy, Target
    from orchestrator.recipe import Recipe
    from orchestrator.sweep import ResolvedCell


def sweep(options: argparse.Namespace) -> int:
    from orchestrator.conduct import conduct
    from orchestrator.executor import resolve_executor

    with _messages(options):
        executor = resolve_executor(options.executor)
        planned, target = _plan(options, executor)
        show.plan_summary(planned)
        paths = Store(options.store).sweep(planned.name)
        code = conduct(paths, planned, target, "new", executor, wait=not options.no_wait)
    _print_json(options, paths, planned)
    return code


def plan(options: argparse.Namespace) -> int:
    from orchestrator.batch_script import batch_scripts
    from orchestrator.cluster import Cluster
    from orchestrator.executor import resolve_executor
    from orchestrator.plan import gpu_hours

    planned, target = _plan(options, resolve_executor(options.executor))
    paths = Store(options.store).sweep(planned.name)
    scripts = batch_scripts(paths, planned, target) if isinstance(target, Cluster) else ()
    if options.json:
        further = {"gpu_hours": gpu_hours(planned), "batch_scripts": [asdict(script) for script in scripts]}
        print(dumps({**plan_to_json(planned), **further}, indent=1))
    else:
        show.plan(planned, gpu_hours(planned), scripts)
    return 0


def advise(options: argparse.Namespace) -> int:
    from orchestrator.advise import advice_recipe, eager_alone, write_advice
    from orchestrator.conduct import conduct
    from orchestrator.executor import resolve_executor

    with _messages(options):
        executor = resolve_executor(options.executor)
        recipe, cells, target = _cells(options, executor)
        planned = _judged(options, advice_recipe(recipe), eager_alone(cells), target)
        show.plan_summary(planned)
        paths = Store(options.store).sweep(planned.name)
        code = conduct(paths, planned, target, "new", executor, wait=True, conclude=write_advice)
    if options.json:
        print((paths.report / "advice.json").read_text(), end="")
    return code


def status(options: argparse.Namespace) -> int:
    store = Store(options.store)
    if options.sweep is None:
        return _list(store, options.json)
    paths = store.find(options.sweep)
    planned = read_plan(paths)
    if options.watch:
        from orchestrator.watch import watch

        with _messages(options):
            scheduler = Scheduler() if planned.scheduler == "slurm" else None
            watch(paths, planned, restart_queue=False, scheduler=scheduler)
    jobs = _jobs(open_submissions(paths))
    states = read_states(paths, planned, jobs)
    if options.json:
        print(dumps(show.states_to_json(planned, states, jobs), indent=1))
    else:
        show.states(planned, states)
        show.slurm(jobs, states)
        show.next_commands(after(paths, planned, states))
    return 0


def report(options: argparse.Namespace) -> int:
    paths = Store(options.store).find(options.sweep)
    planned = read_plan(paths)  # says what is wrong with it, where it is damaged
    from analysis.report import write_report

    with _messages(options):
        _settle(paths, planned)
    with writing(paths):
        made = write_report(paths)
    if options.json:
        print((paths.report / "report.json").read_text(), end="")
    else:
        show.report(paths)
    return made.exit_code


def _settle(paths: SweepPaths, planned: Plan) -> None:
    """Outcomes of runs that ended with their job, before anything is said of them."""
    from orchestrator.postmortem import bury

    submissions = open_submissions(paths)
    if submissions:
        scheduler = Scheduler()
        show.slurm(scheduler.look(submissions), {})
        bury(paths, read_states(paths, planned, scheduler.settled(submissions)))


def logs(options: argparse.Namespace) -> int:
    from orchestrator.logs import followed, shown

    run = RunPaths(_find_run(Store(options.store), options.run))
    planned = read_plan(SweepPaths(run.root.parent.parent))
    text = (followed if options.follow else shown)(run, planned, options.attempt, options.rank)
    for part in text:
        print(part, end="", flush=True)
    return 0


def cancel(options: argparse.Namespace) -> int:
    from orchestrator.cancel import cancel, choose

    paths = Store(options.store).find(options.sweep)
    planned = read_plan(paths)
    going = cancel(paths, planned, choose(planned, options.runs))
    if options.json:
        print(json.dumps({"cancelled": going}))
    else:
        show.cancelled(planned, len(going), chosen=bool(options.runs))
    return 0


def resume(options: argparse.Namespace) -> int:
    from orchestrator.conduct import conduct
    from orchestrator.executor import check_executor, resolve_executor

    with _messages(options):
        paths = Store(options.store).find(options.sweep)
        planned = read_plan(paths)
        executor = resolve_executor(options.executor)
        check_executor(planned, executor)
        target = _target(executor, options, planned.cluster)
        policy: Policy = "failed" if options.failed else "unfinished"
        code = conduct(paths, planned, target, policy, executor, wait=not options.no_wait)
    _print_json(options, paths, planned)
    return code


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "sweep": sweep,
    "plan": plan,
    "advise": advise,
    "status": status,
    "report": report,
    "logs": logs,
    "cancel": cancel,
    "resume": resume,
}


def _plan(options: argparse.Namespace, executor: Executor) -> tuple[Plan, Target]:
    recipe, cells, target = _cells(options, executor)
    return _judged(options, recipe, cells, target), target


def _cells(options: argparse.Namespace, executor: Executor) -> tuple[Recipe, Sequence[ResolvedCell], Target]:
    """The recipe, those of its cells that were picked, and what they are to be judged against."""
    from orchestrator.recipe import load
    from orchestrator.sweep import expand, pick

    recipe = load(options.recipe, options.overrides)
    target = _target(executor, options, recipe.cluster)
    return recipe, pick(expand(recipe, target.device), options.only), target


def _judged(options: argparse.Namespace, recipe: Recipe, cells: Sequence[ResolvedCell], target: Target) -> Plan:
    from orchestrator.inputs import check_inputs
    from orchestrator.plan import check_budget, gpu_hours, make_plan

    planned = make_plan(recipe, cells, target)
    check_budget(gpu_hours(planned), options.max_gpu_hours)
    check_inputs(planned)
    return planned


def _target(executor: Executor, options: argparse.Namespace, named: str) -> Target:
    """What runs are placed on; ``named`` is the profile of the recipe, or of the plan."""
    asked = options.cluster
    if executor == "slurm":
        from orchestrator.cluster import find_cluster
        from orchestrator.profile_file import load_profile

        return find_cluster(load_profile(named if asked is None else asked), Store(options.store).root)
    from orchestrator.executor import outage
    from orchestrator.host import this_host

    if asked is not None:
        raise wrong("--cluster", f"{asked}: profiles are for Slurm, and runs would be made on this host",
                    "leave it out, or submit with --executor slurm")  # fmt: skip
    if options.executor == "auto" and (words := outage()):
        show.outage(words)
    if named:
        show.unused_cluster(named)
    return this_host()


def _messages(options: argparse.Namespace) -> contextlib.redirect_stdout[TextIO]:
    """Where messages for people go: away from standard output, where a program is to read that."""
    return contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout)


def _print_json(options: argparse.Namespace, paths: SweepPaths, planned: Plan) -> None:
    """The report's JSON, or the runs' states where nobody waited for a report."""
    if options.json and options.no_wait:
        jobs = _jobs(open_submissions(paths))
        print(dumps(show.states_to_json(planned, read_states(paths, planned, jobs), jobs), indent=1))
    elif options.json:
        print((paths.report / "report.json").read_text(), end="")


def _jobs(submissions: Sequence[Submission]) -> Optional[Jobs]:
    """What Slurm says of the jobs of ``submissions``; None where there are none, and it is not asked."""
    return Scheduler().look(submissions) if submissions else None


def _list(store: Store, as_json: bool) -> int:
    plans: dict[str, Plan] = {}
    submissions: list[Submission] = []
    code = 0
    for name in store.names():
        try:
            plans[name] = read_plan(store.sweep(name))
            submissions += open_submissions(store.sweep(name))
        except SystemFault as fault:
            print(f"error: {fault}", file=sys.stderr)
            code = fault.exit_code
            plans.pop(name, None)
    jobs = _jobs(submissions)
    rows = [(name, read_states(store.sweep(name), planned, jobs)) for name, planned in plans.items()]
    if as_json:
        print(dumps([{"sweep": name, "runs": show.counts(states)} for name, states in rows], indent=1))
    else:
        show.sweeps(rows, store.root)
        show.slurm(jobs, {})
    return code


def _find_run(store: Store, wanted: str) -> Path:
    """The folder of the run that ``wanted`` names: the beginning of its id, after its sweep's name and / if need be."""
    sweep, _, beginning = wanted.rpartition("/")
    names = [sweep] if sweep else store.names()
    folders = [store.sweep(name).root / "runs" for name in names]
    found = sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.name.startswith(beginning))  # fmt: skip
    chosen = [path for path in found if path.name == beginning] or found
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise wrong("", f"no run {wanted!r} in {store.root}", "python -m orchestrator status SWEEP lists runs")
    shown = ", ".join(f"{path.parent.parent.name}/{path.name}" for path in chosen[:8])
    raise wrong("", f"{wanted!r} may be {len(chosen)} runs", f"write more of it: {shown}")
