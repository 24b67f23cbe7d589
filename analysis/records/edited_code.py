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
    cells = {cell: _without_loss(runs) for cell, runs in cells.items()}
    contents = defaultdict[str, set[str]](set)
    for attempt in (one for runs in cells.values() for run in runs for one in run.whole):
        for module in attempt.imports.values():
            contents[module.path].add(module.content)
    edited = {path for path, found in contents.items() if len(found) > 1}
    if not edited:
        return dict(cells)
    return {cell: tuple(run.with_whole(partial(_with_version, edited)) for run in runs) for cell, runs in cells.items()}


def _without_loss(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Return ``runs`` of a cell. Add a problem to completed attempts that name no imported modules although others do."""
    known = any(attempt.imports for run in runs for attempt in run.whole)
    return tuple(run.with_whole(_mark_loss) for run in runs) if known else runs


def _mark_loss(attempt: Attempt) -> Attempt:
    problem = "events of rank 0 name no imported modules, unlike those of other runs of the cell"
    lost = attempt.outcome.results_intact and not attempt.imports
    return replace(attempt, problems=(*attempt.problems, problem)) if lost else attempt


def _with_version(edited: Set[str], attempt: Attempt) -> Attempt:
    versions = {name: module.content for name, module in attempt.imports.items() if module.path in edited}
    if not versions:
        return attempt
    environment = attempt.environment
    code = {**environment.get("code", {}), "imports": versions}
    digests = {**environment.get("digests", {}), "imports": digest(versions)}
    return replace(attempt, environment={**environment, "code": code, "digests": digests})
