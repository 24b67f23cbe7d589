"""The verb ``init``."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from launch.common.command_line import Parser
from orchestrator.errors import input_error
from orchestrator.export.read_flags import read_command
from orchestrator.recipe.recipe import find_recipe
from orchestrator.targets.profile import find_profile

EXAMPLE = "init --from-megatron-flags 'pretrain_gpt.py --num-layers 8 --hidden-size 1024 ...' > recipe.yaml"
NOTE = "Flags that a recipe cannot express are listed on standard error, one per line.\n\n"


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "skeleton",
        nargs="?",
        metavar="{recipe,profile}",
        choices=("recipe", "profile"),
        help="print a working, commented recipe or profile to edit",
    )
    parser.add_argument(
        "--from-megatron-flags",
        metavar="COMMAND",
        help="print the recipe for this command line of Megatron-LM's pretrain_gpt.py",
    )


def run(arguments: argparse.Namespace) -> int:
    if (arguments.skeleton is None) == (arguments.from_megatron_flags is None):
        raise input_error("init", "takes one of recipe, profile and --from-megatron-flags", "init recipe > mine.yaml")
    if arguments.skeleton:
        path = find_recipe(Path("tiny_moe")) if arguments.skeleton == "recipe" else find_profile("example")
        # With the demo's name, the new recipe would claim the demo's sweep.
        print(path.read_text().replace("\nname: tiny_moe\n", "\nname: mine\n"), end="")
        return 0
    command = arguments.from_megatron_flags
    if len(command.split()) == 1 and Path(command).is_file():
        fix = f'--from-megatron-flags "$(cat {shlex.quote(command)})"'
        raise input_error("--from-megatron-flags", f"takes a command line, and {command} is a file", fix)
    found = read_command(command)
    print(found.text, end="")
    for note in found.notes:
        print(note, file=sys.stderr)
    return 0
