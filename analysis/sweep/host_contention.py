"""Measure contention: runs of other allocations on the same host at the same time. They slow down host-bound steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from analysis.records.run import Attempt, attempts_of
from analysis.sweep.cell_results import CellResult


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
    hosts = _Hosts(attempt for result in results for attempt in attempts_of(result.runs))
    timed = {result.cell.workload_id for result in results if result.speed.speedup}
    sides: tuple[list[Attempt], list[Attempt]] = ([], [])
    for result in results:
        if result.speed.speedup or (not result.cell.graphed and result.cell.workload_id in timed):
            sides[result.cell.graphed].extend(attempts_of(result.runs))
    eager, graphed = (_share(side, hosts) for side in sides)
    return HostContention(eager, graphed) if eager or graphed else None


class _Hosts:
    """The attempts on each host, by start time."""

    def __init__(self, attempts: Iterable[Attempt]) -> None:
        self._attempts: dict[str, list[Attempt]] = {}
        self._longest = 0.0
        for attempt in sorted(attempts, key=_start):
            self._longest = max(self._longest, attempt.outcome.ended - attempt.outcome.started)
            for host in _hosts_of(attempt):
                self._attempts.setdefault(host, []).append(attempt)

    def shared_seconds(self, attempt: Attempt) -> float:
        """Return the seconds of ``attempt`` that overlap with at least one attempt of another allocation on its hosts."""
        end = attempt.outcome.ended
        total, until = 0.0, attempt.outcome.started
        for other in merge(*self._candidates(attempt), key=_start):
            if until >= end:
                # If thousands of attempts overlap, the first few already cover all of this one.
                break
            if other.outcome.ended > until and other.outcome.allocation != attempt.outcome.allocation:
                first, last = max(until, other.outcome.started), min(end, other.outcome.ended)
                total, until = total + max(0.0, last - first), max(until, last)
        return total

    def _candidates(self, attempt: Attempt) -> Iterator[Sequence[Attempt]]:
        """Yield for each host of ``attempt`` the attempts that may overlap with it, by start time."""
        for host in _hosts_of(attempt):
            attempts = self._attempts[host]
            first = bisect_left(attempts, attempt.outcome.started - self._longest, key=_start)
            yield attempts[first : bisect_right(attempts, attempt.outcome.ended, key=_start)]


def _share(timed: Sequence[Attempt], hosts: _Hosts) -> float:
    total = sum(attempt.outcome.ended - attempt.outcome.started for attempt in timed)
    return sum(map(hosts.shared_seconds, timed)) / total if total > 0 else 0.0


def _start(attempt: Attempt) -> float:
    return attempt.outcome.started


def _hosts_of(attempt: Attempt) -> frozenset[str]:
    return frozenset(map(str, attempt.hardware("hosts")))
