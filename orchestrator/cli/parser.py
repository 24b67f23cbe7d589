"""The parser: a function a verb, and what verbs share."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn, TypeAlias

_OF_A_SWEEP = """exit codes:
  0  every verdict passes and every outcome is as expected
  1  the input is wrong (recipe, option, name)
  2  the system failed, or a run was lost or never ran
  3  a verdict failed, an outcome was not the expected one, or a pair is INCOMPARABLE
  4  inconclusive only
"""
_OF_COMPARE = """exit codes:
  0  nothing is worse than before
  1  the input is wrong (option, name, a file that is no report)
  2  the system failed, or a run of the second sweep has no outcome
  3  something is worse: an outcome, a verdict, a speed-up, memory, a cell that has gone or came and does not pass
  4  nothing is worse, but what was known before cannot be told any more
"""
_OF_BISECT = """exit codes:
  0  the smallest set that fails, or the first layer that differs, is named
  1  the input is wrong (option, name), the run does not fail so, or there is no smaller set to try
  2  the system failed, or a run was lost or never ran
  4  it cannot be told: nothing fails any more, what a smaller set does is unclear, or eager runs differ as early
"""
_OF_EXPORT = """what a cell asks for and the target cannot say is told on standard error, a line each

exit codes:
  0  printed
  1  the input is wrong (recipe, option)
"""
_OF_ANY = "  130, 141  ended by Ctrl-C, or by a closed pipe before the answer was known\n"
_NOT_RUN = (
    "Cells rejected by a rule, and cells that this host or this cluster cannot run, are listed and are no failure.\n"
)


class Parser(argparse.ArgumentParser):
    """argparse, with exit code 1 for wrong input."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(1, f"error: {message}\n")


Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"


