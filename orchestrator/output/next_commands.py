"""The commands to type next, as they work from where the user stands."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.store import Store


def format_command(verb: str, sweep: SweepPaths) -> str:
    """``verb`` as a whole command line, with --store where the sweep stands in another store than the default."""
    words = [_python(), "-m", "orchestrator", verb]
    store = sweep.root.parent
    if store != Store().root:
        words += ["--store", shlex.quote(str(store))]
    return " ".join(words)


def suggest_after(sweep: SweepPaths, plan: Plan, states: Mapping[str, RunState]) -> list[str]:
    """What is worth typing, given how things stand."""
    names = {state.name for state in states.values()}
    lines = []
    if any(state.alive for state in states.values()):
        lines += suggest_while_running(sweep, plan)
    elif names & {"PLANNED", "INTERRUPTED", "CANCELLED"}:
        lines.append(format_command(f"resume {plan.name}", sweep))
    failed = [state for state in states.values() if state.failed]
    if failed:
        lines += [
            format_command(f"logs {failed[0].run_id}", sweep),
            format_command(f"resume {plan.name} --failed", sweep),
        ]
    if any(state.finished for state in states.values()):
        lines.append(format_command(f"report {plan.name}", sweep))
    return lines


def suggest_while_running(sweep: SweepPaths, plan: Plan) -> list[str]:
    """What is worth typing while a sweep goes on."""
    return [format_command(f"status {plan.name} --watch", sweep), format_command(f"cancel {plan.name}", sweep)]


def _python() -> str:
    """This interpreter as a shell here would call it."""
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found is not None and Path(found).absolute() == Path(sys.executable).absolute():
            return name
    near = os.path.relpath(sys.executable)
    return sys.executable if near.startswith("..") else near
