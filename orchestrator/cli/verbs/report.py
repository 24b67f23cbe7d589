"""The verb ``report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launch.common.atomic_files import read_json, write_bytes, write_json
from launch.common.command_line import Parser
from launch.contract.paths import SweepPaths
from orchestrator.cli.arguments import add_allow_empty, add_json, add_junit, redirect_messages
from orchestrator.errors import input_error
from orchestrator.output.jobs import print_job_problems
from orchestrator.output.report import print_delivered, print_report, print_tracking
from orchestrator.sweeps.close_attempts import close_dead_attempts
from orchestrator.sweeps.report_process import read_exit_code, track_report, write_report
from orchestrator.sweeps.run_state import open_submissions, read_states
from orchestrator.sweeps.slurm_jobs import JobMonitor
from orchestrator.sweeps.store import Store, read_plan

EXAMPLE = "report tiny_moe --golden golden/tiny_moe.json"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("sweep", help="name of a sweep")
    add_allow_empty(parser)
    add_junit(parser)
    parser.add_argument("--golden", type=Path, metavar="FILE", help="also write a golden file, for compare")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    paths = Store(arguments.store).find(arguments.sweep)
    plan = read_plan(paths)
    if submissions := open_submissions(paths):
        scheduler = JobMonitor()
        with redirect_messages(arguments):
            print_job_problems(scheduler.look(submissions), {})
        close_dead_attempts(paths, read_states(paths, plan, scheduler.settled(submissions)))
    write_report(paths)
    with redirect_messages(arguments):
        print_tracking(paths, plan)
    said = track_report(paths, plan)
    if arguments.junit or arguments.golden:
        _write_exports(paths, Path(plan.recipe_file).stem, arguments)
    if arguments.json:
        print((paths.report / "report.json").read_text(), end="")
    else:
        print_report(paths)
        print_delivered(said)
    return read_exit_code(paths, allow_empty=arguments.allow_empty)


def _write_exports(paths: SweepPaths, recipe: str, arguments: argparse.Namespace) -> None:
    # Imported late: it loads the code that judges, and most commands export nothing.
    from analysis.compare.cell_changes import SPEED_LOSS, judge_alone, unsure_speeds
    from analysis.compare.golden import golden_to_json, read_golden
    from analysis.compare.junit import junit_of_report

    golden, golden_file = read_golden(read_json(paths.report / "report.json")), arguments.golden
    if arguments.junit:
        write_bytes(arguments.junit, junit_of_report(golden, recipe, allow_empty=arguments.allow_empty))
    if golden_file:
        if not golden.cells:
            raise input_error(
                "--golden", f"{golden_file}: no cell of the sweep ran", "take it from a sweep whose cells passed"
            )
        write_json(golden_file, golden_to_json(golden))
        for cell in golden.cells:
            if (found := judge_alone(cell)).change != "changed":
                said = f"{cell.label}: {found.kind}; a later sweep with the same result will not count as worse"
                print(f"{golden_file}: {said}", file=sys.stderr)
        for speed in unsure_speeds(golden.cells):
            print(f"{golden_file}: cannot detect a speed loss of {SPEED_LOSS:.0%} for {speed}", file=sys.stderr)
