"""Retry runs that an infrastructure failure ended, while a command watches the sweep under Slurm."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from launch.contract.bundle import BundleOrder
from launch.contract.errors import OrchestratorError
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.output.progress import print_retries
from orchestrator.submit.attempts_to_begin import attempts_to_begin
from orchestrator.submit.slurm_queue import enqueue, poll_jobs
from orchestrator.sweeps.close_attempts import close_dead_attempts
from orchestrator.sweeps.run_state import RunState, read_states
from orchestrator.sweeps.slurm_jobs import JobMonitor
from orchestrator.sweeps.store import is_planned, order_lock
from orchestrator.targets.slurm_cluster import Cluster

PAUSE_SECONDS = 30.0
"""Seconds to wait after a retry that could not be submitted, while other runs continue."""


class InfrastructureRetry:
    """Submit retries, given the state of each run. Return whether any was submitted."""

    def __init__(self, sweep: SweepPaths, plan: Plan, cluster: Cluster, scheduler: JobMonitor) -> None:
        self._sweep = sweep
        self._plan = plan
        self._cluster = cluster
        self._scheduler = scheduler
        self._not_before = 0.0
        self._last_error = ""

    def __call__(self, states: Mapping[str, RunState]) -> bool:
        if time.monotonic() < self._not_before and any(state.alive for state in states.values()):
            return False
        try:
            return bool(self._orders(states)) and self._submit()
        except OrchestratorError as error:
            # The runs continue, so keep watching them.
            self._not_before = time.monotonic() + PAUSE_SECONDS
            if str(error) != self._last_error:
                self._last_error = str(error)
                sys.stderr.write(f"retries are not submitted yet: {error}\n")
            return False

    def _orders(self, states: Mapping[str, RunState]) -> tuple[BundleOrder, ...]:
        return attempts_to_begin(self._plan, states, self._cluster, "infrastructure")

    def _submit(self) -> bool:
        with order_lock(self._sweep):
            # Another command may have been faster, cancelled the sweep, or planned it again.
            if not is_planned(self._sweep, self._plan):
                return False
            jobs = poll_jobs(self._sweep, self._scheduler)
            states = read_states(self._sweep, self._plan, jobs)
            close_dead_attempts(self._sweep, states)
            orders = self._orders(states)
            if orders:
                nodes = nodes_to_avoid(states, orders, self._cluster)
                avoided = enqueue(self._sweep, self._plan, orders, self._cluster, self._scheduler, nodes)
                print_retries(orders, avoided)
            return bool(orders)


def nodes_to_avoid(states: Mapping[str, RunState], orders: Sequence[BundleOrder], cluster: Cluster) -> tuple[str, ...]:
    """Return the nodes on which the latest attempt of a run failed, or none if too few would be left for ``orders``."""
    outcomes = [state.outcome for state in states.values() if state.outcome is not None and state.outcome.node]
    failed = {node for outcome in outcomes if outcome.blames_node for node in outcome.node.split(",")}
    available = max(sum(nodes.count for nodes in partition.nodes) for partition in cluster.partitions)
    needed = max((order.step.nodes for order in orders if order.step is not None), default=1)
    return tuple(sorted(failed)) if available - len(failed) >= needed else ()
