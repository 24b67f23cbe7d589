"""Find source files that changed between the runs of a sweep. Runs before and after an edit may not be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial

from analysis.records.run import Attempt, Run
from launch.contract.spec_ids import digest


def name_edits(cells: Mapping[str, tuple[Run, ...]]) -> dict[str, tuple[Run, ...]]:
    """Return the runs of ``cells``. In each attempt, name its version of the modules whose source file has several.

    A version is part of the attempt's environment (``code.imports``) and of its digests.
    """
    contents = defaultdict[str, set[str]](set)
    for attempt in (one for runs in cells.values() for run in runs for one in run.whole):
        for module in attempt.imports.values():
            contents[module.path].add(module.content)
    edited = {path for path, found in contents.items() if len(found) > 1}
    if not edited:
        return dict(cells)
    return {cell: tuple(run.with_whole(partial(_with_version, edited)) for run in runs) for cell, runs in cells.items()}


def _with_version(edited: Set[str], attempt: Attempt) -> Attempt:
    versions = {name: module.content for name, module in attempt.imports.items() if module.path in edited}
    if not versions:
        return attempt
    environment = attempt.environment
    code = {**environment.get("code", {}), "imports": versions}
    digests = {**environment.get("digests", {}), "imports": digest(versions)}
    return replace(attempt, environment={**environment, "code": code, "digests": digests})
