"""Compute what a bundle requests from Slurm. Pure. Bundles with equal requests go into one job array."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.contract.plan import Cell, Limits, Plan
from orchestrator.targets.profile import Profile

START_MINUTES = 10.0
"""Minutes from the start of a job to its first run: the site's prolog, setup lines, and the supervisor's start."""
MINUTES_BETWEEN_RUNS = 1.0
"""Minutes to start a job step, and to end one that has reached its limit."""


@dataclass(frozen=True)
class JobRequest:
    """One allocation. ``gpus_per_node`` 0 requests no GPUs. ``minutes`` is sbatch's --time."""

    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    gpus_per_node: int
    minutes: int


def bundle_request(plan: Plan, schedule: Sequence[tuple[str, int]], profile: Profile) -> JobRequest:
    """Return the request for the (run_id, attempt) pairs of ``schedule``, all of one bundle."""
    cells = plan.cell_of_run()
    return runs_request([cells[run_id] for run_id, _ in schedule], profile)


def runs_request(runs: Sequence[Cell], profile: Profile) -> JobRequest:
    """Return the request for consecutive runs of one workload, given the cell of each."""
    minutes_per_run = limits_of(runs).run_seconds / 60 + MINUTES_BETWEEN_RUNS
    minutes = math.ceil(START_MINUTES + len(runs) * minutes_per_run)
    return placement_request(runs[0].spec["placement"], minutes, profile)


def placement_request(placement: Mapping[str, Any], minutes: int, profile: Profile) -> JobRequest:
    """Return the request for ranks with ``placement``, a spec's placement as a mapping of its fields."""
    wants_gpus = placement["device"] == "cuda" and profile.gpus != "none"
    return JobRequest(
        nodes=placement["nodes"],
        ranks_per_node=placement["ranks_per_node"],
        cpus_per_rank=profile.cpus_per_task or placement["threads_per_rank"],
        gpus_per_node=placement["ranks_per_node"] if wants_gpus else 0,
        minutes=minutes,
    )


def limits_of(runs: Sequence[Cell]) -> Limits:
    """Return the limits for each run of a bundle: those of the cell that may take longest."""
    return max((cell.limits for cell in runs), key=lambda limits: limits.run_seconds)
