"""Decide which bundles one call of sbatch submits, and which of them wait for each other. Pure.

Bundles with equal requests form a job array. Under the profile's limits the arrays are spread over lanes, which run one
job at a time each: ``%1`` limits an array to one element, and ``--dependency=singleton`` on the lane's name orders its
arrays. Slurm enforces this even when no command of ours runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import input_error
from orchestrator.targets.job_request import JobRequest


@dataclass(frozen=True)
class Array:
    """The bundles of one call of sbatch, by id, with equal requests."""

    request: JobRequest
    bundles: tuple[str, ...]
    lane: int | None = None
    """None without limits."""


def count_lanes(widest: int, max_nodes: int | None, max_jobs: int | None) -> int | None:
    """Return how many lanes stay within the limits, whichever bundles run at once; None without limits.

    ``widest`` is the number of nodes of the sweep's widest bundle, also if it is submitted at another time.

    Raises:
        InputError: that bundle alone exceeds ``max_nodes``.
    """
    if max_nodes is not None and widest > max_nodes:
        raise input_error("max_nodes", f"{max_nodes}: a bundle of this sweep takes {widest} nodes",
                    f"raise it to {widest} in the cluster's profile, or leave that bundle's cells out")  # fmt: skip
    limits = [max_jobs] if max_jobs is not None else []
    if max_nodes is not None:
        limits.append(max_nodes // widest)
    return min(limits, default=None)


def form_arrays(requests: Mapping[str, JobRequest], loads: Sequence[float] | None, most: int) -> tuple[Array, ...]:
    """Return arrays of at most ``most`` elements; below 2 each bundle is a job of its own.

    ``loads`` is the minutes of work that each lane already has; None submits without lanes.
    """
    # A site without job arrays sets 0.
    most = max(1, most)
    if loads is None:
        return tuple(_arrays(requests, requests, None, most))
    lanes = _spread(requests, loads)
    return tuple(array for lane, bundles in enumerate(lanes) for array in _arrays(bundles, requests, lane, most))


def _spread(requests: Mapping[str, JobRequest], loads: Sequence[float]) -> list[list[str]]:
    """Return the bundles of each lane: the longest bundle first, each to the lane that is free first."""
    lanes: list[list[str]] = [[] for _ in loads]
    free = [(load, lane) for lane, load in enumerate(loads)]
    heapq.heapify(free)
    for bundle, request in sorted(requests.items(), key=lambda item: -item[1].minutes):
        load, lane = free[0]
        lanes[lane].append(bundle)
        heapq.heapreplace(free, (load + request.minutes, lane))
    return lanes


def _arrays(bundles: Iterable[str], requests: Mapping[str, JobRequest], lane: int | None, most: int) -> Iterable[Array]:
    groups: dict[JobRequest, list[str]] = {}
    for bundle in bundles:
        groups.setdefault(requests[bundle], []).append(bundle)
    for request, group in groups.items():
        for first in range(0, len(group), most):
            yield Array(request, tuple(group[first : first + most]), lane)
