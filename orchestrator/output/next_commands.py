"""Suggest the commands to type next, in a form that works from the current folder."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.contract.paths import SweepPaths
from launch.contract.plan import Margins, Plan
from orchestrator import PROGRAM
from orchestrator.errors import InputError
from orchestrator.recipe.recipe import load
from orchestrator.recipe.wrapped_commands import RECIPE_FILE
from orchestrator.sweeps.report_process import read_needed_runs
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.store import default_store


def print_next_commands(commands: Sequence[str]) -> None:
    if commands:
        print("next:", *(f"\n  {command}" for command in commands), sep="")


def print_left_running(sweep: SweepPaths, plan: Plan) -> None:
    """Print, after Ctrl-C, how to follow or cancel the runs, which continue."""
    print(f"\n{plan.name} keeps running without this command. To follow it, or to end it:")
    print(*(f"  {command}" for command in suggest_while_running(sweep, plan)), sep="\n")


def suggest_after(
    sweep: SweepPaths, plan: Plan, states: Mapping[str, RunState], *, reported: bool = False
) -> list[str]:
    """Return the commands that make sense in these states. ``reported``: the user has just seen the report."""
    commands = []
    if any(state.alive for state in states.values()):
        commands += suggest_while_running(sweep, plan)
    elif any(map(_is_resumed, states.values())) or read_needed_runs(sweep, plan, states):
        commands.append(format_command(f"resume {plan.name}", sweep))
    failed = [state for state in states.values() if state.failed]
    if failed:
        commands.append(format_command(f"logs {failed[0].run_id}", sweep))
    if not all(map(_is_resumed, failed)):
        commands.append(format_command(f"resume {plan.name} --failed", sweep))
    if not reported and any(state.finished for state in states.values()):
        commands.append(format_command(f"report {plan.name}", sweep))
    return commands


def _is_resumed(state: RunState) -> bool:
    """Return whether `resume` begins the run again without --failed."""
    return state.name in ("PLANNED", "INTERRUPTED", "CANCELLED") or (state.failed and not state.ended_by_itself)


def suggest_while_running(sweep: SweepPaths, plan: Plan) -> list[str]:
    return [format_command(f"status {plan.name} --watch", sweep), cancel_command(sweep, plan)]


def cancel_command(sweep: SweepPaths, plan: Plan) -> str:
    return format_command(f"cancel {plan.name}", sweep)


def repeat_command(sweep: SweepPaths, plan: Plan, repeats: int) -> str:
    """Return the command that plans ``plan`` again with ``repeats`` repeats and keeps the existing runs; "" if there is none."""
    if plan.overrides is None:
        return _wrap_command(sweep, plan, repeats) if plan.recipe_file == RECIPE_FILE else ""
    overrides = [text for text in plan.overrides if text.partition("=")[0] != "repeats"]
    words = [
        _recipe(plan),
        *overrides,
        f"repeats={repeats}",
        *(word for one in plan.only for word in ("--only", one)),
    ]
    words += ["--even-if-oom"] if plan.even_if_oom else []
    words += ["--cluster", plan.cluster] if plan.cluster else []
    return format_command(f"sweep {shlex.join(words)}", sweep)


def _recipe(plan: Plan) -> str:
    """Return the recipe's file, or with a placeholder for its folder if the current folder does not show it.

    A plan has no folder. A recipe of ``./recipes`` or a shipped one may have the name of its file alone.
    """
    file = Path(plan.recipe_file)
    try:
        shown = os.path.lexists(file) or load(file, plan.overrides or ()).text == plan.recipe
    except InputError:
        shown = False
    return plan.recipe_file if shown else f"FOLDER/{plan.recipe_file}"


def _wrap_command(sweep: SweepPaths, plan: Plan, repeats: int) -> str:
    spec, margins, usual = plan.cells[-1].run_spec, plan.margins, Margins()
    shared = shlex.split(spec.command.run)
    sides = {"--eager": spec.command.eager, "--graphed": spec.cuda_graph.arguments}
    options: dict[str, object] = {option: shlex.join([*shared, *words]) for option, words in sides.items()}
    options |= {"--steps": spec.training.steps, "--ranks": spec.parallelism.world_size, "--repeats": repeats}
    options |= {"--loss-margin": margins.loss} if margins.loss != usual.loss else {}
    options |= {"--grad-norm-margin": margins.grad_norm} if margins.grad_norm != usual.grad_norm else {}
    words = [word for option, value in options.items() for word in (option, str(value))]
    words += [word for name in margins.allow_differences for word in ("--allow-difference", name)]
    words += ["--cluster", plan.cluster] if plan.cluster else []
    elsewhere = Path(spec.command.workdir) != Path.cwd()
    there = f"cd {shlex.quote(spec.command.workdir)} && " if elsewhere else ""
    return there + format_command(f"wrap {shlex.join(words)}", sweep, elsewhere=elsewhere)


def format_command(verb: str, sweep: SweepPaths, *, elsewhere: bool = False) -> str:
    """Return a complete command line, with --store if the sweep is not in the default store.

    A command that runs ``elsewhere``, in another folder, has absolute paths.
    """
    words = [*_program(elsewhere), verb]
    store = sweep.root.parent.absolute() if elsewhere else sweep.root.parent
    if store != default_store():
        words += ["--store", shlex.quote(str(store))]
    return " ".join(words)


def _program(elsewhere: bool) -> list[str]:
    """Return the words that start this program. Name the installed command if a shell finds the same one."""
    found = shutil.which(PROGRAM)
    return [PROGRAM] if found and Path(found).samefile(sys.argv[0]) else [_python(elsewhere), "-m", "orchestrator"]


def _python(elsewhere: bool) -> str:
    """Return the shortest word that starts this interpreter from the current folder, or from another one (``elsewhere``)."""
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found is not None and Path(found).absolute() == Path(sys.executable).absolute():
            return name
    relative = os.path.relpath(sys.executable)
    return sys.executable if elsewhere or relative.startswith("..") else relative
