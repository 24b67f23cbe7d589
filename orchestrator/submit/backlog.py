"""The bundles that wait for room in Slurm's queue, because a limit on the number of jobs keeps them out."""

from __future__ import annotations

from dataclasses import replace

from launch.contract.bundle import BundleOrder
from launch.contract.cancellation import read_cancellation
from launch.contract.paths import SweepPaths
from orchestrator.submit.attempts_to_begin import Policy
from orchestrator.submit.slurm_queue import Submitted
from orchestrator.sweeps.store import read_order
from orchestrator.sweeps.submissions import read_submissions


class Backlog:
    """The bundles that one command submits later. Their orders are on disk, so another command may submit or cancel them first."""

    def __init__(self, sweep: SweepPaths, policy: Policy) -> None:
        self._sweep = sweep
        self.policy = policy
        """The command's policy. If the command dies, another one with this policy submits the rest."""
        self._refused: dict[str, int] = {}
        """The bundles, each with the number of the last submission when it was refused."""

    def __contains__(self, bundle: object) -> bool:
        return bundle in self._refused

    def __bool__(self) -> bool:
        return bool(self._refused)

    def replace(self, submitted: Submitted) -> None:
        """Wait with the bundles that were left, and no others. Only one command at a time may call this (``order_lock``)."""
        last = max((submission.number for submission in read_submissions(self._sweep)), default=0)
        self._refused = dict.fromkeys(submitted.left, last)

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
