"""Parse the command line, run the verb, and turn an error into one message and an exit code.

Only argparse is imported before the verb runs, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from launch.common.command_line import Parser
from launch.contract.exit_codes import ExitCode
from orchestrator import PROGRAM, __version__
from orchestrator.cli.arguments import add_store, epilog
from orchestrator.cli.verbs import VERBS


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Import only the modules of verbs among ``words``."""
    completes = "_ARGCOMPLETE" in os.environ
    if completes:
        from orchestrator.cli.completion import complete

        words = os.environ.get("COMP_LINE", "").split()
    parser = Parser(
        prog=PROGRAM,
        description="Find out which CUDA-graph implementation and scope is correct, fits in memory and is fastest.",
        epilog=epilog("sweep", "sweep tiny_moe"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # The commit takes git a while.
    version = _describe_version() if words and words[0].startswith("--v") else ""
    parser.add_argument("--version", action="version", version=version, help="print version and commit, and exit")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for name, summary in VERBS.items():
        verb = verbs.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name in words:
            module = import_module(f"orchestrator.cli.verbs.{name}")
            verb.description = f"{summary[0].upper()}{summary[1:]}."
            verb.epilog = epilog(name, module.EXAMPLE, getattr(module, "NOTE", ""))
            verb.set_defaults(run=module.run)
            module.add_arguments(verb)
            add_store(verb)
    if completes:
        complete(parser, verbs.choices.values())
    _require_verb_first(parser, words)
    return _parse_overrides_anywhere(parser, words)


def _require_verb_first(parser: Parser, words: Sequence[str]) -> None:
    """Refuse an option of a verb before the verb. argparse would take the option's value for the verb."""
    first = words[0] if words else ""
    if first.startswith("--") and not any(option.startswith(first) for option in ("--help", "--version")):
        parser.error(f"{first} comes before the verb; write the verb first: {PROGRAM} VERB {first} ...")


def _describe_version() -> str:
    from launch import ROOT
    from launch.common.checkout import describe_commit

    code = describe_commit(ROOT)
    changed = ", changed since" if code["dirty"] else ""
    return f"cuda-graph-orchestrator {__version__}, commit {code['commit'] or 'unknown'}{changed}"


def _parse_overrides_anywhere(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse ``words``. Also accept overrides after an option: argparse allows them only before the first option."""
    arguments: argparse.Namespace
    arguments, rest = parser.parse_known_args(words)
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        line = _as_overrides(words, rest) if "overrides" in arguments else ""
        answer = f" (see {PROGRAM} {arguments.verb} --help)"
        if line:
            answer = f"; for flags of Megatron write {line}"
        elif "overrides" in arguments and "=" in rest[0]:
            answer = f"; for a field of the recipe write {rest[0].lstrip('-')}"
        elif "graphed" in arguments and not arguments.from_logs and len([*arguments.eager, *arguments.graphed]) > 2:
            answer = f"; put each command in quotes{answer}"
        parser.error(f"unrecognized arguments: {' '.join(rest)}{answer}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _as_overrides(words: Sequence[str], rest: Sequence[str]) -> str:
    """Return the overrides that mean the same as Megatron's flags in ``words``, from the first unknown flag on."""
    from launch.contract.errors import OrchestratorError
    from orchestrator.export.flag_meanings import as_overrides

    first = next(number for number, word in enumerate(words) if word == rest[0])
    try:
        return shlex.join(as_overrides(words[first:]))
    except OrchestratorError:
        return ""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from orchestrator.output.visible_stream import visible_output

    with visible_output():
        try:
            return _run_verb(parse(sys.argv[1:] if words is None else words))
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return ExitCode.INTERRUPTED


def _run_verb(arguments: argparse.Namespace) -> int:
    # Imported here, because --help does not need them. A verb's module has loaded them already.
    from launch.common.atomic_files import RecordError, explain
    from launch.contract.errors import OrchestratorError

    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:
        raise
    except (OrchestratorError, OSError, RecordError) as error:
        for problem in getattr(error, "problems", (explain(error),)):
            print(f"error: {problem}", file=sys.stderr)
        return error.exit_code if isinstance(error, OrchestratorError) else OrchestratorError.exit_code


def run() -> NoReturn:
    """Run the command of this process and exit.

    A reader that closes the pipe (``| head``) must not turn a failure into success. Python's exit code for an uncaught
    exception is 1, which here means wrong input, so it becomes 2.
    """
    code: int = ExitCode.CLOSED_PIPE
    # Plans and records form no reference cycles. Searching those of ten thousand runs for cycles would take a tenth of the
    # time.
    gc.set_threshold(1_000_000)
    try:
        code = main()
        # Standard output is None if a shell closed it: ``>&-``
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        from launch.common.redact import print_exception

        print_exception(type(error), error, error.__traceback__)
        code = ExitCode.UNFINISHED
    sys.exit(code)
