"""What a bundle asks Slurm for. Pure.

Bundles with equal requests go into one array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.contract.plan import Cell, Limits, Plan
from orchestrator.targets.profile import Profile

START_MINUTES = 10.0
"""From the start of a job to its first run: the site's prolog and setup lines, the supervisor."""
MINUTES_BETWEEN_RUNS = 1.0
"""The start of a step, and the end of one that has reached its limit."""


@dataclass(frozen=True)
class JobRequest:
    """One allocation. ``gpus_per_node`` 0 asks for none; ``minutes`` are sbatch's --time."""

    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    gpus_per_node: int
    minutes: int


def bundle_request(plan: Plan, schedule: Sequence[tuple[str, int]], profile: Profile) -> JobRequest:
    """What the (run_id, attempt) pairs of ``schedule``, all of one bundle, ask for together."""
    cells = plan.cell_of_run()
    return runs_request([cells[run_id] for run_id, _ in schedule], profile)


def runs_request(runs: Sequence[Cell], profile: Profile) -> JobRequest:
    """What runs one after another ask for together, given the cell of each; all are of one workload."""
    return request_for(runs[0].spec["placement"], _minutes(runs), profile)


def request_for(placement: Mapping[str, Any], minutes: int, profile: Profile) -> JobRequest:
    """An allocation for ranks placed so; ``placement`` is a spec's, field by field."""
    wants_gpus = placement["device"] == "cuda" and profile.gpus != "none"
    return JobRequest(
        nodes=placement["nodes"],
        ranks_per_node=placement["ranks_per_node"],
        cpus_per_rank=profile.cpus_per_task or placement["threads_per_rank"],
        gpus_per_node=placement["ranks_per_node"] if wants_gpus else 0,
        minutes=minutes,
    )


def limits_of(runs: Sequence[Cell]) -> Limits:
    """The limits that each of the runs of a bundle is held to: those of the cell that may take longest."""
    return max((cell.limits for cell in runs), key=lambda limits: limits.run_seconds)


def _minutes(runs: Sequence[Cell]) -> int:
    a_run = limits_of(runs).run_seconds / 60 + MINUTES_BETWEEN_RUNS
    return math.ceil(START_MINUTES + len(runs) * a_run)
