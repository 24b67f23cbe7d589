"""Which bundles go to Slurm by one call of sbatch, and which of them wait for each other. Pure.

Bundles with equal requests form an array. A sweep with limits is spread over lanes, of which each runs one job at a
time: its arrays take one element at a time (``%1``), and one after another by ``--dependency=singleton`` on the lane's
name. Slurm keeps to that whoever has gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.errors import input_error
from orchestrator.targets.job_request import JobRequest


@dataclass(frozen=True)
class Array:
    """What one call of sbatch submits: bundles by id, that ask for the same."""

    request: JobRequest
    bundles: tuple[str, ...]
    lane: int | None = None
    """None where the sweep has no limits."""


def count_lanes(widest: int, max_nodes: int | None, max_jobs: int | None) -> int | None:
    """How many lanes keep within the limits, whichever bundles meet; None without limits.

    ``widest`` is the nodes of the sweep's widest bundle, whether or not it is submitted now: what is submitted later
    meets what was submitted before.

    Raises:
        InputError: that bundle alone is over ``max_nodes``.
    """
    if max_nodes is not None and widest > max_nodes:
        raise input_error("max_nodes", f"{max_nodes}: a bundle of this sweep takes {widest} nodes",
                    f"raise it to {widest} in the cluster's profile, or leave that bundle's cells out")  # fmt: skip
    limits = [max_jobs] if max_jobs is not None else []
    if max_nodes is not None:
        limits.append(max_nodes // widest)
    return min(limits, default=None)


def form_arrays(requests: Mapping[str, JobRequest], loads: Sequence[float] | None, most: int) -> tuple[Array, ...]:
    """Arrays of at most ``most`` elements, from what each bundle asks for; below 2 each is a job of its own.

    ``loads`` is the minutes of work that each lane has before it; None submits without lanes.
    """
    most = max(1, most)  # a site without arrays says 0
    if loads is None:
        return tuple(_arrays(requests, requests, None, most))
    lanes = _spread(requests, loads)
    return tuple(array for lane, bundles in enumerate(lanes) for array in _arrays(bundles, requests, lane, most))


def _spread(requests: Mapping[str, JobRequest], loads: Sequence[float]) -> list[list[str]]:
    """Bundles by lane: the longest first, each to the lane that is free first."""
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
