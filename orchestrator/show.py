"""How plans, states and reports are printed. Everything that a person sees on the terminal is worded here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.record import BundleOrder, Cell, Plan, Reason, SweepPaths
from orchestrator.state import RunState

COMMAND = "python -m orchestrator"


# --- plans ----------------------------------------------------------------------------------------------------------


def plan_summary(planned: Plan) -> None:
    """One line: what the recipe expands to."""
    print(f"{planned.name}: {_summary(planned)}")


def plan(planned: Plan, hours: float) -> None:
    """The whole plan: bundles with their runs in order, then what will not be run, and why."""
    plan_summary(planned)
    cells = planned.cell_of_run()
    for number, bundle in enumerate(planned.bundles, 1):
        print(f"\nbundle {number} of {len(planned.bundles)} ({bundle.bundle_id}), one allocation:")
        for run_id in bundle.run_ids:
            print(f"  {run_id:44} {cells[run_id].label}")
    _reasons(planned, "rejected", "rejected by a rule (cannot work anywhere):")
    _reasons(planned, "not_runnable", "not runnable on this host:")
    if hours:
        print(f"\nat most {hours:.2f} GPU hours, every run to its time limit")


def _summary(planned: Plan) -> str:
    states = Counter(cell.state for cell in planned.cells)
    runs = sum(len(cell.run_ids) for cell in planned.cells)
    parts = [f"{states['run']} cells to run ({runs} runs in {len(planned.bundles)} bundles)"]
    if states["not_runnable"]:
        parts.append(f"{states['not_runnable']} not runnable on this host")
    if states["rejected"]:
        parts.append(f"{states['rejected']} rejected by a rule")
    return ", ".join(parts)


def _reasons(planned: Plan, state: str, heading: str) -> None:
    """Cells that are not run, those with the same reasons together."""
    groups: dict[tuple[Reason, ...], list[str]] = {}
    for cell in planned.cells:
        if cell.state == state:
            groups.setdefault(cell.reasons, []).append(cell.label)
    if groups:
        print(f"\n{heading}")
    for reasons, labels in groups.items():
        print("\n".join(f"  {label}" for label in labels))
        for reason in reasons:
            print(f"    [{reason.rule}] {reason.message}\n      way out: {reason.remedy}")


def ordered(states: Mapping[str, RunState], orders: Sequence[BundleOrder]) -> None:
    """One line: what is begun now and what is kept."""
    begun = sum(len(order.schedule) for order in orders)
    alive = sum(state.alive for state in states.values())
    kept = sum(state.finished and not state.alive for state in states.values())
    parts = [f"{begun} runs to begin"] if begun else []
    parts += [f"{alive} already running or waiting, adopted"] if alive else []
    parts += [f"{kept} on disk"] if kept else []
    print("; ".join(parts) if parts else "nothing to run")


# --- states ---------------------------------------------------------------------------------------------------------


def counts(states: Mapping[str, RunState]) -> dict[str, int]:
    return dict(sorted(Counter(str(state.name) for state in states.values()).items()))


def states_to_json(planned: Plan, states: Mapping[str, RunState]) -> dict[str, Any]:
    cells = planned.cell_of_run()
    rows = [
        {
            "run_id": run_id,
            "cell": cells[run_id].label,
            "state": state.name,
            "steps_done": done(state, cells[run_id]),
            "steps": cells[run_id].spec["training"]["steps"],
            "expected": state.expected,
            "message": state.outcome.message if state.outcome else "",
        }
        for run_id, state in states.items()
    ]
    return {"sweep": planned.name, "counts": counts(states), "runs": rows}


def states(planned: Plan, current: Mapping[str, RunState]) -> None:
    """A row a run, then the counts and what to type next."""
    cells = planned.cell_of_run()
    for run_id, state in current.items():
        cell = cells[run_id]
        steps = f"{done(state, cell)}/{cell.spec['training']['steps']}"
        note = (
            f"  {state.outcome.failure_class}: {state.outcome.message}"
            if state.outcome and state.outcome.message
            else ""
        )
        print(f"{run_id:44} {state.name:13} {steps:>11}  {cell.label}{note[:160]}")
    print(f"{planned.name}: {counted(current)}")
    next_commands(planned, current)


def sweeps(rows: Sequence[tuple[str, Mapping[str, RunState]]], root: Path) -> None:
    if not rows:
        print(f"no sweeps in {root}; begin with: {COMMAND} sweep recipes/tiny_moe.yaml")
    for name, current in rows:
        print(f"{name:32} {counted(current)}")


def counted(current: Mapping[str, RunState]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts(current).items()) or "no runs"


def done(state: RunState, cell: Cell) -> int:
    if state.outcome is not None and state.outcome.results_intact:
        return int(cell.spec["training"]["steps"])
    return state.steps_done


# --- endings --------------------------------------------------------------------------------------------------------


def report(paths: SweepPaths) -> None:
    """The report's first paragraph and table, and where the whole stands."""
    text = (paths.report / "report.md").read_text()
    head = text.split("\n## ", 2)
    print("\n" + head[0].strip())
    print(f"\nreport: {paths.report / 'report.md'}")


def next_commands(planned: Plan, current: Mapping[str, RunState]) -> None:
    """What to type next, given how things stand."""
    names = {state.name for state in current.values()}
    lines = []
    if any(state.alive for state in current.values()):
        lines += [f"{COMMAND} status {planned.name} --watch", f"{COMMAND} cancel {planned.name}"]
    elif names & {"PLANNED", "INTERRUPTED", "CANCELLED"}:
        lines.append(f"{COMMAND} resume {planned.name}")
    failed = [state for state in current.values() if state.failed]
    if failed:
        lines += [f"{COMMAND} logs {failed[0].run_id}", f"{COMMAND} resume {planned.name} --failed"]
    if any(state.finished for state in current.values()):
        lines.append(f"{COMMAND} report {planned.name}")
    print("next:" if lines else "", *(f"\n  {line}" for line in lines), sep="")


def left_running(planned: Plan) -> None:
    """After Ctrl-C: what was begun goes on."""
    print(f"\n{planned.name} goes on without this command. To follow it, or to end it:")
    print(f"  {COMMAND} status {planned.name} --watch\n  {COMMAND} cancel {planned.name}")
