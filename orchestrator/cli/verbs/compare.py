"""The verb ``compare``."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.compare.cell_changes import MEMORY_TOLERANCE
from analysis.compare.golden import Golden, golden_of, read_golden
from analysis.compare.junit import junit_of_comparison
from analysis.compare.render import format_comparison
from analysis.compare.sweep_changes import compare_sweeps, comparison_to_json
from launch.common.atomic_files import RecordError, read_json, write_bytes
from launch.common.command_line import Parser
from orchestrator.cli.arguments import add_json, add_junit, non_negative
from orchestrator.errors import input_error
from orchestrator.output.print_json import print_json
from orchestrator.sweeps.store import Store, read_plan

EXAMPLE = "compare golden/tiny_moe.json tiny_moe --junit compare.xml"


def add_arguments(parser: Parser) -> None:
    sides = "its name, its folder, its report.json, or its golden file (report --golden)"
    parser.add_argument("before", metavar="A", help=f"earlier sweep: {sides}")
    parser.add_argument("after", metavar="B", help="later sweep, named in the same way")
    parser.add_argument(
        "--memory-tolerance",
        type=non_negative("share"),
        metavar="SHARE",
        help="share by which a memory peak may grow (default: 0.05)",
    )
    add_junit(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    store = Store(arguments.store)
    tolerance = MEMORY_TOLERANCE if arguments.memory_tolerance is None else arguments.memory_tolerance
    before, after = _load_golden(store, arguments.before), _load_golden(store, arguments.after)
    if not before.cells:
        raise input_error("", f"{arguments.before}: no cell of it ran, so no sweep can be compared with it")
    comparison = compare_sweeps(before, after, tolerance)
    if arguments.junit:
        write_bytes(arguments.junit, junit_of_comparison(comparison))
    if arguments.json:
        print_json(comparison_to_json(comparison))
    else:
        print(format_comparison(comparison, arguments.before, arguments.after))
    return comparison.exit_code


def _load_golden(store: Store, side: str) -> Golden:
    """Read ``side``, a file or a sweep. Write nothing into the sweep's folder."""
    if Path(side).suffix == ".json" and not Path(side).exists():
        raise input_error(side, "no such file", "report SWEEP --golden FILE writes a golden file")
    if not Path(side).exists() or Path(side).is_dir():
        paths = store.find(side)
        # The error names what is damaged.
        read_plan(paths)
        return golden_of(paths)
    try:
        return read_golden(read_json(Path(side)))
    except RecordError as error:
        fix = "name a report.json, or a golden file: report SWEEP --golden FILE writes one"
        raise input_error(side, str(error).removeprefix(f"{Path(side).name}: "), fix) from None
    except OSError as error:
        raise input_error(side, str(error.strerror), "name a regular file that you can read") from None
