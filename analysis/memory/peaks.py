"""Memory by phase, memory added by the capture, and headroom.

On a GPU the figure is the memory that nobody else can use: the allocator's reservation and the memory outside it (graph
executables, communicators, the context). Peaks of allocated bytes mislead, because replay allocates nothing. On a CPU it is the
process's resident memory. All figures are bytes; a cell's are the maximum over ranks and repeats. Headroom is the memory of the
smallest GPU beyond the peak of training. It needs runs with complete results, because no record holds the peak of a phase that
ran out of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from analysis.memory.parts import MemoryParts, memory_parts
from analysis.records.run import Attempt
from launch.common.grouped import grouped
from launch.contract.records.events import BEFORE_CAPTURE, PHASES, Phase
from launch.contract.records.memory import Memory
from launch.contract.spec import RunSpec

Kind = Literal["device", "host"]
KIND_WORDS: dict[Kind, str] = {
    "device": "GPU memory (reserved and outside the allocator)",
    "host": "resident memory (CPU host)",
}


@dataclass(frozen=True)
class PhasePeak:
    """The peak of one phase. Its parts are None on a CPU."""

    phase: Phase
    peak: int
    peak_allocated: int | None
    graph_pool: int | None
    device_outside: int | None


@dataclass(frozen=True)
class CellMemory:
    """A cell's memory.

    ``added`` is graphed minus eager at the end of measure, the maximum over ranks and pairs. ``headroom`` is None on a CPU, if
    a run did not end well, or if the GPU's memory is not recorded.
    """

    kind: Kind
    phases: tuple[PhasePeak, ...]
    added: int | None
    device_total: int | None = None
    """The memory of the smallest GPU."""
    parts: MemoryParts | None = None
    """What fills the GPU in training. None on a CPU, or before phase "measure"."""
    whole: bool = False
    """Whether all runs ended with complete results."""

    @property
    def peak(self) -> int:
        """The largest peak. On a GPU it excludes the probe and later, whose profiler holds device memory."""
        training = [p.peak for p in self.phases if self.kind == "host" or p.phase not in ("probe", "teardown")]
        return max(training or [phase.peak for phase in self.phases])

    @property
    def headroom(self) -> int | None:
        return self.device_total - self.peak if self.whole and self.device_total is not None else None

    @property
    def before_capture(self) -> Mapping[Phase, int]:
        """The peaks of the phases before the capture. A graph that is captured in the first step has no warm-up."""
        return {p.phase: p.peak for p in self.phases if p.phase in BEFORE_CAPTURE}


def cell_memory(
    attempts: Sequence[Attempt], pairs: Sequence[tuple[Attempt, Attempt]], spec: RunSpec
) -> CellMemory | None:
    """Return the memory of a cell's ``attempts`` and (eager, graphed) ``pairs``, or None without records."""
    kind: Kind = "device" if spec.placement.device == "cuda" else "host"
    samples = grouped((sample.phase, sample.memory) for attempt in attempts for sample in attempt.memory)
    peaks = (_phase_peak(phase, samples[phase], kind) for phase in PHASES if phase in samples)
    phases = tuple(peak for peak in peaks if peak is not None)
    if not phases:
        return None
    whole = all(attempt.outcome.results_intact for attempt in attempts)
    total = _device_total(attempts) if kind == "device" else None
    return CellMemory(kind, phases, _added(pairs, kind), total, memory_parts(attempts, spec), whole)


def _device_total(attempts: Sequence[Attempt]) -> int | None:
    """Return the memory of the smallest GPU of ``attempts``, or None if one did not record it."""
    recorded = [attempt.hardware("gpu_memory_bytes") for attempt in attempts]
    found = [[total for total in totals if type(total) is int and total > 0] for totals in recorded]
    return min((total for totals in found for total in totals), default=None) if all(found) else None


def _phase_peak(phase: Phase, samples: Sequence[Memory], kind: Kind) -> PhasePeak | None:
    peak = _largest(_peak_bytes(sample, kind) for sample in samples)
    if peak is None:
        return None
    return PhasePeak(
        phase=phase,
        peak=peak,
        peak_allocated=_largest(sample.peak_allocated for sample in samples),
        graph_pool=_largest(sample.graph_pool for sample in samples),
        device_outside=_largest(sample.device_outside for sample in samples),
    )


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _peak_bytes(memory: Memory, kind: Kind) -> int | None:
    return memory.host_peak_rss if kind == "host" else _sum(memory.peak_reserved, memory.device_outside)


def _held_bytes(memory: Memory, kind: Kind) -> int | None:
    return memory.host_rss if kind == "host" else _sum(memory.reserved, memory.device_outside)


def _sum(reserved: int | None, outside: int | None) -> int | None:
    return None if reserved is None or outside is None else reserved + outside


def _added(pairs: Sequence[tuple[Attempt, Attempt]], kind: Kind) -> int | None:
    differences = []
    for eager, graphed in pairs:
        before, after = _at_end_of_measure(eager, kind), _at_end_of_measure(graphed, kind)
        differences += [after[rank] - before[rank] for rank in before.keys() & after.keys()]
    return max(differences, default=None)


def _at_end_of_measure(attempt: Attempt, kind: Kind) -> dict[int, int]:
    held = {sample.rank: _held_bytes(sample.memory, kind) for sample in attempt.memory if sample.phase == "measure"}
    return {rank: value for rank, value in held.items() if value is not None}
