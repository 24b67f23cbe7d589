"""Test what a bundle requests from Slurm: the size of its ranks, and the time of its runs."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.contract.outcomes import Expectation
from launch.contract.plan import Cell, Limits, Margins, Plan, PlannedBundle
from launch.contract.spec import Placement, RunSpec, spec_to_json
from orchestrator.targets.job_request import JobRequest, bundle_request
from orchestrator.targets.profile import Profile

GPUS = Placement("cuda", nodes=2, ranks_per_node=8, threads_per_rank=4)
CPUS = Placement("cpu", nodes=3, ranks_per_node=2, threads_per_rank=1)


def plan_of(placement: Placement, *minutes: float, repeats: int = 1) -> Plan:
    """Return a plan of one bundle. It has a cell for each time limit in ``minutes``."""
    spec = RunSpec(placement=placement)
    cells = tuple(
        Cell(f"c{i}", "", "w", "t", spec_to_json(spec), "run", (), Expectation(),
             tuple(f"c{i}-r{r}" for r in range(repeats)), Limits(limit * 60))
        for i, limit in enumerate(minutes)
    )  # fmt: skip
    runs = tuple(run for cell in cells for run in cell.run_ids)
    return Plan("x", "", "x.yaml", Margins(), cells, (PlannedBundle("b", "w", runs),))


def request(plan: Plan, profile: Profile = Profile(), runs: int | None = None) -> JobRequest:  # noqa: B008 (frozen)
    return bundle_request(plan, [(run, 1) for run in plan.bundles[0].run_ids[:runs]], profile)


@pytest.mark.parametrize(("placement", "profile", "size"), [
    (GPUS, Profile(), (2, 8, 4, 8)),
    (GPUS, Profile(cpus_per_task=12, gpus="gpus_per_node"), (2, 8, 12, 8)),
    (GPUS, Profile(gpus="none"), (2, 8, 4, 0)),
    (CPUS, Profile(), (3, 2, 1, 0)),
])  # fmt: skip
def test_the_size_is_the_recipes_and_the_profile_has_a_word_in_it(
    placement: Placement, profile: Profile, size: tuple[int, int, int, int]
) -> None:
    found = request(plan_of(placement, 30), profile)
    assert (found.nodes, found.ranks_per_node, found.cpus_per_rank, found.gpus_per_node) == size


@given(minutes=st.lists(st.floats(0.1, 10_000), min_size=1, max_size=5), repeats=st.integers(1, 4))
def test_there_is_time_for_every_run_to_reach_its_limit(minutes: list[float], repeats: int) -> None:
    plan = plan_of(CPUS, *minutes, repeats=repeats)
    whole = request(plan)
    assert whole.minutes >= repeats * sum(minutes) + 10
    # The supervisor applies the longest limit of the bundle to each run.
    runs = repeats * len(minutes)
    assert whole.minutes == math.ceil(10 + runs * (max(minutes) * 60 / 60 + 1))
    assert request(plan, runs=1).minutes <= whole.minutes


def test_a_part_of_a_bundle_asks_for_less_time_and_for_the_same_size() -> None:
    plan = plan_of(GPUS, 30, 60)
    part, whole = request(plan, runs=1), request(plan)
    assert (part.minutes, whole.minutes) == (41, 132)
    assert dataclasses.replace(part, minutes=whole.minutes) == whole


@given(
    a=st.sampled_from([GPUS, CPUS]), b=st.sampled_from([GPUS, CPUS]), minutes=st.tuples(*[st.sampled_from([1, 2])] * 2)
)
def test_requests_are_equal_where_one_array_can_hold_them(a: Placement, b: Placement, minutes: tuple[int, int]) -> None:
    first, second = request(plan_of(a, minutes[0])), request(plan_of(b, minutes[1]))
    assert (first == second) == ((a, minutes[0]) == (b, minutes[1]))
    assert len({first, second}) == (1 if first == second else 2)
