"""The verb ``init``."""

from __future__ import annotations

import argparse
import sys

from launch.common.command_line import Parser
from orchestrator.export.read_flags import read_command

EXAMPLE = "init --from-megatron-flags 'pretrain_gpt.py --num-layers 8 --hidden-size 1024 ...' > recipe.yaml"
NOTE = "What a recipe does not express of the flags is listed on standard error, one per line.\n\n"


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--from-megatron-flags",
        required=True,
        metavar="COMMAND",
        help="a command line of Megatron-LM's pretrain_gpt.py",
    )


def run(arguments: argparse.Namespace) -> int:
    found = read_command(arguments.from_megatron_flags)
    print(found.text, end="")
    for note in found.notes:
        print(note, file=sys.stderr)
    return 0
