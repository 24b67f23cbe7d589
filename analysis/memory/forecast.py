"""Forecast the GPU memory of each pipeline rank as a sum of named terms, from the recipe alone.

A term is bytes with a formula and a source. It is ``allocated`` (a tensor that is alive at the peak of its phase), in a graph
``pool`` beside those, ``cached`` (blocks that the allocator keeps, and gives back before memory runs out) or ``outside`` of the
allocator. The sum of the first is torch's peak of allocated bytes, the sum of all is the memory of the device. What no formula
gives is in measured_constants.py.
docs/memory.md explains an example, and docs/results/forecast/report.md compares with what GPUs held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analysis.memory.eager_terms import eager_step, outside
from analysis.memory.graph_terms import graph_executables, layer_capture, layer_replay, step_capture, step_replay
from analysis.memory.rank_load import CellLoad, RankLoad
from analysis.memory.static_memory import state_of_stages
from analysis.memory.term import Term, total
from launch.contract.records.events import Phase
from launch.contract.spec import RunSpec


@dataclass(frozen=True)
class RankForecast:
    """The memory of the ranks of a pipeline stage, by phase.

    ``worst_imbalance``: what more it takes if every token of the group chooses experts of this rank, in bytes.
    """

    stage: int
    phases: Mapping[Phase, tuple[Term, ...]]
    worst_imbalance: int

    def allocated(self, phase: Phase) -> int:
        return sum(term.bytes for term in self.phases[phase] if term.held == "allocated")

    def device(self, phase: Phase) -> int:
        return total(self.phases[phase])

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
        """The least device memory with which no phase runs out of it: without what the allocator can give back."""
        phases = self.phases.values()
        return max(sum(term.bytes for term in terms if term.held != "cached") for terms in phases)


def fullest_rank(spec: RunSpec) -> RankForecast | None:
    """Return the forecast of the fullest rank; None for a CPU, and where the model is unknown."""
    return max(_forecast(spec, every=False), key=lambda rank: rank.peak, default=None)


def forecast(spec: RunSpec) -> list[RankForecast]:
    """Return the forecast of a rank of each pipeline stage; none for a CPU, and where the model is unknown."""
    return _forecast(spec, every=True)


def _forecast(spec: RunSpec, every: bool) -> list[RankForecast]:
    """Leave out what cannot be the fullest unless ``every`` rank is meant."""
    if spec.engine == "command" or spec.placement.device != "cuda":
        return []
    cell = CellLoad(spec)
    ranks = [RankLoad(cell, stage, state) for stage, state in enumerate(state_of_stages(spec))]
    if not every:
        ranks = [rank for rank in ranks if not any(_holds_as_much(other, rank) for other in ranks[: rank.stage])]
    around = outside(cell)
    return [RankForecast(rank.stage, _phases(rank, around), rank.worst_imbalance) for rank in ranks]


def _holds_as_much(earlier: RankLoad, rank: RankLoad) -> bool:
    """Return whether an earlier stage, which has more micro-batches in flight, has as many layers too, and ``rank`` no loss."""
    return not rank.is_last and earlier.layers >= rank.layers and earlier.between_steps >= rank.between_steps


def _phases(rank: RankLoad, around: tuple[Term, ...]) -> Mapping[Phase, tuple[Term, ...]]:
    """Return the terms of each phase with a peak of its own. Steps of an eager run are all alike."""
    implementation, eager = rank.spec.cuda_graph.implementation, eager_step(rank)
    phases: dict[Phase, tuple[Term, ...]] = {}
    if not implementation.captures_in_first_step:
        phases["warmup"] = (*eager, *around)
    if not rank.spec.graphed:
        phases["measure"] = phases["warmup"]
    around = (*around, graph_executables())
    if implementation.takes_whole_model:
        replay = step_replay(rank)
        phases["capture"] = (*step_capture(rank, eager, replay), *around)
        phases["measure"] = (*replay, *around)
    elif implementation.takes_scope:
        # A capture in the first step comes before the optimizer has its state, and is not the peak.
        if "warmup" in phases:
            phases["capture"] = (*layer_capture(rank, eager), *around)
        phases["measure"] = (*layer_replay(rank), *around)
    return phases
