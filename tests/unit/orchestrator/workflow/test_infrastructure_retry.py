"""Test which nodes a retry avoids."""

from __future__ import annotations

import pytest

from launch.contract.bundle import BundleOrder, Step
from launch.contract.outcomes import Outcome, OutcomeName
from launch.contract.plan import Limits
from orchestrator.sweeps.run_state import RunState
from orchestrator.targets.partition import Nodes, Partition
from orchestrator.targets.profile import Profile
from orchestrator.targets.slurm_cluster import Cluster
from orchestrator.workflow.infrastructure_retry import nodes_to_avoid

CLUSTER = Cluster(
    Profile(),
    (Partition("p", True, "UP", float("inf"), 1, float("inf"), (Nodes(3, 8, 1000), Nodes(1, 8, 9000))),),
    1001,
    None,
)


def ended(name: OutcomeName, failure_class: str, node: str) -> RunState:
    outcome = Outcome(name, "measure", "b.1", 0.0, 1.0, failure_class=failure_class, node=node)
    return RunState(node, name, 2, outcome=outcome, expected=False)


def order(nodes: int) -> BundleOrder:
    return BundleOrder("b", "w", (("run", 2),), Limits(), 0, (), step=Step(nodes, 1, 1, "python"))


def avoided(nodes: int, *states: RunState) -> tuple[str, ...]:
    return nodes_to_avoid({state.run_id: state for state in states}, [order(nodes)], CLUSTER)


@pytest.mark.parametrize(
    ("state", "nodes"),
    [
        (ended("NODE_FAIL", "NODE_FAIL", "node2"), ("node2",)),
        (ended("NODE_FAIL", "NODE_FAIL", "node2,node1"), ("node1", "node2")),
        (ended("NODE_FAIL", "NODE_FAIL", ""), ()),
        (ended("PREEMPTED", "PREEMPTED", "node2"), ()),
        (ended("ENVIRONMENT", "DISK_FULL", "node2"), ()),
        (ended("CUDA_OOM", "CUDA_OOM", "node2"), ()),
        (RunState("run", "RUNNING", 2, alive=True), ()),
    ],
)
def test_a_retry_avoids_a_node_where_the_infrastructure_failed(state: RunState, nodes: tuple[str, ...]) -> None:
    assert avoided(1, state) == nodes


def test_a_retry_avoids_no_node_if_too_few_would_be_left() -> None:
    failed = [ended("NODE_FAIL", "NODE_FAIL", node) for node in ("node1", "node2")]
    assert avoided(2, *failed) == ("node1", "node2")
    assert avoided(3, *failed) == ()
