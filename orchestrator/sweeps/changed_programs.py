"""Find users' programs that have changed since their runs on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from launch.common.atomic_files import RecordError, parse_record
from launch.common.checkout import describe_code
from launch.contract.paths import RunPaths, SweepPaths
from launch.contract.plan import Plan
from launch.frameworks.command_line import shared_words


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
        if codes and Path(folder).is_dir() and codes != {_code_now(folder, words)}
    ]
    return list(dict.fromkeys(changed))


def _codes(run: RunPaths) -> set[str]:
    """Return the digest of the code of the run's latest attempt, or nothing if there is none."""
    for attempt in [one for one in run.attempts() if one.has_ended][-1:]:
        try:
            return {parse_record(attempt.read(attempt.environment), attempt.environment)["code"]["digest"]}
        except (OSError, RecordError, KeyError):
            continue  # it never began, or the report names the damage
    return set()


def _code_now(folder: str, words: Sequence[str]) -> str:
    return str(describe_code(Path(folder), words)["digest"])
