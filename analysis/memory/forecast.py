"""Forecast the GPU memory of each pipeline rank as a sum of named terms, from the recipe alone.

A term has bytes, a formula and a source. It is of one of four kinds. ``allocated`` are tensors that are alive at the peak of
their phase. ``pool`` is further memory of a graph's pool. ``cached`` are blocks that the allocator keeps, and frees before memory
runs out. ``outside`` is memory outside the allocator. The sum of ``allocated`` is torch's peak of allocated bytes, and the sum
of all is the memory of the device. measured_constants.py holds what no formula gives. docs/memory.md explains an example.
docs/results/forecast/report.md compares forecasts with the memory that GPUs held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.memory.eager_terms import eager_step, outside, step
from analysis.memory.graph_terms import graph_executables, layer_capture, layer_replay, step_capture, step_replay
from analysis.memory.measured_constants import MEASURED, Constants, uncertain_settings
from analysis.memory.rank_load import CellLoad, RankLoad
from analysis.memory.static_memory import state_of_stages
from analysis.memory.term import Term, total
from launch.contract.records.events import Phase
from launch.contract.records.step_check import COMPARISON_BYTES
from launch.contract.spec import RunSpec


@dataclass(frozen=True)
class RankForecast:
    """The memory of the ranks of a pipeline stage, by phase.

    ``worst_imbalance`` is the additional memory if every token of the group chooses experts of this rank, in bytes.
    """

    stage: int
    phases: Mapping[Phase, tuple[Term, ...]]
    worst_imbalance: int
    basis: str = ""
    """Where the figures come from if not from formulas: "extrapolated from 4 runs"."""
    checked: int = 0
    """The least device memory in which a step check fits, in bytes; 0 without step checks."""
    uncertain: tuple[str, ...] = ()
    """The settings that hardly any run had (measured_constants.uncertain_settings)."""

    def allocated(self, phase: Phase) -> int:
        return sum(term.bytes for term in self.phases[phase] if term.held == "allocated")

    def device(self, phase: Phase) -> int:
        return total(self.phases[phase])

    @property
    def remark(self) -> str:
        """What a reader must know of the figures, or ""."""
        return self.basis or f"uncertain with {' and '.join(self.uncertain)}" * bool(self.uncertain)

    @property
    def fullest_phase(self) -> Phase:
        return max(self.phases, key=self.device)

    @property
    def peak_allocated(self) -> int:
        return max(map(self.allocated, self.phases))

    @property
    def peak(self) -> int:
        """The most device memory of any phase."""
        return max(map(self.device, self.phases))

    @property
    def needed(self) -> int:
        """The least device memory with which no phase runs out of memory. It excludes what the allocator can free."""
        return max(map(_needed, self.phases.values()))


def fullest_rank(spec: RunSpec, constants: Constants = MEASURED) -> RankForecast | None:
    """Return the forecast of the fullest rank, or None for a CPU or an unknown model."""
    return max(_forecast(spec, constants, every=False), key=lambda rank: rank.peak, default=None)


def forecast(spec: RunSpec, constants: Constants = MEASURED) -> list[RankForecast]:
    """Return the forecast of a rank of each pipeline stage, or none for a CPU or an unknown model."""
    return _forecast(spec, constants, every=True)


def _forecast(spec: RunSpec, constants: Constants, every: bool) -> list[RankForecast]:
    """Return the forecasts. Leave out ranks that cannot be the fullest unless ``every`` is set."""
    if spec.engine == "command" or spec.placement.device != "cuda":
        return []
    cell = CellLoad(spec, constants)
    ranks = [RankLoad(cell, stage, state) for stage, state in enumerate(state_of_stages(spec))]
    if not every:
        ranks = [rank for rank in ranks if not any(_holds_as_much(other, rank) for other in ranks[: rank.stage])]
    around, uncertain = outside(cell), uncertain_settings(spec)
    phases = [_phases(rank, around) for rank in ranks]
    return [
        RankForecast(rank.stage, of_rank, rank.worst_imbalance, checked=_checked(rank, of_rank), uncertain=uncertain)
        for rank, of_rank in zip(ranks, phases, strict=True)
    ]


def _needed(terms: Sequence[Term]) -> int:
    return sum(term.bytes for term in terms if term.held != "cached")


def _checked(rank: RankLoad, phases: Mapping[Phase, tuple[Term, ...]]) -> int:
    """Return the memory with which a replay's graphs and an eager step fit at once. Copies of the state go to the host."""
    if not rank.spec.checked_steps:
        return 0
    outside = total(step(rank, rank.cell.captured)) if rank.spec.cuda_graph.implementation.takes_scope else 0
    return _needed(phases["measure"]) - outside + total(step(rank)) + COMPARISON_BYTES


def _holds_as_much(earlier: RankLoad, rank: RankLoad) -> bool:
    """Return whether ``earlier`` holds at least as much as ``rank``.

    An earlier stage has more micro-batches in flight, so it does if it has as many layers and ``rank`` computes no loss.
    """
    return not rank.is_last and earlier.layers >= rank.layers and earlier.between_steps >= rank.between_steps


def _phases(rank: RankLoad, around: tuple[Term, ...]) -> Mapping[Phase, tuple[Term, ...]]:
    """Return the terms of each phase that has its own peak. All steps of an eager run are alike."""
    implementation, eager = rank.spec.cuda_graph.implementation, eager_step(rank)
    phases: dict[Phase, tuple[Term, ...]] = {}
    if not implementation.captures_in_first_step:
        phases["warmup"] = (*eager, *around)
    if not rank.spec.graphed:
        phases["measure"] = phases["warmup"]
    around = (*around, graph_executables(rank.cell))
    if implementation.takes_whole_model:
        replay = step_replay(rank)
        phases["capture"] = (*step_capture(rank, eager, replay), *around)
        phases["measure"] = (*replay, *around)
    elif implementation.takes_scope:
        # A capture in the first step precedes the optimizer's state, so it is not the peak.
        if "warmup" in phases:
            phases["capture"] = (*layer_capture(rank, eager), *around)
        phases["measure"] = (*layer_replay(rank), *around)
    return phases
