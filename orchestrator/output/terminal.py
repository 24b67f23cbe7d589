"""How plans, states and reports are printed. Everything that a person sees on the terminal is worded here."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.memory.static_memory import state_bytes
from launch.common.atomic_files import number, read_json
from launch.common.text import count, size
from launch.contract.bundle import BundleOrder
from launch.contract.outcomes import DAMAGED_OUTCOME_REMEDY
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan, Reason
from launch.contract.spec import RunSpec
from launch.supervise.attempt import ROOM_SECONDS
from launch.support import known_faults, unsupported
from orchestrator.output.terminal_jobs import blocked_jobs, doubts, faults, job_of, job_to_json
from orchestrator.submit.batch_script import LANE, RUN, TOKEN, BatchScript
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.slurm_jobs import Jobs

MOST_ROWS = 40
"""Cells that a terminal is shown; the report has all."""
MOST_SCRIPTS = 3
"""Batch scripts that a terminal is shown; ``plan --json`` has all."""


# --- plans ----------------------------------------------------------------------------------------------------------


def unused_cluster(name: str) -> None:
    sys.stderr.write(f"cluster {name!r} is left aside: profiles are for Slurm, and runs are made on this host\n")


def outage(words: str) -> None:
    sys.stderr.write(f"{words}: runs are made on this host\n")


def plan_summary(planned: Plan) -> None:
    """One line: what the recipe expands to."""
    print(f"{planned.name}: {_summary(planned)}")


def print_plan(planned: Plan, hours: float, scripts: Sequence[BatchScript] = ()) -> None:
    """The whole plan: bundles with their runs in order, what Slurm will be given, then what will not be run, and why, and
    what is known to be wrong."""
    plan_summary(planned)
    cells = planned.cell_of_run()
    for place, bundle in enumerate(planned.bundles, 1):
        held = size(state_bytes(cells[bundle.run_ids[0]].run_spec))
        print(f"\nbundle {place} of {len(planned.bundles)} ({bundle.bundle_id}), one allocation;", end=" ")
        print(f"weights, gradients and optimizer state of a rank take {held}:")
        for run_id in bundle.run_ids:
            print(f"  {run_id:44} {cells[run_id].label}")
    _batch_scripts(scripts)
    rejected, lacking = ([c for c in planned.cells if c.state == state] for state in ("rejected", "not_runnable"))
    faulty = [c for c in planned.cells if c.state != "rejected" and _is_known_to_be_wrong(c.run_spec)]
    _reasons("rejected by a rule (cannot work anywhere):", [(c.label, c.reasons) for c in rejected])
    _reasons(f"not runnable on this {_where(planned)}:", [(c.label, c.reasons) for c in lacking])
    _reasons(
        "known to compute wrongly, as a verdict is to show:", [(c.label, known_faults(c.run_spec)) for c in faulty]
    )
    if hours:
        print(f"\nat most {hours:.2f} GPU hours, every run to its time limit")


def _summary(planned: Plan) -> str:
    states = Counter(cell.state for cell in planned.cells)
    runs, bundles = sum(len(cell.run_ids) for cell in planned.cells), len(planned.bundles)
    parts = [f"{count('cell', states['run'])} to run ({count('run', runs)} in {count('bundle', bundles)})"]
    if states["not_runnable"]:
        parts.append(f"{states['not_runnable']} not runnable on this {_where(planned)}")
    if states["rejected"]:
        parts.append(f"{states['rejected']} rejected by a rule")
    return ", ".join(parts)


def _where(planned: Plan) -> str:
    return "cluster" if planned.scheduler == "slurm" else "host"


def _batch_scripts(scripts: Sequence[BatchScript]) -> None:
    for place, script in enumerate(scripts[:MOST_SCRIPTS], 1):
        calls = f" by {script.calls} calls of sbatch" if script.calls > 1 else ""
        print(
            f"\n--- batch script {place} of {len(scripts)}, for {_bundles(script)}{calls} ---\n{script.text.rstrip()}"
        )
        print(f"\n--- in which each run's ranks are started by ---\n{script.srun}")
    left = scripts[MOST_SCRIPTS:]
    if left:
        print(f"\n... and {len(left)} more batch scripts, for {_bundles(*left)}: plan --json has all")
    if scripts:
        print(f"\n{TOKEN} is each submission's own, {RUN} each run's; {LANE} counts from 0")


def _bundles(*scripts: BatchScript) -> str:
    return count("bundle", sum(len(script.bundles) for script in scripts))


def _is_known_to_be_wrong(spec: RunSpec) -> bool:
    """And is run all the same."""
    return bool(known_faults(spec)) and not unsupported(spec)


def _reasons(heading: str, cells: Sequence[tuple[str, tuple[Reason, ...]]]) -> None:
    """Labels of cells, those with the same reasons together."""
    groups: dict[tuple[Reason, ...], list[str]] = {}
    for label, reasons in cells:
        groups.setdefault(reasons, []).append(label)
    if groups:
        print(f"\n{heading}")
    for reasons, labels in groups.items():
        print("\n".join(f"  {label}" for label in labels))
        for reason in reasons:
            print(f"    [{reason.rule}] {reason.message}\n      way out: {reason.remedy}")


def ordered(states: Mapping[str, RunState], orders: Sequence[BundleOrder], of_other_plans: int) -> None:
    """One line: what is begun now and what is kept; another where earlier plans of this name made runs."""
    begun = sum(len(order.schedule) for order in orders)
    alive = sum(state.alive for state in states.values())
    kept = sum(state.finished and not state.alive for state in states.values())
    parts = [f"{count('run', begun)} to begin"] if begun else []
    parts += [f"{alive} already running or waiting, adopted"] if alive else []
    parts += [f"{kept} on disk"] if kept else []
    lines = ["; ".join(parts) if parts else "nothing to run"]
    if of_other_plans:
        lines.append(
            f"{of_other_plans} runs of earlier plans of this name are kept, and are not in this plan nor in its report"
        )
    print("\n".join(lines), flush=True)  # a pipe's reader sees it before the first run begins


def unshared_store(paths: SweepPaths) -> None:
    sys.stderr.write(
        f"{paths.root} is in a folder that each host usually has for itself: unless this cluster's nodes see it, no run "
        "will begin; --store names another\n"
    )


def cancelled(planned: Plan, runs: int, *, chosen: bool) -> None:
    if runs:
        print(f"cancelled {count('run', runs)} of {planned.name}; finished runs are kept")
    else:
        print(f"nothing {'of these runs' if chosen else f'of {planned.name}'} runs or waits")


def retried(orders: Sequence[BundleOrder], avoided: Sequence[str]) -> None:
    """What is made again after a failure of the infrastructure."""
    left_aside(avoided)
    print(f"{count('run', sum(len(order.schedule) for order in orders))} to begin again")


def left_aside(nodes: Sequence[str]) -> None:
    if nodes:
        print(f"not on {', '.join(nodes)}: the infrastructure failed there")


def not_retried(why: str) -> None:
    sys.stderr.write(f"runs that are to be made again are not submitted yet: {why}\n")


# --- states ---------------------------------------------------------------------------------------------------------


def counts(states: Mapping[str, RunState]) -> dict[str, int]:
    return dict(sorted(Counter(str(state.name) for state in states.values()).items()))


def states_to_json(planned: Plan, states: Mapping[str, RunState], jobs: Jobs | None = None) -> dict[str, Any]:
    cells = planned.cell_of_run()
    rows = [
        {
            "run_id": run_id,
            "cell": cells[run_id].label,
            "state": state.name,
            "steps_done": done(state, cells[run_id]),
            "steps": cells[run_id].spec["training"]["steps"],
            "expected": state.expected,
            "message": state.outcome.message if state.outcome else state.damaged,
            "job": job_to_json(state.job),
        }
        for run_id, state in states.items()
    ]
    return {"sweep": planned.name, "counts": counts(states), "runs": rows, "fault": jobs.fault if jobs else ""}


def states(planned: Plan, current: Mapping[str, RunState]) -> None:
    """A row a run, then the counts."""
    cells = planned.cell_of_run()
    for run_id, state in current.items():
        cell = cells[run_id]
        steps = f"{done(state, cell)}/{cell.spec['training']['steps']}"
        print(f"{run_id:44} {state.name:13} {steps:>11}  {cell.label}{_note(state)[:160]}")
    print(f"{planned.name}: {counted(current)}")


def _note(state: RunState) -> str:
    if state.outcome is not None and state.outcome.message:
        return f"  {state.outcome.failure_class}: {state.outcome.message}"
    job = job_of(state)
    return f"  {job}" if job else ""


def warn_damage(paths: SweepPaths, current: Mapping[str, RunState]) -> None:
    """Outcomes that cannot be read, a line each, with the way out."""
    for run_id, state in current.items():
        if state.damaged:
            folder = paths.run(run_id).attempt(state.next_attempt - 1).root
            print(
                f"{folder}/{state.damaged}: how this attempt ended is not known, and no other counts beside it. "
                f"Way out: {DAMAGED_OUTCOME_REMEDY}"
            )


def full_disk(paths: SweepPaths, current: Mapping[str, RunState]) -> None:
    """That runs have no room to write to, where one runs. A quota does not show here."""
    if any(state.name == "RUNNING" for state in current.values()) and not shutil.disk_usage(paths.root).free:
        print(
            f"{paths.root}: no room is left on this disk. A run that cannot write is ended, and is RUNNING until there is "
            f"room for its outcome, {ROOM_SECONDS / 60:g} minutes at most: make room there"
        )


def slurm(jobs: Jobs | None, current: Mapping[str, RunState]) -> None:
    """What is amiss with Slurm, or with jobs in its queue; nothing where it was not asked."""
    for line in () if jobs is None else (*faults(jobs), *doubts(jobs), *blocked_jobs(current)):
        print(line)


def sweeps(rows: Sequence[tuple[str, Mapping[str, RunState]]], root: Path) -> None:
    if not rows:
        print(f"no sweeps in {root}; begin with: python -m orchestrator sweep recipes/tiny_moe.yaml")
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
    """The report in short: its first paragraph, a row a cell, and where the whole stands."""
    content = read_json(paths.report / "summary.json")
    print(f"\n{content['summary']['text']}\n".replace("`", ""))
    rows: list[tuple[str, ...]] = [
        ("cell", "outcome", "loss verdict", "largest difference", "eager / graphed step time")
    ]
    rows += [_report_row(cell) for cell in content["cells"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows[: MOST_ROWS + 1]:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    if content["cells_in_all"] > MOST_ROWS:
        print(f"... and {content['cells_in_all'] - MOST_ROWS} more cells in the report")
    print(f"\nreport: {paths.report / 'report.md'}")


def _report_row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    verdict, speed, difference = cell["verdict"], cell["speed"], cell["max_loss_difference"]
    word = verdict["word"] if verdict else "reference" if cell["impl"] == "none" else "-"
    faster = "-"
    if speed:
        faster = f"{number(speed['ratio']):.2f}x over {count('pair', speed['pairs'])}"
        faster += ", INCONCLUSIVE" if speed["word"] == "INCONCLUSIVE" else ""
    loss = "-" if difference is None else f"{number(difference):.2g}"
    return (cell["label"], cell["outcome"] + (" (unexpected)" if cell["unexpected"] else ""), word, loss, faster)


def advice(paths: SweepPaths) -> None:
    """The advice as it stands on disk."""
    path = paths.report / "advice.md"
    print(f"\n{path.read_text()}\nadvice: {path}")


def answer(path: Path) -> None:
    """What bisect found, as it stands on disk; beside it the report, where there is one."""
    report = path.with_name("report.md")
    print(f"\n{path.read_text()}\nanswer: {path}", *([f"report: {report}"] if report.exists() else []), sep="\n")


def next_commands(lines: Sequence[str]) -> None:
    print("next:" if lines else "", *(f"\n  {line}" for line in lines), sep="")


def left_running(name: str, lines: Sequence[str]) -> None:
    """After Ctrl-C: what was begun goes on."""
    print(f"\n{name} goes on without this command. To follow it, or to end it:")
    print(*(f"  {line}" for line in lines), sep="\n")
