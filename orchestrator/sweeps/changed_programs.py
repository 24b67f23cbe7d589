"""Find users' programs that have changed since their runs on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launch.common.atomic_files import RecordError, parse_record
from launch.common.checkout import describe_code, is_code, named_file
from launch.contract.outcomes import read_outcome
from launch.contract.paths import RunPaths, SweepPaths
from launch.contract.plan import Plan
from launch.frameworks.command_line import shared_words

CLOCKS_APART = 2.0
"""The seconds by which the clocks of a node and of its file server may differ."""


def changed_programs(paths: SweepPaths, plan: Plan) -> list[str]:
    """Return the working folders on this host whose code is not that of the runs on disk. The first run of each cell counts."""
    ran: dict[tuple[str, tuple[str, ...]], set[str]] = defaultdict(set)
    for cell in plan.cells:
        if cell.state == "run" and cell.spec["engine"] == "command":
            command = cell.run_spec.command
            ran[command.workdir, shared_words(command)].update(_codes(paths.run(cell.run_ids[0])))
    changed = [
        folder
        for (folder, words), codes in ran.items()
        if codes and Path(folder).is_dir() and codes != {describe_code(Path(folder), words)["digest"]}
    ]
    return list(dict.fromkeys(changed))


def edited_files(paths: SweepPaths, plan: Plan) -> list[str]:
    """Return the other files that commands name, such as settings in JSON, and that changed after the last run on disk.

    A program may also write such a file, but only before its run ends.
    """
    named: dict[Path, float] = {}
    for cell in plan.cells:
        if cell.state == "run" and cell.spec["engine"] == "command":
            command, graph = cell.run_spec.command, cell.run_spec.cuda_graph
            words = (*shared_words(command), *graph.arguments)
            files = {file for word in words if (file := named_file(Path(command.workdir), word)) and not is_code(file)}
            ended = _last_end(paths, cell.run_ids) if files else 0.0
            named |= {file: max(ended, named.get(file, 0.0)) for file in files}
    return sorted(str(file) for file, ended in named.items() if 0 < ended < file.stat().st_mtime - CLOCKS_APART)


def _last_end(paths: SweepPaths, run_ids: Sequence[str]) -> float:
    """Return the Unix time at which the last attempt of these runs ended, or 0 if none has or one still runs."""
    attempts = [one for run_id in run_ids for one in paths.run(run_id).attempts()]
    if not all(one.has_ended for one in attempts):
        return 0.0
    ends = [0.0]
    for attempt in attempts:
        with suppress(OSError, RecordError):  # the report names the damage
            ends += [outcome.ended for outcome in [read_outcome(attempt)] if outcome]
    return max(ends)


def _codes(run: RunPaths) -> set[str]:
    """Return the digest of the code of the run's latest attempt, or nothing if there is none."""
    for attempt in [one for one in run.attempts() if one.has_ended][-1:]:
        try:
            return {parse_record(attempt.read(attempt.environment), attempt.environment)["code"]["digest"]}
        except (OSError, RecordError, KeyError):
            continue  # it never began, or the report names the damage
    return set()
