"""Decide which bundles one call of sbatch submits, and which of them wait for each other. Pure.

Bundles with equal requests form a job array. If the profile has limits, the arrays form chains, and each chain runs one job at
a time: ``%1`` limits an array to one element, and ``--dependency=singleton`` on the chain's name orders its arrays. Slurm
enforces this even if no command of ours runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from launch.common.grouped import grouped
from orchestrator.errors import input_error
from orchestrator.targets.job_request import JobRequest


@dataclass(frozen=True)
class Array:
    """The bundles of one call of sbatch, by id, with equal requests."""

    request: JobRequest
    bundles: tuple[str, ...]
    chain: int | None = None
    """None if there are no limits."""

    def halves(self) -> tuple[Array, Array]:
        """Return two arrays that have the bundles of this one, which has several."""
        middle = len(self.bundles) // 2
        return replace(self, bundles=self.bundles[:middle]), replace(self, bundles=self.bundles[middle:])


def count_chains(widest: int, max_nodes: int | None, max_jobs: int | None) -> int | None:
    """Return the number of chains that stays within the limits for any bundles at once, or None without limits.

    ``widest`` is the number of nodes of the sweep's widest bundle, even if it is submitted at another time.

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
    """Return arrays of at most ``most`` elements. If ``most`` is below 2, each bundle is a job of its own.

    ``loads`` has the minutes of work that each chain already has. None means no chains.
    """
    # A site without job arrays sets 0.
    most = max(1, most)
    if loads is None:
        return tuple(_arrays(requests, requests, None, most))
    chains = _spread(requests, loads)
    return tuple(array for chain, bundles in enumerate(chains) for array in _arrays(bundles, requests, chain, most))


def _spread(requests: Mapping[str, JobRequest], loads: Sequence[float]) -> list[list[str]]:
    """Return the bundles of each chain. Assign the longest bundle first, and each bundle to the chain that is free first."""
    chains: list[list[str]] = [[] for _ in loads]
    free = [(load, chain) for chain, load in enumerate(loads)]
    heapq.heapify(free)
    for bundle, request in sorted(requests.items(), key=lambda item: -item[1].minutes):
        load, chain = free[0]
        chains[chain].append(bundle)
        heapq.heapreplace(free, (load + request.minutes, chain))
    return chains


def _arrays(
    bundles: Iterable[str], requests: Mapping[str, JobRequest], chain: int | None, most: int
) -> Iterable[Array]:
    for request, group in grouped((requests[bundle], bundle) for bundle in bundles).items():
        for first in range(0, len(group), most):
            yield Array(request, tuple(group[first : first + most]), chain)
