"""Runs of other allocations that were under way on the same host: where a step waits for the host, they slow it down."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from analysis.records.run import Attempt, attempts_of
from analysis.sweep.cell_results import CellResult


@dataclass(frozen=True)
class HostContention:
    """The share of the time of timed runs, from 0 to 1, in which a run of another allocation of the sweep was under way on the
    host of rank 0."""

    eager: float
    graphed: float


def neighbours_of(results: Sequence[CellResult]) -> HostContention | None:
    """Of the cells that have a speed and their eager twins; None where no timed run had a neighbour."""
    hosts = _Hosts(attempt for result in results for attempt in attempts_of(result.runs))
    timed = {result.cell.workload_id for result in results if result.speed.speedup}
    sides: tuple[list[Attempt], list[Attempt]] = ([], [])
    for result in results:
        if result.speed.speedup or (not result.cell.graphed and result.cell.workload_id in timed):
            sides[result.cell.graphed].extend(attempts_of(result.runs))
    eager, graphed = (_share(side, hosts) for side in sides)
    return HostContention(eager, graphed) if eager or graphed else None


class _Hosts:
    """What ran on each host, by when it began."""

    def __init__(self, attempts: Iterable[Attempt]) -> None:
        self._on: dict[str, list[Attempt]] = {}
        self._longest = 0.0
        for attempt in sorted(attempts, key=_began):
            self._longest = max(self._longest, attempt.outcome.ended - attempt.outcome.started)
            for host in _hosts_of(attempt):
                self._on.setdefault(host, []).append(attempt)

    def seconds_beside(self, attempt: Attempt) -> float:
        """Of ``attempt``'s time that with at least one neighbour."""
        began, ended = attempt.outcome.started, attempt.outcome.ended
        covered, until = 0.0, began
        for other in sorted(self._near(attempt), key=_began):
            if other.outcome.allocation != attempt.outcome.allocation:
                first, last = max(until, other.outcome.started), min(ended, other.outcome.ended)
                covered, until = covered + max(0.0, last - first), max(until, last)
        return covered

    def _near(self, attempt: Attempt) -> Iterable[Attempt]:
        for host in _hosts_of(attempt):
            found = self._on[host]
            first = bisect_left(found, attempt.outcome.started - self._longest, key=_began)
            yield from found[first : bisect_right(found, attempt.outcome.ended, key=_began)]


def _share(timed: Sequence[Attempt], hosts: _Hosts) -> float:
    whole = sum(attempt.outcome.ended - attempt.outcome.started for attempt in timed)
    return sum(map(hosts.seconds_beside, timed)) / whole if whole > 0 else 0.0


def _began(attempt: Attempt) -> float:
    return attempt.outcome.started


def _hosts_of(attempt: Attempt) -> frozenset[str]:
    hardware = attempt.environment.get("hardware")
    hosts = hardware.get("hosts") if isinstance(hardware, dict) else None
    return frozenset(map(str, hosts)) if isinstance(hosts, list) else frozenset()
