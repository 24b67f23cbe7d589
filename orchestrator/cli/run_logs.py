"""Which log tells why a run failed, or what it does now; and its text, as it grows."""

from __future__ import annotations

import codecs
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from launch.common.atomic_files import RecordError, read_json
from launch.contract.outcomes import Outcome, read_outcome
from launch.contract.paths import AttemptPaths, BundlePaths, RunPaths, SweepPaths
from launch.contract.plan import Plan
from launch.failures.diagnose import RankExit, diagnose
from launch.failures.evidence import read_evidence
from orchestrator.errors import input_error
from orchestrator.output.jobs import describe_job
from orchestrator.sweeps.run_state import RunState, read_state
from orchestrator.sweeps.slurm_jobs import JobMonitor
from orchestrator.sweeps.store import Store, bundles, read_order
from orchestrator.sweeps.submissions import read_submissions

POLL_SECONDS = 0.3
STATE_SECONDS = 2.0
"""Between two looks at the state of a run whose log is followed; its outcome is looked for at every poll."""


def find_run(store: Store, name: str) -> RunPaths:
    """Find a run by its id or a unique prefix of it, with ``SWEEP/`` before it if needed.

    Raises:
        InputError: no run of the store, or more than one, has that prefix.
    """
    sweep, _, prefix = name.rpartition("/")
    folders = [store.sweep(name).root / "runs" for name in ([sweep] if sweep else store.names())]
    found = sorted(path for folder in folders for path in folder.glob("*") if path.name.startswith(prefix))
    found = [path for path in found if path.name == prefix] or found
    if not found:
        raise input_error("", f"no run {name!r} in {store.root}", "python -m orchestrator status SWEEP lists runs")
    if len(found) > 1:
        candidates = ", ".join(f"{path.parent.parent.name}/{path.name}" for path in found[:8])
        raise input_error("", f"{name!r} may be {len(found)} runs", f"write more of it: {candidates}")
    return RunPaths(found[0])


def first_failing_rank(attempt: AttemptPaths) -> int | None:
    """The rank that failed first, by the outcome or, before there is one, by what ranks have recorded up to now; None
    where none has failed."""
    outcome = _readable_outcome(attempt)
    if outcome is not None:
        return outcome.rank
    evidence = replace(read_evidence(attempt, "itself"), exit_code=1, exits=_exits(attempt))
    return diagnose(evidence).rank if evidence.exceptions or evidence.exits else None


def _readable_outcome(attempt: AttemptPaths) -> Outcome | None:
    """How the attempt ended; None where it has not, or its record is damaged: its log is there all the same."""
    with contextlib.suppress(RecordError):
        return read_outcome(attempt)
    return None


def _exits(attempt: AttemptPaths) -> tuple[RankExit, ...]:
    """Ranks that failed, the first one first; records that are damaged are left out."""
    found: list[RankExit] = []
    with contextlib.suppress(FileNotFoundError, RecordError, TypeError):
        found += [RankExit(**row) for row in read_json(attempt.exits)]
    for path in attempt.rank_exits.glob("rank*.json"):
        with contextlib.suppress(FileNotFoundError, RecordError, TypeError):
            found.append(RankExit(**read_json(path)))
    return tuple(sorted((e for e in found if e.code != 0), key=lambda e: (e.time or 0.0, e.rank)))


def _log_of_rank(attempt: AttemptPaths, rank: int | None) -> Path | None:
    """The log of ``rank``, else of the first failing rank, else of rank 0; None where it has not left any."""
    path = attempt.log(first_failing_rank(attempt) or 0 if rank is None else rank)
    return path if path.exists() else None


def _log_of(attempt: AttemptPaths, rank: int | None) -> Path | None:
    """As :func:`_log_of_rank`; where nobody asked for a rank and it has left none, the launcher's."""
    launcher = attempt.logs / "launcher.log"
    return _log_of_rank(attempt, rank) or (launcher if rank is None and launcher.exists() else None)


def bundle_of(run: RunPaths, plan: Plan) -> BundlePaths | None:
    """The bundle that holds the run: in the plan, or in an earlier one that is on disk. None where there is none."""
    run_id, sweep = run.root.name, SweepPaths(run.root.parent.parent)
    for bundle in plan.bundles:
        if run_id in bundle.run_ids:
            return sweep.bundle(bundle.bundle_id)
    orders = ((paths, read_order(paths)) for paths in bundles(sweep))
    return next((paths for paths, order in orders if order and run_id in dict(order.schedule)), None)


def job_logs(bundle: BundlePaths) -> list[Path]:
    """What the bundle's latest job of Slurm's printed itself, before and beside its runs; none where there is none."""
    for submission in reversed(read_submissions(bundle.sweep)):
        if bundle.root.name in submission.bundles:
            job_id = submission.job_of(bundle.root.name)
            found = submission.folder(bundle.sweep).glob(f"{job_id}_*log.*")
            return sorted(path for path in found if path.stat().st_size)
    return []


