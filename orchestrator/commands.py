"""What each verb does: load, decide, act, print.

Imported above is what every verb needs; what only some need they import themselves, so that ``status`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Optional, TextIO

from launch.files import dumps
from launch.record import AttemptPaths, Plan, SweepPaths, plan_to_json
from orchestrator import show
from orchestrator.errors import SystemFault, wrong
from orchestrator.next_steps import after
from orchestrator.state import live_runs, read_states, readable_outcome
from orchestrator.store import Store, ordering, read_plan, writing

if TYPE_CHECKING:
    from orchestrator.host import Host
    from orchestrator.plan import Policy

CANCEL_SECONDS = 30.0


def sweep(options: argparse.Namespace) -> int:
    from orchestrator.conduct import conduct
    from orchestrator.host import resolve_executor, this_host

    with _messages(options):
        executor, host = resolve_executor(options.executor), this_host()
        planned = _plan(options, host)
        show.plan_summary(planned)
        paths = Store(options.store).sweep(planned.name)
        code = conduct(paths, planned, host, "new", executor, wait=not options.no_wait)
    _print_json(options, paths, planned)
    return code


def plan(options: argparse.Namespace) -> int:
    from orchestrator.host import this_host
    from orchestrator.plan import gpu_hours

    planned = _plan(options, this_host())
    if options.json:
        print(dumps({**plan_to_json(planned), "gpu_hours": gpu_hours(planned)}, indent=1))
    else:
        show.plan(planned, gpu_hours(planned))
    return 0


def status(options: argparse.Namespace) -> int:
    store = Store(options.store)
    if options.sweep is None:
        return _list(store, options.json)
    paths = store.find(options.sweep)
    planned = read_plan(paths)
    if options.watch:
        from orchestrator.watch import watch

        with _messages(options):
            watch(paths, planned, restart_queue=False)
    states = read_states(paths, planned)
    if options.json:
        print(dumps(show.states_to_json(planned, states), indent=1))
    else:
        show.states(planned, states)
        show.next_commands(after(paths, planned, states))
    return 0


def report(options: argparse.Namespace) -> int:
    paths = Store(options.store).find(options.sweep)
    read_plan(paths)  # says what is wrong with it, where it is damaged
    from analysis.report import write_report

    with writing(paths):
        made = write_report(paths)
    if options.json:
        print((paths.report / "report.json").read_text(), end="")
    else:
        show.report(paths)
    return made.exit_code


def logs(options: argparse.Namespace) -> int:
    attempt = _attempt(_find_run(Store(options.store), options.run), options.attempt)
    outcome = readable_outcome(attempt)
    rank = options.rank if options.rank is not None else outcome.rank if outcome and outcome.rank is not None else 0
    path = attempt.log(rank)
    if options.rank is not None and not path.exists():
        ranks = sorted(p.stem for p in attempt.logs.glob("rank*.log"))
        raise wrong("--rank", f"rank {rank} left no log", f"there are: {', '.join(ranks) or 'none'}")
    if not path.exists():
        path = attempt.logs / "launcher.log"
    if not path.exists():
        raise wrong("", f"attempt {attempt.number} of {options.run} has left no log", "nothing of it was started")
    print(f"# {attempt.root.parent.parent.name}, attempt {attempt.number}, {path.name}")
    print(path.read_text(errors="replace"), end="")
    return 0


def cancel(options: argparse.Namespace) -> int:
    paths = Store(options.store).find(options.sweep)
    planned = read_plan(paths)
    going = set()
    with ordering(paths), writing(paths):
        for bundle, run_ids in live_runs(paths):
            going.update(run_ids)
            bundle.cancel.touch()
    _wait_until_quiet(paths, planned)
    if options.json:
        print(json.dumps({"cancelled": sorted(going)}))
    else:
        print(
            f"cancelled {len(going)} runs of {planned.name}; finished runs are kept"
            if going
            else f"nothing of {planned.name} runs or waits"
        )
    return 0


def resume(options: argparse.Namespace) -> int:
    from orchestrator.conduct import conduct
    from orchestrator.host import resolve_executor, this_host

    with _messages(options):
        executor = resolve_executor(options.executor)
        paths = Store(options.store).find(options.sweep)
        planned = read_plan(paths)
        policy: Policy = "failed" if options.failed else "unfinished"
        code = conduct(paths, planned, this_host(), policy, executor, wait=not options.no_wait)
    _print_json(options, paths, planned)
    return code


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "sweep": sweep,
    "plan": plan,
    "status": status,
    "report": report,
    "logs": logs,
    "cancel": cancel,
    "resume": resume,
}


def _plan(options: argparse.Namespace, host: Host) -> Plan:
    from orchestrator.inputs import check_inputs
    from orchestrator.plan import check_budget, gpu_hours, make_plan
    from orchestrator.recipe import load
    from orchestrator.sweep import expand, pick

    recipe = load(options.recipe, options.overrides)
    planned = make_plan(recipe, pick(expand(recipe, host.device), options.only), host)
    check_budget(gpu_hours(planned), options.max_gpu_hours)
    check_inputs(planned)
    if recipe.cluster:
        show.unused_cluster(recipe.cluster)
    return planned


def _messages(options: argparse.Namespace) -> contextlib.redirect_stdout[TextIO]:
    """Where messages for people go: away from standard output, where a program is to read that."""
    return contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout)


def _print_json(options: argparse.Namespace, paths: SweepPaths, planned: Plan) -> None:
    """The report's JSON, or the runs' states where nobody waited for a report."""
    if options.json and options.no_wait:
        print(dumps(show.states_to_json(planned, read_states(paths, planned)), indent=1))
    elif options.json:
        print((paths.report / "report.json").read_text(), end="")


def _list(store: Store, as_json: bool) -> int:
    rows, code = [], 0
    for name in store.names():
        paths = store.sweep(name)
        try:
            rows.append((name, read_states(paths, read_plan(paths))))
        except SystemFault as fault:
            print(f"error: {fault}", file=sys.stderr)
            code = fault.exit_code
    if as_json:
        print(dumps([{"sweep": name, "runs": show.counts(states)} for name, states in rows], indent=1))
    else:
        show.sweeps(rows, store.root)
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


def _attempt(run: Path, number: Optional[int]) -> AttemptPaths:
    attempts = {int(path.name): path for path in run.glob("attempts/*") if path.name.isdigit()}
    chosen = number if number is not None else max(attempts, default=0)
    if chosen not in attempts:
        there = ", ".join(map(str, sorted(attempts))) or "none yet"
        raise wrong(
            "--attempt",
            f"run {run.name} has no attempt {chosen}" if number is not None else f"run {run.name} has not begun",
            f"attempts: {there}",
        )
    return AttemptPaths(attempts[chosen])


def _wait_until_quiet(paths: SweepPaths, planned: Plan) -> None:
    deadline = time.monotonic() + CANCEL_SECONDS
    while any(True for _ in live_runs(paths)):
        if time.monotonic() > deadline:
            raise SystemFault(
                f"runs of {planned.name} have not ended {CANCEL_SECONDS:g} s after being asked to; see status {planned.name}"
            )
        time.sleep(0.2)
