"""Follow the log of a run, from before its attempt begins until it ends."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator
from pathlib import Path

from launch.common.regular_file import AppendedLines, open_regular
from launch.contract.paths import AttemptPaths, BundlePaths, RunPaths
from launch.contract.plan import Plan
from orchestrator.cli.run_logs import (
    find_attempt,
    find_bundle,
    find_rank_log,
    heading,
    read_intact_outcome,
    read_log,
    read_rank_log,
)
from orchestrator.cli.step_lines import describe_steps
from orchestrator.output.jobs import describe_job
from orchestrator.sweeps.run_state import RunState, read_state
from orchestrator.sweeps.slurm_jobs import JobMonitor
from orchestrator.sweeps.submissions import read_submissions

POLL_SECONDS = 0.3
STATE_SECONDS = 2.0
"""Seconds between two reads of the run's state. Its outcome is read at every poll."""


def follow_log(run: RunPaths, plan: Plan, number: int | None, rank: int | None) -> Iterator[str]:
    """Yield the log of an attempt as it grows. Raise as :func:`read_log` does."""
    bundle = find_bundle(run, plan)
    path = None
    if bundle is not None:
        follower = LogFollower(run, bundle)
        yield from follower.wait_for_attempt(number)
        attempt = find_attempt(run, number)
        while attempt is not None and path is None and follower.is_running(attempt):
            path = find_rank_log(attempt, rank)
            time.sleep(POLL_SECONDS)
    if path is None or attempt is None:
        yield from read_log(run, plan, number, rank)
        return
    yield heading(attempt, path)
    yield from follower.read_while_running(attempt, path, shows_steps=rank is None)
    outcome = read_intact_outcome(attempt)
    if outcome is not None:
        yield f"# ended as {outcome.outcome}{f': {outcome.message}' if outcome.message else ''}\n"
    if rank is None and path != find_rank_log(attempt, None):
        yield f"# another rank failed first: logs {run.root.name} prints its log\n"


class LogFollower:
    """Track the state of one run. Ask Slurm only about the jobs of this run."""

    def __init__(self, run: RunPaths, bundle: BundlePaths) -> None:
        self._run = run
        self._bundle = bundle
        self._scheduler = JobMonitor()
        self._state: RunState | None = None
        self._read_at = 0.0

    def wait_for_attempt(self, number: int | None) -> Iterator[str]:
        """Yield what the attempt waits for, until it has begun or cannot begin.

        The default is the next or current attempt.
        """
        last = ""
        while (state := self._read_state()).alive:
            wanted = number or state.next_attempt - (state.name != "QUEUED")
            if self._run.attempt(wanted).root.exists():
                return
            line = (
                f"# attempt {wanted} of {state.run_id} has not begun: {describe_job(state) or 'waiting for its turn'}\n"
            )
            if line != last:
                yield line
            last = line
            time.sleep(POLL_SECONDS)

    def is_running(self, attempt: AttemptPaths) -> bool:
        if read_intact_outcome(attempt) is not None:
            return False
        if self._state is None or time.monotonic() - self._read_at > STATE_SECONDS:
            self._state, self._read_at = self._read_state(), time.monotonic()
        return self._state.name == "RUNNING" and self._state.next_attempt == attempt.number + 1

    def read_while_running(self, attempt: AttemptPaths, path: Path, *, shows_steps: bool) -> Iterator[str]:
        steps = AppendedLines(attempt.metrics)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        try:
            file = open_regular(path)
        except FileNotFoundError:
            # The attempt has completed in the meantime, and its logs are packed.
            yield describe_steps(steps.read()) if shows_steps else ""
            yield read_rank_log(attempt, path)
            return
        with file:
            running = True
            while running:
                running = self.is_running(attempt)
                yield describe_steps(steps.read()) if shows_steps else ""
                yield decoder.decode(file.read(), final=not running)
                time.sleep(POLL_SECONDS if running else 0)

    def _read_state(self) -> RunState:
        submissions = [s for s in read_submissions(self._bundle.sweep) if self._bundle.root.name in s.bundles]
        jobs = self._scheduler.look(submissions) if submissions else None
        return read_state(self._bundle, self._run.root.name, jobs)
