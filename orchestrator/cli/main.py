"""The command line: verbs parsed by orchestrator.cli.parser, done in orchestrator.cli.commands, errors turned into one
message each.

Nothing heavier than argparse is imported before a verb is known, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from orchestrator.cli.parser import parser

CLOSED_PIPE = 141
"""What shells report for a command whose reader went away before it had said how things are."""
INTERRUPTED = 130
"""What shells report for a command ended by Ctrl-C."""


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Overrides may stand anywhere, which argparse alone allows before the first option only."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    if rest and ("overrides" not in options or any(text.startswith("-") for text in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)} (see {top.prog} {options.verb} --help)")
    return argparse.Namespace(**vars(options) | ({"overrides": [*options.overrides, *rest]} if rest else {}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the value is its exit code."""
    from launch.common.atomic_files import RecordError
    from orchestrator.errors import OrchestratorError

    options = _parsed(arguments)
    try:
        from orchestrator.cli import commands

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
