"""The argument parser: its class, and the arguments that several verbs share."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from launch.common.command_line import Parser
from launch.contract.exit_codes import help_lines
from orchestrator import PROGRAM


def epilog(verb: str, example: str, note: str = "") -> str:
    """Return the end of a verb's help text: a note, an example and the exit codes."""
    return f"{note}example:\n  {PROGRAM} {example}\n\n{help_lines(verb)}"


def add_store(parser: Parser) -> None:
    parser.add_argument(
        "--store",
        type=_folder,
        metavar="FOLDER",
        help="folder of all sweeps (default: $ORCHESTRATOR_STORE, else ./sweeps)",
    )


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    return Path(text)


def add_planning(parser: Parser) -> None:
    """Add the arguments of every verb that plans a recipe."""
    add_recipe(parser)
    parser.add_argument(
        "--even-if-oom",
        action="store_true",
        help="run cells even if their memory forecast exceeds the GPU's memory (docs/memory.md)",
    )
    add_budget(parser)
    add_target(parser)
    add_json(parser)


def add_recipe(parser: Parser) -> None:
    parser.add_argument(
        "recipe", type=Path, help="recipe file (YAML), or the name of a recipe that ships with this program"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="replace a field of the recipe: training.steps=200; sweep=null drops its axes",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="key=value",
        help="keep only cells with this value, such as cuda_graph.impl=torch_compile; give it again to add a value of the "
        "same key, or to narrow the choice by another key",
    )


def add_budget(parser: Parser) -> None:
    parser.add_argument(
        "--max-gpu-hours",
        type=non_negative("number of hours"),
        metavar="H",
        help="reject a plan that may need more than H GPU hours",
    )


def add_target(parser: Parser) -> None:
    parser.add_argument(
        "--executor",
        choices=("auto", "slurm", "local", "debug"),
        default="auto",
        help="auto takes slurm if this host is set up for it, else local; debug runs one bundle after another here, in the foreground",
    )
    parser.add_argument(
        "--cluster", metavar="NAME", help="use this Slurm cluster profile, not the recipe's (docs/clusters.md)"
    )


def add_no_wait(parser: Parser) -> None:
    parser.add_argument("--no-wait", action="store_true", help="submit and return at once")


def add_allow_empty(parser: Parser) -> None:
    parser.add_argument(
        "--allow-empty",
        action="store_true",
        help="exit with 0 if nothing failed, even if graphed cells are missing or could not run here",
    )


def add_junit(parser: Parser) -> None:
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="also write JUnit XML to FILE, one test case per cell"
    )


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def non_negative(quantity: str) -> Callable[[str], float]:
    """Return an argument type: a finite number, 0 or more. ``quantity`` names it in the error message."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {quantity}, 0 or more")
        return value

    return parse


def redirect_messages(arguments: argparse.Namespace) -> contextlib.redirect_stdout[TextIO]:
    """Send messages for people to standard error if a program is to read standard output."""
    return contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout)
