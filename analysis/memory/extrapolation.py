"""Extrapolate the memory of a user's program from finished runs of its sweep, linearly in one flag.

Nothing follows from the recipe, because the model of a program is unknown. But cells with two other values of one flag, such as
fewer layers or a smaller batch, show how memory grows with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from analysis.memory.forecast import RankForecast
from analysis.memory.term import Held, Term, mib
from analysis.records.events import DAMAGE, memory_of, read_events
from launch.common.text import count
from launch.contract.outcomes import read_outcome
from launch.contract.paths import RunPaths, SweepPaths
from launch.contract.records.events import PHASES, Phase
from launch.contract.records.memory import Memory, foreign_bytes
from launch.contract.spec import RunSpec, read_spec

PARTS: Mapping[str, Held] = {
    "tensors": "allocated", "graph pools": "pool", "unused blocks": "cached", "outside of the allocator": "outside",
}  # fmt: skip
Bytes = tuple[int, ...]
"""The bytes of each of PARTS. What the allocator reserved beyond torch's allocated bytes counts as graph pools, up to their size,
and the rest as unused blocks."""


@dataclass(frozen=True)
class Point:
    """What the fullest rank of ``runs`` held in each phase, with ``value`` of the flag."""

    value: float
    runs: int
    phases: Mapping[Phase, Bytes]


@dataclass(frozen=True)
class ProgramRuns:
    """The runs of a user's program that a sweep has on disk, of all its plans."""

    sweep: SweepPaths

    def extrapolate(self, spec: RunSpec) -> RankForecast | None:
        """Return a forecast from the two nearest values of the first flag that has two, or None."""
        if spec.engine != "command" or spec.placement.device != "cuda":
            return None
        words = spec.command.flags
        for place in range(1, len(words)):
            points = self._points(spec, place)
            if len(points) == 2 and (phases := dict(_phases(points, words[place - 1], float(words[place])))):
                return RankForecast(0, phases, 0, f"extrapolated from {count('run', sum(p.runs for p in points))}")
        return None

    def _points(self, spec: RunSpec, place: int) -> list[Point]:
        """Return the two nearest points whose cells differ from ``spec`` in the flag's value at ``place`` alone."""
        wanted = _number(spec.command.flags[place])
        if wanted is None:
            return []
        cells: dict[float, list[RunPaths]] = {}
        for other, runs in self._cells:
            value = _number(other.command.flags[place]) if _differs_at(spec, other, place) else None
            if value is not None and value != wanted:
                cells[value] = runs
        points: list[Point] = []
        for value in sorted(cells, key=lambda value: (abs(value - wanted), value)):
            if len(points) < 2 and (point := Point(value, *fullest_run(cells[value]))).runs:
                points.append(point)
        return sorted(points, key=lambda point: point.value)

    @cached_property
    def _cells(self) -> list[tuple[RunSpec, list[RunPaths]]]:
        cells: dict[str, tuple[RunSpec, list[RunPaths]]] = {}
        for path in sorted(self.sweep.root.glob("runs/*/spec.json")):
            try:
                spec = read_spec(path)
            except DAMAGE:
                continue  # the report names it
            if not spec.perturbed:
                cells.setdefault(spec.cell_id, (spec, []))[1].append(RunPaths(path.parent))
        return list(cells.values())


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _differs_at(spec: RunSpec, other: RunSpec, place: int) -> bool:
    """Return whether ``other`` is ``spec`` except for the word at ``place`` of its flags."""
    words, own = other.command.flags, spec.command.flags
    if len(words) != len(own) or words[:place] != own[:place] or words[place + 1 :] != own[place + 1 :]:
        return False
    return replace(other, command=replace(other.command, flags=own), repeat=spec.repeat) == spec


def fullest_run(runs: Iterable[RunPaths]) -> tuple[int, dict[Phase, Bytes]]:
    """Return how many of ``runs`` have a memory (see :func:`run_memory`), and the most that one of them held in each phase."""
    found = [memory for run in runs if (memory := run_memory(run))]
    phases = [phase for phase in PHASES if any(phase in run for run in found)]
    return len(found), {phase: max((run[phase] for run in found if phase in run), key=sum) for phase in phases}


def run_memory(run: RunPaths) -> dict[Phase, Bytes] | None:
    """Return the memory of the fullest rank by phase, or None if no attempt has a complete and sound record of its own memory."""
    for attempt in reversed(run.attempts()):
        try:
            outcome = read_outcome(attempt)
            spec = read_spec(run.spec)
        except DAMAGE:
            return None
        if outcome is None or not outcome.results_intact:
            continue
        problems: list[str] = []
        by_phase: defaultdict[Phase, list[Bytes]] = defaultdict(list)
        samples = memory_of(read_events(attempt, spec.parallelism.world_size, problems), problems)
        if spec.engine != "command" and any(one.phase == "init" and foreign_bytes(one.memory) for one in samples):
            continue
        for sample in samples:
            if (parts := _parts(sample.memory)) and sample.phase not in ("probe", "teardown"):
                by_phase[sample.phase].append(parts)
        return {phase: max(parts, key=sum) for phase, parts in by_phase.items()} if by_phase and not problems else None
    return None


def _parts(memory: Memory) -> Bytes | None:
    allocated, reserved, outside = memory.peak_allocated, memory.peak_reserved, memory.device_outside
    if allocated is None or reserved is None or outside is None or reserved + outside <= 0:
        return None
    pool = min(memory.graph_pool or 0, max(0, reserved - allocated))
    return allocated, pool, max(0, reserved - allocated - pool), outside


def _phases(points: Sequence[Point], flag: str, value: float) -> Iterator[tuple[Phase, tuple[Term, ...]]]:
    """Yield the terms of each phase of both points. Yield none if memory falls as the flag grows: that is not linear."""
    low, high = points
    phases = [phase for phase in low.phases if phase in high.phases]
    if any(sum(high.phases[phase]) < sum(low.phases[phase]) for phase in phases):
        return
    source = f"extrapolated from {count('run', low.runs + high.runs)} with {flag} {low.value:g} and {high.value:g}"
    for phase in phases:
        terms = []
        for (name, held), first, second in zip(PARTS.items(), low.phases[phase], high.phases[phase], strict=True):
            slope = (second - first) / (high.value - low.value)
            fixed = first - slope * low.value
            formula = "{:.0f} MiB + {} {:g} x {:.1f} MiB"
            size = max(0, round(fixed + slope * value))
            if first or second:
                terms.append(Term(name, size, formula, (mib(fixed), flag, value, mib(slope)), source, held))
        yield phase, tuple(terms)
