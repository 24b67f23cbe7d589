"""Measure contention: runs of other allocations on the same host at the same time. They slow down host-bound steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.records.run import Attempt, attempts_of
from analysis.records.steps import Floats
from analysis.sweep.cell_results import CellResult
from launch.common.grouped import grouped

Hosts = Mapping[str, tuple[np.ndarray[Any, Any], Floats]]
"""By host, the allocations of its attempts, (attempts,), and their starts and ends, (attempts, 2), by start."""


@dataclass(frozen=True)
class HostContention:
    """How much other allocations of the sweep overlap with the timed runs on their hosts.

    Each number is a share of the timed runs' total time, from 0 to 1.
    """

    eager: float
    graphed: float


def neighbours_of(results: Sequence[CellResult]) -> HostContention | None:
    """Return the contention of cells with a speed-up and of their eager baselines.

    Return None if no timed run shared its host with another allocation.
    """
    attempts = [attempt for result in results for attempt in attempts_of(result.runs)]
    on_host = grouped((host, a.outcome) for a in attempts for host in _hosts_of(a))
    hosts = {}
    for host, outcomes in on_host.items():
        outcomes.sort(key=lambda outcome: outcome.started)
        spans = np.array([(outcome.started, outcome.ended) for outcome in outcomes])
        hosts[host] = np.array([outcome.allocation for outcome in outcomes]), spans
    timed = {result.cell.workload_id for result in results if result.speed.speedup}
    sides: tuple[list[Attempt], list[Attempt]] = ([], [])
    for result in results:
        if result.speed.speedup or (not result.cell.graphed and result.cell.workload_id in timed):
            sides[result.cell.graphed].extend(attempts_of(result.runs))
    eager, graphed = (_share(side, hosts) for side in sides)
    return HostContention(eager, graphed) if eager or graphed else None


def _share(timed: Sequence[Attempt], hosts: Hosts) -> float:
    total = sum(attempt.outcome.ended - attempt.outcome.started for attempt in timed)
    shared = sum(max((_shared_seconds(a, *hosts[host]) for host in _hosts_of(a)), default=0.0) for a in timed)
    return shared / total if total > 0 else 0.0


def _shared_seconds(attempt: Attempt, allocations: np.ndarray[Any, Any], spans: Floats) -> float:
    """Return the seconds of ``attempt`` that overlap with at least one attempt of another allocation on a host."""
    own = attempt.outcome
    starts, ends = spans[allocations != own.allocation].clip(own.started, own.ended).T
    covered = np.maximum.accumulate(np.concatenate([[own.started], ends]))[:-1]
    return float(np.maximum(ends - np.maximum(starts, covered), 0.0).sum())


def _hosts_of(attempt: Attempt) -> frozenset[str]:
    return frozenset(map(str, attempt.hardware("hosts")))