def read_log(run: RunPaths, plan: Plan, number: int | None, rank: int | None) -> Iterator[str]:
    """The log of an attempt as it stands; of a run that never began, or left none, its job's own.

    Raises:
        InputError: there is no such attempt, or no such log.
    """
    attempt = _attempt(run, number)
    path = _log_of(attempt, rank) if attempt else None
    if attempt is not None and path is not None:
        yield heading(attempt, path)
        yield path.read_text(errors="replace")
        return
    if attempt is not None and rank is not None:
        ranks = sorted(p.stem for p in attempt.logs.glob("rank*.log"))
        raise input_error("--rank", f"rank {rank} left no log", f"there are: {', '.join(ranks) or 'none'}")
    bundle = bundle_of(run, plan)
    logs = job_logs(bundle) if bundle else []
    for log in logs:
        yield f"# {run.root.name} has left no log; its job's own, {log.name}\n"
        yield log.read_text(errors="replace")
    if not logs and attempt is None:
        raise input_error(
            "--attempt", f"run {run.root.name} has not begun", "attempts: none yet; --follow waits for one"
        )
    if not logs and attempt is not None:
        message = f"attempt {attempt.number} of {run.root.name} has left no log"
        raise input_error("", message, "nothing of it was started")


def follow_log(run: RunPaths, plan: Plan, number: int | None, rank: int | None) -> Iterator[str]:
    """As :func:`read_log`, from before the attempt begins until it has ended."""
    bundle = bundle_of(run, plan)
    if bundle is None:
        yield from read_log(run, plan, number, rank)
        return
    look = LogFollower(run, bundle)
    yield from look.until_begun(number)
    attempt = _attempt(run, number)
    path: Path | None = None
    while attempt is not None and path is None and look.goes_on(attempt):
        path = _log_of_rank(attempt, rank)
        time.sleep(POLL_SECONDS)
    if attempt is None or path is None:
        yield from read_log(run, plan, number, rank)
        return
    yield heading(attempt, path)
    yield from _grown(path, lambda: look.goes_on(attempt))
    outcome = _readable_outcome(attempt)
    if outcome is not None:
        yield f"# it ended as {outcome.outcome}{f': {outcome.message}' if outcome.message else ''}\n"
    if rank is None and path != _log_of_rank(attempt, None):
        yield f"# another rank failed first: logs {run.root.name} shows its log\n"


def heading(attempt: AttemptPaths, path: Path) -> str:
    return f"# {attempt.root.parent.parent.name}, attempt {attempt.number}, {path.name}\n"


def _attempt(run: RunPaths, number: int | None) -> AttemptPaths | None:
    """The attempt, or the latest; None where none has begun.

    Raises:
        InputError: there are others, and not this one.
    """
    attempts = {attempt.number: attempt for attempt in run.attempts()}
    if number is None:
        return attempts[max(attempts)] if attempts else None
    if number not in attempts:
        there = ", ".join(map(str, attempts)) or "none yet"
        raise input_error("--attempt", f"run {run.root.name} has no attempt {number}", f"attempts: {there}")
    return attempts[number]


def _grown(path: Path, goes_on: Callable[[], bool]) -> Iterator[str]:
    """The text of a file, what is there and what is added."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with open(path, "rb") as file:
        while goes_on():
            yield decoder.decode(file.read())
            time.sleep(POLL_SECONDS)
        yield decoder.decode(file.read(), final=True)


class LogFollower:
    """The state of one run. Slurm is asked only about the run's own jobs."""

    def __init__(self, run: RunPaths, bundle: BundlePaths) -> None:
        self._run = run
        self._bundle = bundle
        self._scheduler = JobMonitor()
        self._state: RunState | None = None
        self._looked = 0.0

    def until_begun(self, number: int | None) -> Iterator[str]:
        """What it waits for, in words, until attempt ``number`` has begun or nobody is left to begin it. Without a number
        it is the attempt that waits, or the latest one."""
        said = ""
        while (state := self._look()).alive:
            wanted = number or state.next_attempt - (state.name != "QUEUED")
            if self._run.attempt(wanted).root.exists():
                return
            words = f"# attempt {wanted} of {state.run_id} has not begun: {describe_job(state) or 'it waits for its turn'}\n"
            if words != said:
                said = words
                yield words
            time.sleep(POLL_SECONDS)

    def goes_on(self, attempt: AttemptPaths) -> bool:
        """Whether the attempt has not ended, as far as is known."""
        if _readable_outcome(attempt) is not None:
            return False
        if self._state is None or time.monotonic() - self._looked > STATE_SECONDS:
            self._state, self._looked = self._look(), time.monotonic()
        return self._state.name == "RUNNING" and self._state.next_attempt == attempt.number + 1

    def _look(self) -> RunState:
        handed = [s for s in read_submissions(self._bundle.sweep) if self._bundle.root.name in s.bundles]
        return read_state(self._bundle, self._run.root.name, self._scheduler.look(handed) if handed else None)