def parser() -> Parser:
    """The parser of every verb."""
    top = Parser(
        prog="python -m orchestrator",
        description="Settles which CUDA-graph implementation and scope is correct, fits in memory and is fastest.",
        epilog="example:\n  python -m orchestrator sweep recipes/tiny_moe.yaml\n\n" + _OF_A_SWEEP + _OF_ANY + _NOT_RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for add in (_sweep, _plan, _advise, _status, _report, _compare, _bisect, _logs, _cancel, _resume, _export):
        verb = add(verbs)
        verb.add_argument(
            "--store",
            type=Path,
            metavar="FOLDER",
            help="where sweeps are kept (default: $ORCHESTRATOR_STORE, else ./sweeps)",
        )
    return top


def _verb(verbs: Verbs, name: str, text: str, example: str, exit_codes: str = _OF_A_SWEEP + _OF_ANY + _NOT_RUN) -> Parser:  # fmt: skip
    return verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example:\n  python -m orchestrator {example}\n\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _sweep(verbs: Verbs) -> Parser:
    verb = _verb(
        verbs, "sweep", "run a recipe's cells and write the report", "sweep recipes/tiny_moe.yaml training.steps=50"
    )
    _recipe_arguments(verb)
    _target_arguments(verb)
    _no_wait(verb)
    _json(verb)
    return verb


def _plan(verbs: Verbs) -> Parser:
    verb = _verb(
        verbs,
        "plan",
        "show what sweep would do, and do nothing",
        "plan recipes/gpt_oss_20b.yaml --only cuda_graph.impl=transformer_engine",
    )
    _recipe_arguments(verb)
    _target_arguments(verb)
    _json(verb)
    return verb


def _advise(verbs: Verbs) -> Parser:
    verb = _verb(
        verbs,
        "advise",
        "run a recipe's eager cells for a minute, and say whether graphs can help and which to sweep",
        "advise recipes/launch_bound.yaml",
    )
    _recipe_arguments(verb)
    _target_arguments(verb)
    _json(verb)
    return verb


def _status(verbs: Verbs) -> Parser:
    verb = _verb(verbs, "status", "show the state of a sweep's runs, or list all sweeps", "status tiny_moe --watch")
    verb.add_argument("sweep", nargs="?", help="name of a sweep; all sweeps are listed without one")
    verb.add_argument("--watch", action="store_true", help="go on showing until nothing runs any more")
    _json(verb)
    return verb


def _report(verbs: Verbs) -> Parser:
    verb = _verb(
        verbs, "report", "write a sweep's report anew from its records", "report tiny_moe --golden golden/tiny_moe.json"
    )
    verb.add_argument("sweep", help="name of a sweep")
    _junit(verb)
    verb.add_argument(
        "--golden",
        type=Path,
        metavar="FILE",
        help="write what compare reads of it, for a later sweep to be held against",
    )
    _json(verb)
    return verb


def _compare(verbs: Verbs) -> Parser:
    verb = _verb(
        verbs,
        "compare",
        "hold a sweep against an earlier one, or against a golden file, and say what is worse",
        "compare golden/tiny_moe.json tiny_moe --junit compare.xml",
        _OF_COMPARE + _OF_ANY,
    )
    sides = "name of a sweep, its folder, or a file: a report.json, or what report --golden wrote"
    verb.add_argument("before", metavar="A", help=f"what was: {sides}")
    verb.add_argument("after", metavar="B", help="what is now: the same")
    verb.add_argument(
        "--memory-tolerance",
        type=_share,
        metavar="SHARE",
        help="by how much a peak may rise before it is worse (default: 0.05 of it)",
    )
    _junit(verb)
    _json(verb)
    return verb


def _bisect(verbs: Verbs) -> Parser:
    verb = _verb(
        verbs,
        "bisect",
        "run smaller sets of what a failing run captures, and name the smallest one that fails",
        "bisect qwen3_8l transformer_engine.attn.moe_router-1a2b",
        _OF_BISECT + _OF_ANY,
    )
    verb.add_argument("sweep", help="name of a sweep")
    verb.add_argument("run", help="a graphed run of it that failed or DIVERGED: its id, or enough of its beginning")
    verb.add_argument(
        "--layers",
        action="store_true",
        help="of a run that DIVERGED or ended NUMERIC, name the first layer that computes something else rather than the "
        "smallest set",
    )
    _budget(verb)
    _target_arguments(verb)
    _json(verb)
    return verb


def _logs(verbs: Verbs) -> Parser:
    verb = _verb(
        verbs, "logs", "print a run's log: the first failing rank's, or rank 0's", "logs torch_compile-1a2b3c4d5e-r0"
    )
    verb.add_argument("run", help="a run's id, or enough of its beginning to tell it apart")
    verb.add_argument("--rank", type=int, help="this rank's log")
    verb.add_argument("--attempt", type=int, help="this attempt's log rather than the latest one's")
    verb.add_argument("--follow", action="store_true", help="go on printing until the attempt has ended")
    return verb


def _cancel(verbs: Verbs) -> Parser:
    verb = _verb(
        verbs,
        "cancel",
        "end everything of a sweep that runs or waits, or chosen runs",
        "cancel tiny_moe eager-1a2b3c4d5e-r0",
    )
    verb.add_argument("sweep", help="name of a sweep")
    verb.add_argument("runs", nargs="*", metavar="run", help="a run's id, or enough of its beginning; all without one")
    _json(verb)
    return verb


def _resume(verbs: Verbs) -> Parser:
    verb = _verb(verbs, "resume", "take up a sweep that did not finish", "resume tiny_moe --failed")
    verb.add_argument("sweep", help="name of a sweep")
    verb.add_argument(
        "--unfinished",
        action="store_true",
        help="runs that never began, were interrupted or cancelled, or whose infrastructure failed (the default)",
    )
    verb.add_argument("--failed", action="store_true", help="these, and runs whose outcome was not the expected one")
    _target_arguments(verb)
    _no_wait(verb)
    _json(verb)
    return verb


def _export(verbs: Verbs) -> Parser:
    verb = _verb(
        verbs,
        "export",
        "print a recipe's cells as Megatron-LM's flags, or as Megatron Bridge's",
        "export recipes/qwen3_8l.yaml --to megatron-lm --only cuda_graph.impl=full_iteration",
        _OF_EXPORT + _OF_ANY,
    )
    _cell_arguments(verb)
    verb.add_argument("--to", required=True, choices=("megatron-lm", "bridge"), help="whose flags")
    verb.add_argument(
        "--release",
        choices=("0.16", "main"),
        default="0.16",
        help="whose spelling of graph settings: megatron-core 0.16's, or the main branch's (default: 0.16)",
    )
    return verb


# --- shared by verbs ------------------------------------------------------------------------------------------------


def _recipe_arguments(verb: Parser) -> None:
    _cell_arguments(verb)
    _budget(verb)


def _cell_arguments(verb: Parser) -> None:
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


def _budget(verb: Parser) -> None:
    verb.add_argument("--max-gpu-hours", type=_hours, metavar="H", help="refuse a plan that may take more")


def _target_arguments(verb: Parser) -> None:
    verb.add_argument("--executor", choices=("auto", "slurm", "local", "debug"), default="auto",
                      help="auto: Slurm where it answers, else local; debug: one bundle after another, in the foreground")  # fmt: skip
    verb.add_argument("--cluster", metavar="NAME",
                      help="profile of the Slurm cluster, instead of the one that the recipe names (docs/clusters.md)")  # fmt: skip


def _no_wait(verb: Parser) -> None:
    verb.add_argument("--no-wait", action="store_true", help="submit and return")


def _junit(verb: Parser) -> None:
    verb.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML too, a testcase a cell")


def _json(verb: Parser) -> None:
    verb.add_argument("--json", action="store_true", help="print JSON, for programs")


def _hours(text: str) -> float:
    return _from_zero_on(text, "number of hours")


def _share(text: str) -> float:
    return _from_zero_on(text, "share")


def _from_zero_on(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}, 0 or more")
    return value
