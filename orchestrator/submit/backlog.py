"""What one command submits later: bundles that a limit on the number of jobs keeps out of Slurm's queue, and runs that were asked
for while the job of their bundle still ran or waited."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from launch.contract.bundle import BundleOrder
from launch.contract.cancellation import read_cancellation
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.submit.attempts_to_begin import Policy
from orchestrator.submit.slurm_queue import Submitted
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.store import read_order
from orchestrator.sweeps.submissions import read_submissions


class Backlog:
    """What one command submits later. Orders of refused bundles are on disk, so another command may submit or cancel them first.

    The order of a bundle whose job is alive belongs to that job, so runs that wait for its end are known to this command alone.
    """

    def __init__(self, sweep: SweepPaths, policy: Policy) -> None:
        self._sweep = sweep
        self.policy = policy
        """The command's policy. If the command dies, another one with this policy submits the rest."""
        self._refused: dict[str, int] = {}
        """The bundles, each with the number of the last submission when it was refused."""
        self._asked: dict[str, int] = {}
        """The runs that wait for the end of a job, each with the attempt that was asked for."""
        self._cancelled: frozenset[str] = frozenset()
        """Those of them that had been cancelled before they were asked for."""

    def __contains__(self, bundle: object) -> bool:
        return bundle in self._refused

    def __bool__(self) -> bool:
        return bool(self._refused)

    @property
    def waits(self) -> bool:
        """Whether this command submits anything later."""
        return bool(self._refused or self._asked)

    def replace(self, submitted: Submitted) -> None:
        """Wait with the bundles that were left, and no others. Only one command at a time may call this (``order_lock``)."""
        last = max((submission.number for submission in read_submissions(self._sweep)), default=0)
        self._refused = dict.fromkeys(submitted.left, last)

    def ask(self, plan: Plan, attempts: Mapping[str, int]) -> None:
        """Begin ``attempts``, by run, once the jobs of their bundles have ended."""
        self._asked = dict(attempts)
        self._cancelled = self._covered(plan)

    def asked(self, plan: Plan, states: Mapping[str, RunState]) -> frozenset[str]:
        """Return the runs that are still to begin, without those that another command has begun or cancelled meanwhile."""
        cancelled = self._covered(plan) - self._cancelled
        self._asked = {
            run_id: attempt
            for run_id, attempt in self._asked.items()
            if run_id not in cancelled and states[run_id].next_attempt == attempt and not states[run_id].alive
        }
        return frozenset(self._asked)

    def _covered(self, plan: Plan) -> frozenset[str]:
        """Return the runs that wait for the end of a job and that ``cancel`` covers."""
        bundles = (bundle for bundle in plan.all_bundles if not self._asked.keys().isdisjoint(bundle.run_ids))
        found = ((bundle, read_cancellation(self._sweep.bundle(bundle.bundle_id))) for bundle in bundles)
        return frozenset(run for bundle, end in found if end for run in bundle.run_ids if end.covers(run))

    def orders(self) -> list[BundleOrder]:
        """Return the orders to submit, without what another command has submitted or cancelled meanwhile."""
        submitted = {
            bundle
            for submission in read_submissions(self._sweep)
            for bundle in submission.bundles
            if submission.number > self._refused.get(bundle, submission.number)
        }
        orders = (read_order(self._sweep.bundle(bundle)) for bundle in self._refused if bundle not in submitted)
        left = (self._without_cancelled(order) for order in orders if order is not None)
        return [order for order in left if order.schedule]

    def _without_cancelled(self, order: BundleOrder) -> BundleOrder:
        cancelled = read_cancellation(self._sweep.bundle(order.bundle_id))
        if cancelled is None:
            return order
        return replace(order, schedule=tuple((run, k) for run, k in order.schedule if not cancelled.covers(run)))
