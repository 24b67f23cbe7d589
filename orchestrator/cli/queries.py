"""Verbs that tell what is on disk: status, report, compare and logs.

Imported above is what each of them needs; what only some need they import themselves, so that ``status`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from launch.common.atomic_files import RecordError, dumps, read_json, write_bytes, write_json
from launch.contract.paths import RunPaths, SweepPaths
from launch.contract.plan import Plan
from orchestrator.errors import SystemFault, input_error
from orchestrator.output import terminal
from orchestrator.output.next_commands import suggest_after
from orchestrator.sweeps.report_process import write_report
from orchestrator.sweeps.run_state import open_submissions, read_states
from orchestrator.sweeps.slurm_jobs import JobMonitor, Jobs
from orchestrator.sweeps.store import Store, read_plan
from orchestrator.sweeps.submissions import Submission

if TYPE_CHECKING:
    from analysis.compare.golden import Golden


def status(options: argparse.Namespace) -> int:
    store = Store(options.store)
    if options.sweep is None:
        return _list(store, options.json)
    paths = store.find(options.sweep)
    planned = read_plan(paths)
    if options.watch:
        from orchestrator.workflow.watch import watch

        with messages(options):
            scheduler = JobMonitor() if planned.scheduler == "slurm" else None
            watch(paths, planned, restart_queue=False, scheduler=scheduler)
    jobs = jobs_of(open_submissions(paths))
    states = read_states(paths, planned, jobs)
    if options.json:
        print(dumps(terminal.states_to_json(planned, states, jobs), indent=1))
    else:
        terminal.states(planned, states)
        terminal.warn_damage(paths, states)
        terminal.full_disk(paths, states)
        terminal.slurm(jobs, states)
        terminal.next_commands(suggest_after(paths, planned, states))
    return 0


def report(options: argparse.Namespace) -> int:
    paths = Store(options.store).find(options.sweep)
    planned = read_plan(paths)  # says what is wrong with it, where it is damaged
    with messages(options):
        _settle(paths, planned)
    code = write_report(paths)
    if options.junit or options.golden:
        _export(options, paths)
    if options.json:
        print((paths.report / "report.json").read_text(), end="")
    else:
        terminal.report(paths)
    return code


def _settle(paths: SweepPaths, planned: Plan) -> None:
    """Outcomes of runs that ended with their job, before anything is said of them."""
    from orchestrator.sweeps.close_attempts import close_dead_attempts

    submissions = open_submissions(paths)
    if submissions:
        scheduler = JobMonitor()
        terminal.slurm(scheduler.look(submissions), {})
        close_dead_attempts(paths, read_states(paths, planned, scheduler.settled(submissions)))


def _export(options: argparse.Namespace, paths: SweepPaths) -> None:
    """The report for other programs: for what reads JUnit, and for ``compare``."""
    from analysis.compare.cell_changes import SPEED_LOSS, unsure_speeds
    from analysis.compare.golden import golden_to_json, read_golden
    from analysis.compare.junit import junit_of_report

    golden = read_golden(read_json(paths.report / "report.json"))
    if options.junit:
        write_bytes(options.junit, junit_of_report(golden))
    if options.golden:
        write_json(options.golden, golden_to_json(golden))
        for speed in unsure_speeds(golden.cells):
            said = f"too unsure to tell a loss of {SPEED_LOSS:.0%} by: {speed}"
            print(f"{options.golden}: {said}", file=sys.stderr)


def compare(options: argparse.Namespace) -> int:
    from analysis.compare.cell_changes import MEMORY_TOLERANCE
    from analysis.compare.junit import junit_of_comparison
    from analysis.compare.render import format_comparison
    from analysis.compare.sweep_changes import compare_sweeps, comparison_to_json

    tolerance = MEMORY_TOLERANCE if options.memory_tolerance is None else options.memory_tolerance
    before, after = (_golden(Store(options.store), side) for side in (options.before, options.after))
    if not before.cells:
        raise input_error(
            "", f"{options.before}: no cell of it ran: there is nothing to hold another sweep against", ""
        )
    comparison = compare_sweeps(before, after, tolerance)
    if options.junit:
        write_bytes(options.junit, junit_of_comparison(comparison))
    if options.json:
        print(dumps(comparison_to_json(comparison), indent=1))
    else:
        print(format_comparison(comparison, options.before, options.after))
    return comparison.exit_code


def _golden(store: Store, side: str) -> Golden:
    """What ``compare`` is given: a file, or a sweep, of which nothing is written."""
    from analysis.compare.golden import golden_of, read_golden

    if not Path(side).is_file():
        paths = store.find(side)
        read_plan(paths)  # says what is wrong with it, where it is damaged
        return golden_of(paths)
    try:
        return read_golden(read_json(Path(side)))
    except RecordError as error:
        remedy = "report SWEEP writes report.json, and with --golden FILE a golden file"
        raise input_error(side, str(error).removeprefix(f"{Path(side).name}: "), remedy) from None


def logs(options: argparse.Namespace) -> int:
    from orchestrator.cli.run_logs import follow_log, print_log

    run = RunPaths(_find_run(Store(options.store), options.run))
    planned = read_plan(SweepPaths(run.root.parent.parent))
    text = (follow_log if options.follow else print_log)(run, planned, options.attempt, options.rank)
    for part in text:
        print(part, end="", flush=True)
    return 0


def _list(store: Store, as_json: bool) -> int:
    plans: dict[str, Plan] = {}
    submissions: list[Submission] = []
    code = 0
    for name in store.names():
        try:
            plans[name] = read_plan(store.sweep(name))
            submissions += open_submissions(store.sweep(name))
        except SystemFault as fault:
            print(f"error: {fault}", file=sys.stderr)
            code = fault.exit_code
            plans.pop(name, None)
    jobs = jobs_of(submissions)
    rows = [(name, read_states(store.sweep(name), planned, jobs)) for name, planned in plans.items()]
    if as_json:
        print(dumps([{"sweep": name, "runs": terminal.counts(states)} for name, states in rows], indent=1))
    else:
        terminal.sweeps(rows, store.root)
        terminal.slurm(jobs, {})
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
        raise input_error("", f"no run {wanted!r} in {store.root}", "python -m orchestrator status SWEEP lists runs")
    shown = ", ".join(f"{path.parent.parent.name}/{path.name}" for path in chosen[:8])
    raise input_error("", f"{wanted!r} may be {len(chosen)} runs", f"write more of it: {shown}")


# --- shared by verbs ------------------------------------------------------------------------------------------------


def messages(options: argparse.Namespace) -> contextlib.redirect_stdout[TextIO]:
    """Where messages for people go: away from standard output, where a program is to read that."""
    return contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout)


def jobs_of(submissions: Sequence[Submission]) -> Jobs | None:
    """What Slurm says of the jobs of ``submissions``; None where there are none, and it is not asked."""
    return JobMonitor().look(submissions) if submissions else None
