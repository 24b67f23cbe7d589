"""Find and read the log that shows why a run failed, or what it is doing now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from launch.common.atomic_files import RecordError
from launch.common.packed_files import name_in, unpack
from launch.common.regular_file import AppendedLines, read_regular
from launch.contract.bundle import latest_outcomes, read_intact_order
from launch.contract.outcomes import Outcome, read_outcome
from launch.contract.paths import AttemptPaths, BundlePaths, RunPaths, SweepPaths
from launch.contract.plan import Plan
from launch.contract.skipped_runs import why_skipped
from launch.contract.spec import first_of_task, read_spec
from orchestrator import PROGRAM
from orchestrator.cli.step_lines import describe_steps
from orchestrator.errors import InputError, input_error
from orchestrator.sweeps.find_run import find_by_run_id
from orchestrator.sweeps.store import Store, bundles, read_order
from orchestrator.sweeps.submissions import read_submissions


def find_run(store: Store, name: str) -> RunPaths:
    """Find a run by its id or a unique prefix of it, with ``SWEEP/`` before it if needed.

    Raises:
        InputError: no run of the store, or more than one, has that prefix.
    """
    sweep, _, prefix = name.rpartition("/")
    if sweep:
        store.find(sweep)
    folders = [store.sweep(name).root / "runs" for name in ([sweep] if sweep else store.names())]
    paths = {f"{folder.parent.name}/{path.name}": path for folder in folders for path in sorted(folder.glob("*"))}
    if store.sweep(name).plan.exists() and not any(path.name.startswith(name) for path in paths.values()):
        raise input_error("", f"{name!r} is a sweep, not a run", f"{PROGRAM} status {name} lists its runs")
    found = find_by_run_id(
        ((path.name, name) for name, path in paths.items()),
        prefix,
        sweep or f"the sweeps in folder {store.root.absolute()}",
    )
    return RunPaths(paths[found])


def find_attempt(run: RunPaths, number: int | None) -> AttemptPaths | None:
    """Return the attempt of this number, or the latest one, or None if none has begun.

    Raises:
        InputError: the run has no attempt of this number.
    """
    attempts = {attempt.number: attempt for attempt in run.attempts()}
    if number is None:
        return attempts[max(attempts)] if attempts else None
    if number not in attempts:
        known = ", ".join(map(str, attempts)) or "none yet"
        raise input_error("--attempt", f"run {run.root.name} has no attempt {number}", f"attempts: {known}")
    return attempts[number]


def find_bundle(run: RunPaths, plan: Plan) -> BundlePaths | None:
    """Return the run's bundle, from the plan or from an earlier plan's orders on disk."""
    run_id, sweep = run.root.name, SweepPaths(run.root.parent.parent)
    for bundle in plan.bundles:
        if run_id in bundle.run_ids:
            return sweep.bundle(bundle.bundle_id)
    orders = ((paths, read_order(paths)) for paths in bundles(sweep))
    return next((paths for paths, order in orders if order and run_id in dict(order.schedule)), None)


def read_intact_outcome(attempt: AttemptPaths) -> Outcome | None:
    """Return the outcome, or None if there is none or it is damaged. The log can still be read."""
    with contextlib.suppress(RecordError):
        return read_outcome(attempt)
    return None


def _ranks_per_task(attempt: AttemptPaths) -> int:
    """Return how many ranks share a log, or 1 if the spec is damaged and thus started no rank."""
    with contextlib.suppress(OSError, RecordError, KeyError, TypeError, ValueError):
        return read_spec(attempt.spec).ranks_per_task
    return 1


def find_rank_log(attempt: AttemptPaths, rank: int | None) -> Path | None:
    """Return the log of ``rank``, else of the rank that the outcome names, else of rank 0, or None if there is none.

    Ranks that one process started share a log with the number of the first rank. The log of a completed attempt may be packed
    (:func:`read_rank_log`).
    """
    outcome = read_intact_outcome(attempt) if rank is None else None
    shown = (outcome.rank if outcome else rank) or 0
    path = attempt.log(first_of_task(shown, _ranks_per_task(attempt)))
    return path if path.exists() or path.stem in _packed_ranks(attempt) else None


def _packed_ranks(attempt: AttemptPaths) -> list[str]:
    """Return the names of all ranks of a packed attempt, including those that printed nothing."""
    return [path.stem for path in attempt.all_events()] if attempt.records_pack.exists() else []


def read_rank_log(attempt: AttemptPaths, path: Path) -> str:
    """Return the content of a log that :func:`find_rank_log` found."""
    try:
        content = read_regular(path)
    except FileNotFoundError:
        content = unpack(attempt.logs_pack).get(name_in(attempt.logs_pack, path), b"")
    return content.decode(errors="replace")


def read_log(run: RunPaths, plan: Plan, number: int | None, rank: int | None) -> Iterator[str]:
    """Yield the steps of an attempt, then its log.

    If its rank printed nothing, yield what its launcher printed, else what its Slurm job or its supervisor printed.

    Raises:
        InputError: there is no such attempt or no such log.
    """
    attempt = find_attempt(run, number)
    if attempt is None:
        bundle = find_bundle(run, plan)
        outcome_of = latest_outcomes(bundle.sweep, read_intact_order(bundle)) if bundle else None
        if outcome_of and (skipped := why_skipped(run.root.name, outcome_of, plan.precedents)):
            fix = f"logs of that run show why; resume {plan.name} --failed tries both again"
            raise input_error("", f"{run.root.name} was {skipped}", fix)
        missing = input_error("", f"run {run.root.name} has not begun", "--follow waits until it begins")
        yield from _read_bundle_logs(run, plan, missing)
        return
    path = find_rank_log(attempt, rank)
    if path is None and rank is not None:
        names = {*_packed_ranks(attempt), *(path.stem for path in attempt.logs.glob("rank*.log"))}
        ranks = ", ".join(sorted(names)) or "none"
        raise input_error("--rank", f"rank {rank} left no log", f"logs: {ranks}")
    text = read_rank_log(attempt, path) if path else ""
    if rank is None and not text.strip() and (said := read_rank_log(attempt, attempt.launcher_log)):
        path, text = attempt.launcher_log, said
    if path is not None:
        yield heading(attempt, path)
        # Yield steps before the log, because the log ends with the traceback of a failed rank.
        yield describe_steps(AppendedLines(attempt.metrics).read()) if rank is None else ""
        yield text
    outcome = read_intact_outcome(attempt)
    if path is None or (rank is None and not text.strip() and outcome and not outcome.results_intact):
        message = f"attempt {attempt.number} of {run.root.name} left no log"
        missing = input_error("", message, "none of its processes started")
        yield from _read_bundle_logs(run, plan, None if path else missing)


def heading(attempt: AttemptPaths, path: Path) -> str:
    ranks, shared = _ranks_per_task(attempt), ""
    if ranks > 1 and path.stem.startswith("rank"):
        first = int(path.stem.removeprefix("rank"))
        shared = f", of the torchrun that started ranks {first} to {first + ranks - 1}"
    return f"# {attempt.run_id}, attempt {attempt.number}, {path.name}{shared}\n"


def _read_bundle_logs(run: RunPaths, plan: Plan, missing: InputError | None) -> Iterator[str]:
    """Yield the logs of the run's latest Slurm job, or of its supervisors on this host. Raise ``missing`` if all are empty."""
    bundle = find_bundle(run, plan)
    logs = _bundle_logs(bundle) if bundle else []
    if missing and not logs:
        raise missing
    for log in logs:
        whose = "its bundle" if bundle and log == bundle.log else "its job"
        yield f"# {run.root.name} left no log; this is {log.name} of {whose}\n"
        yield read_regular(log).decode(errors="replace")


def _bundle_logs(bundle: BundlePaths) -> list[Path]:
    """Return the non-empty logs of the bundle's latest Slurm job itself, or of its supervisors on this host."""
    for submission in reversed(read_submissions(bundle.sweep)):
        if bundle.root.name in submission.bundles and (job_id := submission.job_of(bundle.root.name)):
            logs = submission.folder(bundle.sweep).glob(f"{job_id}_*log.*")
            return sorted(path for path in logs if path.stat().st_size)
    return [bundle.log] if bundle.log.exists() and bundle.log.stat().st_size else []
