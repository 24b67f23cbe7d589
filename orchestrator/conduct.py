"""Seeing a sweep through: order what may be begun, start it, follow it, report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, Optional

from launch.record import Plan, SweepPaths
from orchestrator import show
from orchestrator.errors import wrong
from orchestrator.host import Host
from orchestrator.next_steps import after, going
from orchestrator.plan import Policy, orders
from orchestrator.state import RunState, live_runs, newest_change, read_states
from orchestrator.store import (
    bundles,
    is_planned,
    ordering,
    runs_of_other_plans,
    write_orders,
    write_plan,
    writing,
)
from orchestrator.submit import run_in_foreground, start_queue
from orchestrator.watch import watch


def conduct(
    paths: SweepPaths, plan: Plan, host: Host, policy: Policy, executor: Literal["local", "debug"], *, wait: bool
) -> int:
    """Carry out what ``policy`` allows of ``plan``; the value is the exit code.

    Without waiting it is 0 once the host's queue has taken the work. With nothing to do it is what the report says.
    """
    with ordering(paths):
        busy = _order(paths, plan, host, policy)
        if busy and executor == "local":
            start_queue(paths)
    try:
        if executor == "debug":
            run_in_foreground(paths)
        if busy and wait:
            watch(paths, plan, restart_queue=executor == "local")
    except KeyboardInterrupt:
        if executor == "local":
            show.left_running(plan.name, going(paths, plan))
        else:
            show.next_commands(after(paths, plan, read_states(paths, plan)))
        raise
    states = read_states(paths, plan)
    code = _report(paths, states, anew=busy) if wait else 0
    show.next_commands(after(paths, plan, states))
    return code


def _order(paths: SweepPaths, plan: Plan, host: Host, policy: Policy) -> bool:
    """Put ``plan`` on disk and order what may be begun; the value is whether anything runs or is to run.

    Raises:
        InputError: the sweep runs by another plan. Two plans at once would judge each other's runs.
    """
    live = sum(len(run_ids) for _, run_ids in live_runs(paths))
    if live and not is_planned(paths, plan):
        message = f"sweep {plan.name!r} is running by another plan ({live} runs run or wait)"
        raise wrong(
            "", message, f"wait for it, cancel it ({going(paths, plan)[1]}), or name this one otherwise: name=..."
        )
    write_plan(paths, plan)
    states = read_states(paths, plan)
    ordered = orders(plan, states, host, policy)
    withdraw_others(paths, plan)
    write_orders(paths, ordered)
    show.ordered(states, ordered, runs_of_other_plans(paths, plan))
    return bool(ordered) or any(state.alive for state in states.values())


def withdraw_others(paths: SweepPaths, plan: Plan) -> None:
    """What an earlier plan ordered, and nobody lives to begin, is not to be taken up beside this plan's runs."""
    kept = {paths.bundle(bundle.bundle_id) for bundle in plan.bundles}
    kept.update(bundle for bundle, _ in live_runs(paths))
    with writing(paths):
        for bundle in bundles(paths):
            if bundle not in kept:
                bundle.order.unlink(missing_ok=True)


def _report(paths: SweepPaths, states: Mapping[str, RunState], *, anew: bool) -> int:
    """Show the report, written ``anew`` or where the one on disk is older than a run; the value is its exit code."""
    code = None if anew else _reported(paths, states)
    if code is None:
        # Only here: a sweep that has nothing to do answers without loading what draws plots.
        from analysis.report import write_report

        with writing(paths):
            code = write_report(paths).exit_code
    show.report(paths)
    return code


def _reported(paths: SweepPaths, states: Mapping[str, RunState]) -> Optional[int]:
    """The exit code of the report on disk, None where there is none or something is newer than it."""
    report = paths.report / "report.json"
    try:
        written = min(report.stat().st_mtime, (paths.report / "report.md").stat().st_mtime)
        code = json.loads(report.read_bytes())["exit_code"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    newest = max(paths.plan.stat().st_mtime, newest_change(paths, states.values()))
    return int(code) if newest < written else None
