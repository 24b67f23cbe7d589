"""Print the states of runs, and what is wrong with their records."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launch.common.atomic_files import members
from launch.common.grouped import grouped
from launch.common.text import align, one_line, size
from launch.contract.outcomes import DAMAGED_OUTCOME_REMEDY
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan
from launch.supervise.attempt import ROOM_SECONDS
from orchestrator import PROGRAM
from orchestrator.output.jobs import describe_job
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.slot_holders import SlotHolder
from orchestrator.sweeps.slurm_jobs import Jobs


def count_states(states: Mapping[str, RunState]) -> dict[str, int]:
    """Count runs by the name of their state."""
    return dict(sorted(Counter(str(state.name) for state in states.values()).items()))


def format_counts(states: Mapping[str, RunState]) -> str:
    return ", ".join(f"{runs} {name}" for name, runs in count_states(states).items()) or "no runs"


def format_steps(state: RunState, cell: Cell) -> str:
    return f"{steps_done(state, cell)}/{cell.spec['training']['steps']}"


def steps_done(state: RunState, cell: Cell) -> int:
    """Return the number of steps of the latest attempt, or of all steps if its results are intact."""
    if state.has_results:
        return int(cell.spec["training"]["steps"])
    return state.steps_done


def states_to_json(
    plan: Plan,
    states: Mapping[str, RunState],
    jobs: Jobs | None,
    holders: Sequence[SlotHolder],
    needed: Iterable[str],
) -> dict[str, Any]:
    """Return what ``status --json`` prints. ``needed`` are the runs that verdicts need and nobody has ordered."""
    cells = plan.cell_of_run()
    rows = [
        {
            "run_id": run_id,
            "cell": cells[run_id].label,
            "state": state.name,
            "steps_done": steps_done(state, cells[run_id]),
            "steps": cells[run_id].spec["training"]["steps"],
            "expected": state.expected,
            "message": state.outcome.message if state.outcome else state.damaged or state.why_unbegun,
            "job": state.job and members(state.job, "job_id", "state", "reason", "expected_start", "nodes"),
        }
        for run_id, state in states.items()
    ]
    return {
        "sweep": plan.name,
        "counts": count_states(states),
        "runs": rows,
        "needed_runs": sorted(needed),
        "fault": jobs.fault if jobs else "",
        "slots_held_by_others": [asdict(held) | {"sweep": str(held.sweep.root)} for held in holders],
    }


def print_states(plan: Plan, states: Mapping[str, RunState]) -> None:
    """Print a row for each run, then the counts."""
    cells = plan.cell_of_run()
    rows = [_row(state, cells[run_id]) for run_id, state in states.items()]
    heads = ("run", "state", "steps", "cell", "note" if any(row[-1] for row in rows) else "")
    # Print one text: printing thousands of small ones would take as long as reading the records.
    print("\n".join([*align([heads, *rows]), f"{plan.name}: {format_counts(states)}"]))


def _row(state: RunState, cell: Cell) -> tuple[str, ...]:
    return state.run_id, state.name, format_steps(state, cell), cell.label, one_line(_note(state))[:160]


def _note(state: RunState) -> str:
    if state.abandoned and state.outcome is not None:
        # The state is that of the attempt before.
        again = f"attempt {state.next_attempt} is ordered and has not begun; before it"
        return ": ".join(filter(None, [again, _note(replace(state, abandoned=False))]))
    if state.outcome is not None and state.outcome.message:
        # The class of an exception that no row of the table knows is its type, with which its message begins.
        kind, message = state.outcome.failure_class, state.outcome.message
        return f"{kind}: {message}" if kind and not message.startswith(f"{kind}: ") else message
    return state.why_unbegun or describe_job(state)


def warn_damage(paths: SweepPaths, states: Mapping[str, RunState]) -> None:
    """Print a line for each outcome that cannot be read, with its fix."""
    for run_id, state in states.items():
        if state.damaged:
            folder = paths.run(run_id).attempt(state.next_attempt - 1).root
            print(
                f"{folder}/{state.damaged}: how this attempt ended is unknown, and no other attempt counts in its place. "
                f"Fix: {DAMAGED_OUTCOME_REMEDY}"
            )


def print_needed_runs(run_ids: Iterable[str]) -> None:
    """Print a line for each perturbed run that a verdict of the report needs and nobody has ordered."""
    for run_id in sorted(run_ids):
        print(
            f"{run_id} has not run yet, but a verdict needs it, because eager repeats are bitwise equal (docs/verdicts.md)"
        )


def describe_full_disk(paths: SweepPaths, states: Mapping[str, RunState]) -> list[str]:
    """Return a line if the disk is full while a run is RUNNING. A quota is not detected."""
    if all(state.name != "RUNNING" for state in states.values()) or shutil.disk_usage(paths.root).free:
        return []
    return [
        f"{paths.root}: the disk is full. A run that cannot write is stopped. It stays RUNNING until its outcome can be "
        f"written, for at most {ROOM_SECONDS / 60:g} minutes. Fix: free space there"
    ]


def describe_slots(holders: Sequence[SlotHolder]) -> list[str]:
    """Return a line for each supervisor of another sweep that holds slots for which this one waits.

    It does not name the run, so that a command that prints each new line does not repeat itself for every run of the other sweep.
    """
    return [
        f"queued runs wait for slot {', '.join(slots)} of this host: {held.sweep.root} uses it (process {held.pid}, since "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(held.since))})"
        for held, slots in grouped((replace(held, slot="", run_id=""), held.slot) for held in holders).items()
    ]


def print_sweeps(sweeps: Sequence[tuple[str, int, Mapping[str, RunState]]], root: Path) -> None:
    """Print a line for each sweep of the store at ``root``, with its bytes on disk."""
    if not sweeps:
        print(f"no sweeps in folder {root.absolute()}; start one with: {PROGRAM} sweep tiny_moe")
        return
    rows = [(name, str(len(states)), size(on_disk), format_counts(states)) for name, on_disk, states in sweeps]
    print(*align([("sweep", "runs", "on disk", "states"), *rows]), sep="\n")
