"""Find source files that changed between the runs of a sweep. Runs before and after an edit may not be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from analysis.records.run import Attempt, Run
from launch.contract.spec_ids import digest


def name_edits(cells: Mapping[str, tuple[Run, ...]]) -> dict[str, tuple[Run, ...]]:
    """Return the runs of ``cells``. In each attempt, name its version of the modules whose source file has several.

    A version is part of the attempt's environment (``code.imports``) and of its digests.
    """
    contents = defaultdict[str, set[str]](set)
    for attempt in (one for runs in cells.values() for run in runs for one in _whole_attempts(run)):
        for module in attempt.imports.values():
            contents[module.path].add(module.content)
    edited = {path for path, found in contents.items() if len(found) > 1}
    if not edited:
        return dict(cells)
    return {cell: tuple(_with_versions(run, edited) for run in runs) for cell, runs in cells.items()}


def _whole_attempts(run: Run) -> Iterable[Attempt]:
    return (attempt for attempt in (*run.earlier, run.attempt) if attempt is not None)


def _with_versions(run: Run, edited: set[str]) -> Run:
    earlier = tuple(_with_version(attempt, edited) for attempt in run.earlier)
    return replace(run, attempt=run.attempt and _with_version(run.attempt, edited), earlier=earlier)


def _with_version(attempt: Attempt, edited: set[str]) -> Attempt:
    versions = {name: module.content for name, module in attempt.imports.items() if module.path in edited}
    if not versions:
        return attempt
    environment = attempt.environment
    code = {**environment.get("code", {}), "imports": versions}
    digests = {**environment.get("digests", {}), "imports": digest(versions)}
    return replace(attempt, environment={**environment, "code": code, "digests": digests})
