"""Submit while a command watches the sweep under Slurm: runs that wait for room in its queue or for the end of a job, and retries
of runs that an infrastructure failure ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from launch.contract.bundle import BundleOrder
from launch.contract.errors import OrchestratorError
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.errors import InputError
from orchestrator.output.progress import print_later_orders, print_room_wait, print_withdrawn
from orchestrator.submit.attempts_to_begin import attempts_to_begin
from orchestrator.submit.backlog import Backlog
from orchestrator.submit.idle_jobs import has_idle_jobs, withdraw_idle_jobs
from orchestrator.submit.slurm_queue import Submitted, enqueue, poll_jobs
from orchestrator.sweeps.close_attempts import close_dead_attempts
from orchestrator.sweeps.run_state import RunState, read_states
from orchestrator.sweeps.slurm_jobs import JobMonitor
from orchestrator.sweeps.store import is_planned, order_lock
from orchestrator.targets.slurm_cluster import Cluster
from orchestrator.workflow.room_wait import RoomWait

PAUSE_SECONDS = 30.0
"""Seconds to wait after a submission that failed, while other runs continue, and between looks at what another command has
submitted or cancelled."""


class InfrastructureRetry:
    """Submit the backlog and retries, given the state of each run, and take jobs out of the queue that no run needs any more.

    Return whether anything was submitted or still waits.
    """

    def __init__(
        self, sweep: SweepPaths, plan: Plan, cluster: Cluster, scheduler: JobMonitor, backlog: Backlog
    ) -> None:
        self._sweep = sweep
        self._plan = plan
        self._cluster = cluster
        self._scheduler = scheduler
        self._backlog = backlog
        self._not_before = time.monotonic() + PAUSE_SECONDS if backlog else 0.0
        self._room_wait = RoomWait()
        self._jobs = 0
        self._last_error = ""

    def __call__(self, states: Mapping[str, RunState]) -> bool:
        jobs = len({state.job.job_id for state in states.values() if state.job is not None and state.has_job})
        room, self._jobs = bool(self._backlog) and jobs < self._jobs, jobs
        asked = bool(self._backlog.asked(self._plan, states))
        others = bool(self._backlog) or asked or any(state.alive for state in states.values())
        if room:
            self._room_wait.try_soon()
        elif others and time.monotonic() < self._not_before:
            return bool(self._backlog) or asked
        elif self._backlog and not self._room_wait.is_due() and self._backlog.orders():
            self._not_before = time.monotonic() + PAUSE_SECONDS
            return True
        submitted = False
        try:
            due = self._backlog or self._orders(states) or has_idle_jobs(self._sweep, states)
            submitted = bool(due) and self._submit()
            if self._backlog:
                self._not_before = time.monotonic() + PAUSE_SECONDS
        except OrchestratorError as error:
            # The runs continue, so keep watching them. Wait for Slurm, but not for a request that it rejects.
            if isinstance(error, InputError):
                self._give_up()
            self._not_before = time.monotonic() + PAUSE_SECONDS
            if str(error) != self._last_error:
                self._last_error = str(error)
                sys.stderr.write(f"runs are not submitted yet: {error}\n")
        return submitted or bool(self._backlog) or bool(self._backlog.asked(self._plan, states))

    def _give_up(self) -> None:
        """Submit nothing of the backlog any more."""
        self._backlog.replace(Submitted())
        self._backlog.ask(self._plan, {})

    def _orders(self, states: Mapping[str, RunState]) -> list[BundleOrder]:
        asked = self._backlog.asked(self._plan, states)
        orders = attempts_to_begin(self._plan, states, self._cluster, "infrastructure", asked=asked)
        return [order for order in orders if order.bundle_id not in self._backlog]

    def _submit(self) -> bool:
        with order_lock(self._sweep):
            # Another command may have been faster, cancelled the sweep, or planned it again.
            if not is_planned(self._sweep, self._plan):
                self._give_up()
                return False
            jobs = poll_jobs(self._sweep, self._scheduler)
            print_withdrawn(withdraw_idle_jobs(self._sweep, jobs))
            states = read_states(self._sweep, self._plan, jobs)
            close_dead_attempts(self._sweep, states)
            waiting, retries = self._backlog.orders(), self._orders(states)
            orders = [*waiting, *retries]
            if orders:
                nodes = nodes_to_avoid(states, orders, self._cluster)
                submitted = enqueue(self._sweep, self._plan, orders, self._cluster, self._scheduler, nodes)
                print_later_orders(waiting, retries, submitted)
                self._wait_for_room(orders, submitted)
            self._backlog.replace(submitted if orders else Submitted())
            return bool(orders)

    def _wait_for_room(self, orders: Sequence[BundleOrder], submitted: Submitted) -> None:
        """Note whether anything found room. Tell how long what found none has waited."""
        if len(submitted.left) < len(orders):
            self._room_wait.begin()
        elif (seconds := self._room_wait.go_on()) is not None:
            print_room_wait(orders, submitted.limit, seconds, self._room_wait.pause, has_jobs=self._jobs > 0)


def nodes_to_avoid(states: Mapping[str, RunState], orders: Sequence[BundleOrder], cluster: Cluster) -> tuple[str, ...]:
    """Return the nodes on which the latest attempt of a run failed, or none if too few would be left for ``orders``."""
    outcomes = [state.outcome for state in states.values() if state.outcome is not None and state.outcome.node]
    failed = {node for outcome in outcomes if outcome.blames_node for node in outcome.node.split(",")}
    available = max(sum(nodes.count for nodes in partition.nodes) for partition in cluster.partitions)
    needed = max((order.step.nodes for order in orders if order.step is not None), default=1)
    return tuple(sorted(failed)) if available - len(failed) >= needed else ()
