"""Suggest the commands to type next, in a form that works from the current folder."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator import PROGRAM
from orchestrator.sweeps.report_process import read_needed_runs
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.store import default_store


def print_next_commands(commands: Sequence[str]) -> None:
    if commands:
        print("next:", *(f"\n  {command}" for command in commands), sep="")


def print_left_running(sweep: SweepPaths, plan: Plan, to_submit: str = "") -> None:
    """Print, after Ctrl-C, how to follow or cancel the runs, which continue. ``to_submit`` submits runs that have no job yet."""
    print(f"\n{plan.name} keeps running without this command. To follow it, or to end it:")
    print(*(f"  {command}" for command in suggest_while_running(sweep, plan)), sep="\n")
    if to_submit:
        print(f"Some of its runs have no job yet. To submit them:\n  {to_submit}")


def suggest_after(
    sweep: SweepPaths, plan: Plan, states: Mapping[str, RunState], *, reported: bool = False
) -> list[str]:
    """Return the commands that make sense in these states. ``reported``: the user has just seen the report."""
    commands = []
    if any(state.alive for state in states.values()):
        commands += suggest_while_running(sweep, plan)
    elif any(map(_is_resumed, states.values())) or read_needed_runs(sweep, plan, states):
        commands.append(resume_command(sweep, plan))
    failed = [state for state in states.values() if state.failed]
    if failed:
        commands.append(format_command(f"logs {failed[0].run_id}", sweep))
    if not all(_is_resumed(state) or _needs_other_settings(state) for state in failed):
        commands.append(resume_command(sweep, plan, failed=True))
    # The report of a sweep without any run says why nothing runs.
    if not reported and (not states or any(state.finished for state in states.values())):
        commands.append(format_command(f"report {plan.name}", sweep))
    return commands


def _is_resumed(state: RunState) -> bool:
    """Return whether `resume` begins the run again without --failed."""
    again = state.failed and (state.abandoned or not state.ended_by_itself)
    return state.name in ("PLANNED", "INTERRUPTED", "CANCELLED") or again


def _needs_other_settings(state: RunState) -> bool:
    return state.outcome is not None and state.outcome.needs_other_settings


def suggest_while_running(sweep: SweepPaths, plan: Plan) -> list[str]:
    return [format_command(f"status {plan.name} --watch", sweep), cancel_command(sweep, plan)]


def cancel_command(sweep: SweepPaths, plan: Plan) -> str:
    return format_command(f"cancel {plan.name}", sweep)


def resume_command(sweep: SweepPaths, plan: Plan, *, failed: bool = False) -> str:
    return format_command(f"resume {plan.name}{' --failed' if failed else ''}", sweep)


def format_command(verb: str, sweep: SweepPaths) -> str:
    """Return a complete command line, with --store if the sweep is not in the default store."""
    store = sweep.root.parent
    option = [] if store == default_store() else ["--store", shlex.quote(str(store))]
    return " ".join([*_program(), verb, *option])


def _program() -> list[str]:
    """Return the words that start this program. Name the installed command if a shell finds the same one."""
    found = shutil.which(PROGRAM)
    return [PROGRAM] if found and Path(found).samefile(sys.argv[0]) else [_python(), "-m", "orchestrator"]


def _python() -> str:
    """Return the shortest word that starts this interpreter from the current folder."""
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found is not None and Path(found).absolute() == Path(sys.executable).absolute():
            return name
    relative = os.path.relpath(sys.executable)
    return sys.executable if relative.startswith("..") else relative
