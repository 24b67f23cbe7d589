"""The verb ``wrap``."""

from __future__ import annotations

import argparse
import filecmp
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from analysis.curves.curve import CurveError
from analysis.curves.curve_files import read_curves
from analysis.loss import add_margins, whole_number
from launch.common.checkout import describe_code
from launch.common.command_line import Parser
from launch.common.redact import Secrets
from launch.common.text import count
from launch.contract.plan import WRAPPED, Margins
from launch.contract.records.events import SETTLE_STEPS
from launch.contract.spec import RunSpec
from launch.support.command import ranks_per_node
from orchestrator.cli.arguments import add_allow_empty, add_budget, add_json, add_no_wait, add_target, redirect_messages
from orchestrator.cli.verbs import sweep
from orchestrator.errors import InputError, Problem, input_error
from orchestrator.output.plan import warn_two_scripts
from orchestrator.output.report import print_report
from orchestrator.plan.logged_runs import plan_logs
from orchestrator.recipe.wrapped_commands import WrappedCommands
from orchestrator.sweeps.logged_runs import write_logged_runs
from orchestrator.sweeps.report_process import read_exit_code, write_report
from orchestrator.sweeps.store import Store

EXAMPLE = "wrap --eager 'python train.py --iters {steps}' --graphed 'python train.py --iters {steps} --cuda-graphs'"
LEAST_STEPS = 110
"""Enough steps for a verdict of EQUIVALENT, which needs 100 after the capture."""
FOR_COMMANDS: Mapping[str, tuple[int | None, str]] = {
    "repeats": (3, "number of runs of each program (default: %(default)s)"),
    "steps": (
        LEAST_STEPS,
        "number of optimizer steps to compare; {steps} in a command becomes this number, on a GPU plus three for the profiler "
        "(default: %(default)s)",
    ),
    "ranks": (None, "number of ranks that the program starts (default: its --nproc-per-node, or 1)"),
}
"""The defaults of options that apply only to commands, and what they are."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--eager", required=True, nargs="+", metavar="COMMAND", help="the program without CUDA graphs, in quotes"
    )
    parser.add_argument(
        "--graphed", required=True, nargs="+", metavar="COMMAND", help="the same program with CUDA graphs, in quotes"
    )
    parser.add_argument(
        "--from-logs", action="store_true",
        help="run nothing: --eager and --graphed then name the logs of earlier runs, one per repeat",
    )  # fmt: skip
    parser.add_argument(
        "--capture-step",
        type=whole_number,
        metavar="K",
        help="with --from-logs, compare only the steps after K (default: all steps)",
    )
    for option, (default, what) in FOR_COMMANDS.items():
        parser.add_argument(f"--{option}", type=_positive, default=default, metavar="N", help=what)
    parser.add_argument(
        "--allow-difference", action="append", default=[], metavar="NAME",
        help="allow runs to differ in this flag (without dashes) or provenance field, such as settings.NCCL_ALGO; "
        "may be repeated",
    )  # fmt: skip
    add_margins(parser)
    add_budget(parser)
    add_target(parser)
    add_json(parser)
    add_no_wait(parser)
    add_allow_empty(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.from_logs:
        return _report_logs(arguments)
    if arguments.capture_step is not None:
        raise input_error("--capture-step", "it is only for logs", "add --from-logs, or leave it out")
    workdir = Path.cwd()
    eager, graphed = _only("--eager", arguments.eager), _only("--graphed", arguments.graphed)
    if arguments.steps <= (before := RunSpec().first_measured):
        few = f"{arguments.steps}, but the first {before} steps are a warm-up, a capture and {SETTLE_STEPS} to settle"
        raise input_error(
            "--steps", few, f"set it to {LEAST_STEPS}, enough for a verdict of EQUIVALENT, or at least to {before + 1}"
        )
    code = describe_code(workdir, f"{eager} {graphed}".split())["digest"]
    counts = arguments.steps, arguments.repeats, arguments.ranks or ranks_per_node(eager) or 1
    commands = WrappedCommands(eager, graphed, str(workdir), code, *counts, _margins(arguments))
    text = commands.recipe
    with redirect_messages(arguments):
        print("# counted as graph settings:", "; ".join(found.text for found in commands.differences).replace("`", ""))
        print(f"# the same as a recipe (docs/your_own_job.md):\n{Secrets().hide(text)}")
        warn_two_scripts(*commands.scripts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / WRAPPED
        path.write_text(text)
        planned = {"recipe": path, "overrides": [], "only": [], "even_if_oom": False}
        try:
            return sweep.run(argparse.Namespace(**vars(arguments), **planned))
        except InputError as error:
            # The recipe is printed above, and its file is gone.
            places = ((problem, problem.place.removeprefix(f"{folder}/")) for problem in error.problems)
            raise InputError([replace(problem, place=place) for problem, place in places]) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _margins(arguments: argparse.Namespace) -> Margins:
    allowed = tuple(arguments.allow_difference)
    return Margins(arguments.loss_margin, arguments.grad_norm_margin, allow_differences=allowed)


def _only(option: str, commands: Sequence[str]) -> str:
    if len(commands) > 1:
        raise input_error(
            option, f"{len(commands)} commands", "put the command in quotes, or add --from-logs for files"
        )
    return commands[0]


def _report_logs(arguments: argparse.Namespace) -> int:
    """Write the report on runs of which only logs exist."""
    eager, graphed = ([Path(name) for name in side] for side in (arguments.eager, arguments.graphed))
    for option, (default, _) in FOR_COMMANDS.items():
        if getattr(arguments, option) != default:
            fix = "leave it out: each file is a repeat, and is compared as it is"
            raise input_error(f"--{option.replace('_', '-')}", "it is for commands, not for logs", fix)
    if len(graphed) > len(eager):
        fix = "name an eager log for each, since nothing else shows what graphs changed"
        raise input_error("--graphed", f"{count('log', len(graphed))}, but only {count('eager log', len(eager))}", fix)
    if copies := _find_copies([*eager, *graphed]):
        raise InputError(copies)
    try:
        files = read_curves(eager, graphed)
        plan = plan_logs(files, arguments.capture_step, _margins(arguments))
        paths = Store(arguments.store).sweep(plan.name)
        write_logged_runs(paths, plan, files, files.first_after(arguments.capture_step))
    except CurveError as error:
        raise input_error("--from-logs", str(error), "docs/your_own_job.md says what can be read") from None
    write_report(paths)
    if arguments.json:
        print((paths.report / "report.json").read_text(), end="")
    else:
        print_report(paths)
    return read_exit_code(paths, allow_empty=arguments.allow_empty)


def _find_copies(logs: Sequence[Path]) -> list[Problem]:
    """Return a problem for each pair of equal files. Two runs are unlikely to print the same bytes, including times."""
    return [
        Problem(
            str(copy),
            f"it equals {log} byte for byte, so one may be a copy",
            "name a log of another run, with the time of each step",
        )
        for log, copy in combinations(logs, 2)
        if log.is_file() and copy.is_file() and filecmp.cmp(log, copy, shallow=False)
    ]
