"""Print a plan: its bundles, its batch scripts, and the cells that will not run."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from launch.common.grouped import grouped
from launch.common.text import count, first_names, size
from launch.contract.plan import MINIMUM_STEPS, WRAPPED, Cell, Plan, PlannedBundle, Reason
from launch.contract.spec import RunSpec
from launch.frameworks import FRAMEWORKS
from launch.frameworks.command_line import STEPS, command_words, observed_steps, other_steps
from orchestrator.errors import Problem
from orchestrator.output.memory import RELIABILITY
from orchestrator.plan.memory_check import MemoryCheck
from orchestrator.submit.batch_script import BUNDLES, CHAIN, RUN, TOKEN, BatchScript

MOST_NAMES = 6
"""The most cells that a sentence names."""
MOST_SCRIPTS = 3
"""The most batch scripts that are printed. ``plan --json`` has all."""


def warn_missing_programs(problems: Sequence[Problem]) -> None:
    for problem in problems:
        sys.stderr.write(
            f"{problem.place}: {problem.message}; the nodes must have it, or every run fails\n    {problem.fix}\n"
        )


def warn_other_steps(plan: Plan) -> None:
    """Warn of a pasted command that trains on after the last step of its run."""
    specs = [cell.run_spec for cell in plan.cells if cell.state == "run" and cell.spec["engine"] == "command"]
    found = {(*other, observed_steps(spec)) for spec in specs if (other := other_steps(spec))}
    for name, given, steps in sorted(found):
        sys.stderr.write(
            f"command.run: {name} {given}, but a run has {steps} steps\n    leave it out, or write {name} {STEPS}, unless the program "
            "ends there by itself\n"
        )


def warn_changed_programs(folders: Sequence[str], files: Sequence[str], plan: Plan, sweep: Path) -> None:
    fix = f"give the sweep another name: name={plan.name}-2"
    if plan.recipe_file == WRAPPED:
        fix = f"move this folder away: {sweep}"
    for name in [*(f"{folder}: its code" for folder in folders), *(f"{file}: it" for file in files)]:
        sys.stderr.write(
            f"{name} has changed since the runs on disk, and they are not repeated\n    to run it as it is now, {fix}\n"
        )


def warn_two_scripts(eager: str, graphed: str) -> None:
    if eager != graphed:
        sys.stderr.write(
            f"--eager runs {eager or 'no script'} and --graphed {graphed or 'no script'}, so any other difference between "
            "these programs looks like an effect of graphs\n    use one script that turns its graphs on by a flag or a "
            "variable\n"
        )


def print_plan_summary(plan: Plan) -> None:
    """Print how many cells run, how many do not, and whether their steps are too few for a verdict."""
    states = Counter(cell.state for cell in plan.cells)
    runs = "up to " * bool(plan.looks) + count("run", sum(len(bundle.run_ids) for bundle in plan.bundles))
    parts = [f"{count('cell', states['run'])} to run ({runs} in {count('bundle', len(plan.bundles))})"]
    if states["not_runnable"]:
        parts.append(f"{states['not_runnable']} not runnable on this {_place(plan)}")
    if states["rejected"]:
        parts.append(f"{states['rejected']} rejected by a rule")
    print(f"{plan.name}: {', '.join(parts)}")
    _print_lack_of_steps(plan)


def print_plan(plan: Plan, hours: float, memory: MemoryCheck, scripts: Sequence[BatchScript]) -> None:
    """Print bundles with their runs in order, batch scripts, cells that will not run and why, known faults, and forecasts."""
    print_plan_summary(plan)
    if not any(cell.graphed for cell in plan.cells):
        print("no cell is graphed, so nothing will be compared: advise RECIPE prints graphs to sweep")
    _print_step_checks([cell.run_spec for cell in _compared_cells(plan)])
    cells = plan.cell_of_run()
    for number, bundle in enumerate(plan.bundles, 1):
        print(f"\nbundle {number} of {len(plan.bundles)} ({bundle.bundle_id}), one allocation", end="")
        if plan.looks:
            early = " or ".join(map(str, plan.looks[:-1]))
            print(f"; up to {plan.looks[-1]} repeats, ends after {early} if verdicts are settled", end="")
        print(":")
        _print_runs(bundle, cells)
        _print_commands({cells[run_id].cell_id: cells[run_id] for run_id in bundle.run_ids}.values())
    if plan.bundles_if_needed:
        print(
            "\nperturbed runs, started only if a verdict needs them (eager repeats are bitwise equal, but graphed runs are "
            "not):"
        )
    for bundle in plan.bundles_if_needed:
        _print_runs(bundle, cells)
    _print_batch_scripts(scripts)
    for heading, state in (
        ("rejected by a rule (no host can run them)", "rejected"),
        (f"not runnable on this {_place(plan)}", "not_runnable"),
    ):
        _print_reasons(heading, [(cell.label, cell.reasons) for cell in plan.cells if cell.state == state])
    faults = [(cell.label, cell.known_faults) for cell in plan.cells if cell.known_faults]
    _print_reasons("known to compute wrong results (a verdict should show it)", faults)
    _print_memory(plan, memory)
    if hours:
        print(f"\nat most {hours:.2f} GPU hours, if every run takes its time limit")


def _compared_cells(plan: Plan) -> list[Cell]:
    """Return the graphed cells that run, here or on another host, and should complete."""
    cells = (cell for cell in plan.cells if cell.graphed and cell.state != "rejected")
    return [cell for cell in cells if cell.expect.outcome == "COMPLETED"]


def _print_lack_of_steps(plan: Plan) -> None:
    """Name the cells that have too few steps for EQUIVALENT, and of which deterministic mode does not ask for equal bits."""
    cells = {cell.label: cell.run_spec for cell in _compared_cells(plan)}
    short = {label: spec for label, spec in cells.items() if _needed_steps(spec) > spec.training.steps}
    short = {label: spec for label, spec in short.items() if not spec.training.deterministic}
    if plan.margins.mode == "quick" or not short:
        return
    checks = ", also with step checks" * any(spec.checked_steps for spec in short.values())
    quick = "" if all(spec.engine == "command" for spec in short.values()) else ", or equivalence.mode=quick"
    print(
        f"{min(spec.training.steps for spec in short.values())} steps are too few: {first_names([*short], MOST_NAMES)} will be "
        f"INCONCLUSIVE unless graphed runs equal eager ones bit for bit. EQUIVALENT needs {MINIMUM_STEPS} steps after the "
        f"capture{checks}: set {plan.steps_option}{max(map(_needed_steps, short.values()))} or more{quick}"
    )


def _needed_steps(spec: RunSpec) -> int:
    return spec.first_compared + MINIMUM_STEPS


def _print_step_checks(specs: Sequence[RunSpec]) -> None:
    numbers = sorted({len(spec.checked_steps) for spec in specs})
    if any(numbers):
        print(f"\nstep checks: {' or '.join(map(str, numbers))} steps of each graphed run are also computed uncaptured")


def _print_memory(plan: Plan, memory: MemoryCheck) -> None:
    ranks = memory.forecasts(plan)
    if ranks:
        print("\nGPU memory of the fullest rank, by forecast:")
    for cell in plan.cells:
        if rank := ranks.get(cell.cell_id):
            print(f"  {size(rank.peak):>10}  {cell.label}" + f"  ({rank.remark})" * bool(rank.remark))
            if warning := memory.warning(cell):
                print(f"    {warning}")
    if ranks:
        print(f"--explain memory CELL prints the terms of a forecast. {RELIABILITY}.")


def print_not_checked(matters: Sequence[str], reason: str) -> None:
    """Print what was not checked. ``reason`` is why Slurm did not answer."""
    if matters:
        print(f"\nnot checked, since {reason} (doctor --cluster NAME checks it where Slurm answers):")
        print(*(f"  {matter}" for matter in matters), sep="\n")


def _print_runs(bundle: PlannedBundle, cells: Mapping[str, Cell]) -> None:
    print("\n".join(f"  {run_id:44} {cells[run_id].label}" for run_id in bundle.run_ids))


def _print_commands(cells: Iterable[Cell]) -> None:
    """Print which commands the cells of engine command will run, and where."""
    for cell in cells:
        if (spec := cell.run_spec).engine == "command":
            print(f"  {cell.label}: cd {spec.command.workdir}; {shlex.join(command_words(spec, {}))}")
            if untried := FRAMEWORKS[spec.command.framework].untried:
                print(f"    untested: framework {spec.command.framework} has not been run {untried}")


def _place(plan: Plan) -> str:
    return "cluster" if plan.scheduler == "slurm" else "host"


def _print_batch_scripts(scripts: Sequence[BatchScript]) -> None:
    for number, script in enumerate(scripts[:MOST_SCRIPTS], 1):
        calls = f" by {script.calls} calls of sbatch" if script.calls > 1 else ""
        print(f"\n--- batch script {number} of {len(scripts)}, for {_count_bundles(script)}{calls} ---")
        print(f"{script.text.rstrip()}\n\n--- it starts the ranks of each run with ---\n{script.srun}")
    rest = scripts[MOST_SCRIPTS:]
    if rest:
        print(f"\n... and {len(rest)} more batch scripts, for {_count_bundles(*rest)}: plan --json prints all")
    if scripts:
        chain = f" {CHAIN} counts from 0." if any(CHAIN in script.text for script in scripts) else ""
        print(f"\nEach submission fills in {TOKEN} and {BUNDLES}, and each run {RUN}.{chain}")


def _count_bundles(*scripts: BatchScript) -> str:
    return count("bundle", sum(len(script.bundles) for script in scripts))


def _print_reasons(heading: str, cells: Sequence[tuple[str, tuple[Reason, ...]]]) -> None:
    """Print the labels of cells, grouped by their reasons."""
    if cells:
        print(f"\n{heading}:")
    for reasons, labels in grouped((reasons, label) for label, reasons in cells).items():
        print("\n".join(f"  {label}" for label in labels))
        for reason in reasons:
            print(f"    [{reason.rule}] {reason.message}\n      fix: {reason.remedy}")
