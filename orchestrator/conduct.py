"""Seeing a sweep through: order what may be begun, start it, follow it, report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, Optional

from launch.record import Plan, SweepPaths
from orchestrator import show
from orchestrator.host import Host
from orchestrator.plan import Policy, orders
from orchestrator.state import RunState, read_states
from orchestrator.store import write_orders
from orchestrator.submit import run_in_foreground, start_queue
from orchestrator.watch import watch


def conduct(
    paths: SweepPaths, plan: Plan, host: Host, policy: Policy, executor: Literal["local", "debug"], *, wait: bool
) -> int:
    """Carry out what ``policy`` allows of ``plan``; the value is the exit code.

    Without waiting it is 0 once the host's queue has taken the work. With nothing to do it is what the report says.
    """
    states = read_states(paths, plan)
    ordered = orders(plan, states, host, policy)
    write_orders(paths, ordered)
    show.ordered(states, ordered)
    if executor == "debug":
        run_in_foreground(paths)
    elif ordered:
        start_queue(paths)
    if not wait:
        show.next_commands(plan, read_states(paths, plan))
        return 0
    if ordered or any(state.alive for state in states.values()):
        states = _follow(paths, plan)
    code = _reported(paths, states)
    if code is None:
        # Only here: a sweep that has nothing to do answers without loading what draws plots.
        from analysis.report import write_report

        code = write_report(paths).exit_code
    show.report(paths)
    show.next_commands(plan, states)
    return code


def _follow(paths: SweepPaths, plan: Plan) -> dict[str, RunState]:
    try:
        return watch(paths, plan, restart_queue=True)
    except KeyboardInterrupt:
        show.left_running(plan)
        raise


def _reported(paths: SweepPaths, states: Mapping[str, RunState]) -> Optional[int]:
    """The exit code of the report on disk, None where there is none or something is newer than it."""
    content = paths.report / "report.json"
    if not content.exists():
        return None
    newest = max([paths.plan.stat().st_mtime, *(s.outcome.ended for s in states.values() if s.outcome)])
    if newest >= content.stat().st_mtime:
        return None
    return int(json.loads(content.read_text())["exit_code"])
