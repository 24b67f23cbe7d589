"""What fills a GPU in training: state, activations, graph pool, and memory outside the allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.memory.static_memory import bytes_of_stages
from analysis.records.run import Attempt
from launch.contract.records.memory import Memory
from launch.contract.spec import RunSpec


@dataclass(frozen=True)
class MemoryParts:
    """The parts of a rank's peak in phase "measure", in bytes.

    ``state`` (weights, gradients and optimizer state) is computed from the recipe. It is 0 for a user's program, whose model is
    unknown. ``graph_pool`` holds what graphs write. ``activations`` are the rest of the allocator's reservation, including
    workspaces and unused blocks. ``outside`` are graph executables, communicators and the CUDA context.
    """

    state: int
    activations: int
    graph_pool: int
    outside: int

    @property
    def total(self) -> int:
        return self.state + self.activations + self.graph_pool + self.outside


def memory_parts(attempts: Sequence[Attempt], spec: RunSpec) -> MemoryParts | None:
    """Return the parts of the fullest rank of all ``attempts``, or None if no GPU was recorded in that phase."""
    states = [0] if spec.engine == "command" else bytes_of_stages(spec)
    found = [
        _parts(sample.memory, states[sample.rank // spec.parallelism.stage_size % len(states)])
        for attempt in attempts
        for sample in attempt.memory
        if sample.phase == "measure"
    ]
    return max(filter(None, found), key=lambda parts: parts.total, default=None)


def _parts(memory: Memory, state: int) -> MemoryParts | None:
    if memory.peak_reserved is None or memory.graph_pool is None or memory.device_outside is None:
        return None
    besides = max(0, memory.peak_reserved - memory.graph_pool)
    # A program may keep some of its state in the pool.
    state = min(state, besides)
    return MemoryParts(state, besides - state, min(memory.graph_pool, memory.peak_reserved), memory.device_outside)
