"""The command line: verbs parsed here, done in orchestrator.commands, and errors turned into one message each.

Nothing heavier than argparse is imported before a verb is known, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Optional

EXIT_CODES = """exit codes:
  0  every verdict passes and every outcome is as expected
  1  the input is wrong (recipe, option, name)
  2  the system failed, or a run was lost or never ran
  3  a verdict failed, an outcome was not the expected one, or a pair is INCOMPARABLE
  4  inconclusive only
  130, 141  ended by Ctrl-C, or by a closed pipe before the answer was known
Cells rejected by a rule, and cells that this host or this cluster cannot run, are listed and are no failure.
"""

CLOSED_PIPE = 141
"""What shells report for a command whose reader went away before it had said how things are."""
INTERRUPTED = 130
"""What shells report for a command ended by Ctrl-C."""


def parser() -> argparse.ArgumentParser:
    """The parser of every verb."""
    top = _Parser(
        prog="python -m orchestrator",
        description="Settles which CUDA-graph implementation and scope is correct, fits in memory and is fastest.",
        epilog="example:\n  python -m orchestrator sweep recipes/tiny_moe.yaml\n\n" + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    sweep = _verb(
        verbs, "sweep", "run a recipe's cells and write the report", "sweep recipes/tiny_moe.yaml training.steps=50"
    )
    _recipe_arguments(sweep)
    plan = _verb(
        verbs,
        "plan",
        "show what sweep would do, and do nothing",
        "plan recipes/gpt_oss_20b.yaml --only cuda_graph.impl=transformer_engine",
    )
    _recipe_arguments(plan)
    advise = _verb(
        verbs,
        "advise",
        "run a recipe's eager cells for a minute, and say whether graphs can help and which to sweep",
        "advise recipes/launch_bound.yaml",
    )
    _recipe_arguments(advise)
    status = _verb(verbs, "status", "show the state of a sweep's runs, or list all sweeps", "status tiny_moe --watch")
    status.add_argument("sweep", nargs="?", help="name of a sweep; all sweeps are listed without one")
    status.add_argument("--watch", action="store_true", help="go on showing until nothing runs any more")
    report = _verb(verbs, "report", "write a sweep's report anew from its records", "report tiny_moe")
    report.add_argument("sweep", help="name of a sweep")
    logs = _verb(
        verbs, "logs", "print a run's log: the first failing rank's, or rank 0's", "logs torch_compile-1a2b3c4d5e-r0"
    )
    logs.add_argument("run", help="a run's id, or enough of its beginning to tell it apart")
    logs.add_argument("--rank", type=int, help="this rank's log")
    logs.add_argument("--attempt", type=int, help="this attempt's log rather than the latest one's")
    logs.add_argument("--follow", action="store_true", help="go on printing until the attempt has ended")
    cancel = _verb(
        verbs,
        "cancel",
        "end everything of a sweep that runs or waits, or chosen runs",
        "cancel tiny_moe eager-1a2b3c4d5e-r0",
    )
    cancel.add_argument("sweep", help="name of a sweep")
    cancel.add_argument(
        "runs", nargs="*", metavar="run", help="a run's id, or enough of its beginning; all without one"
    )
    resume = _verb(verbs, "resume", "take up a sweep that did not finish", "resume tiny_moe --failed")
    resume.add_argument("sweep", help="name of a sweep")
    resume.add_argument(
        "--unfinished",
        action="store_true",
        help="runs that never began, were interrupted or cancelled, or whose infrastructure failed (the default)",
    )
    resume.add_argument("--failed", action="store_true", help="these, and runs whose outcome was not the expected one")
    for verb in (sweep, plan, advise, resume):
        _target_arguments(verb)
    for verb in (sweep, resume):
        verb.add_argument("--no-wait", action="store_true", help="submit and return")
    for verb in verbs.choices.values():
        verb.add_argument(
            "--store",
            type=Path,
            metavar="FOLDER",
            help="where sweeps are kept (default: $ORCHESTRATOR_STORE, else ./sweeps)",
        )
        if verb is not logs:
            verb.add_argument("--json", action="store_true", help="print JSON, for programs")
    return top


class _Parser(argparse.ArgumentParser):
    """argparse, with exit code 1 for wrong input."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(1, f"error: {message}\n")


def _verb(verbs: argparse._SubParsersAction[_Parser], name: str, text: str, example: str) -> _Parser:
    return verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example:\n  python -m orchestrator {example}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _recipe_arguments(verb: _Parser) -> None:
    verb.add_argument("recipe", type=Path, help="a recipe (YAML)")
    verb.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="fields that replace the recipe's: training.steps=50; sweep=null leaves its axes out",
    )
    verb.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="key=value",
        help="pick cells: cuda_graph.impl=torch_compile (may be given again; all must hold)",
    )
    verb.add_argument("--max-gpu-hours", type=_hours, metavar="H", help="refuse a plan that may take more")


def _target_arguments(verb: _Parser) -> None:
    verb.add_argument("--executor", choices=("auto", "slurm", "local", "debug"), default="auto",
                      help="auto: Slurm where it answers, else local; debug: one bundle after another, in the foreground")  # fmt: skip
    verb.add_argument("--cluster", metavar="NAME",
                      help="profile of the Slurm cluster, instead of the one that the recipe names (docs/clusters.md)")  # fmt: skip


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 <= hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of hours, 0 or more")
    return hours


def _parsed(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """The command line. Overrides may stand anywhere, which argparse alone allows before the first option only."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if rest and ("overrides" not in options or any(text.startswith("-") for text in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)} (see {top.prog} {options.verb} --help)")
    return argparse.Namespace(**vars(options) | ({"overrides": [*options.overrides, *rest]} if rest else {}))


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run one command; the value is its exit code."""
    from launch.files import RecordError
    from orchestrator.errors import OrchestratorError

    options = _parsed(arguments)
    try:
        from orchestrator import commands

        return commands.VERBS[options.verb](options)
    except OrchestratorError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        raise
    except (OSError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return OrchestratorError.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def run() -> NoReturn:
    """The process's whole life. A closed pipe downstream (``| head``) never turns a failure into success, and a fault of
    our own is the system's, not the user's, which Python's exit code 1 would say."""
    code = CLOSED_PIPE
    try:
        code = main()
        if sys.stdout is not None:  # as it is where a shell closed it: ``>&-``
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception:
        traceback.print_exc()
        code = 2
    sys.exit(code)
