"""The order of forward and backward passes on each pipeline rank. Pure, without torch.

The layers are divided into ``stages * chunks`` virtual stages. Rank ``stage`` has virtual stage ``chunk * stages + stage`` for
each chunk, so neighbouring virtual stages are on neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Kind = Literal["forward", "backward"]

SENDS_IN_FLIGHT = 2
"""The number of sends on an edge that may be in flight, which bounds the memory of sent tensors. With balanced stages and any
schedule here, the receiver takes the first tensor before the sender has a third, so no rank waits. With a limit of one,
slightly unbalanced stages would wait."""


@dataclass(frozen=True)
class Action:
    """One microbatch through one chunk of a rank, forward or backward."""

    kind: Kind
    chunk: int
    microbatch: int
    receives: bool
    """Whether it receives a tensor from another rank: forward in all but the first virtual stage, backward in all but the
    last."""
    sends: bool
    """Whether it sends a tensor to another rank: forward in all but the last virtual stage, backward in all but the first."""


@dataclass(frozen=True)
class Edge:
    """Two ranks of the world, and what the first sends to the second: activations (forward) or gradients (backward)."""

    kind: Kind
    source: int
    destination: int


def actions(schedule: Schedule, stage: int, stages: int, chunks: int, microbatches: int) -> tuple[Action, ...]:
    """Return the actions of rank ``stage`` of ``stages`` in a step.

    These are warm-up forwards, alternating forwards and backwards, and the remaining backwards.

    - gpipe (Huang et al. 2019): all forwards, then all backwards; every microbatch is in flight at once.
    - 1f1b (Narayanan et al. 2019): ``stages - stage`` microbatches are in flight.
    - interleaved (Narayanan et al. 2021, in Megatron-Core's order, schedules.py ``get_schedule_table``): 1F1B over
      several chunks per rank, in groups of ``stages`` microbatches. The bubble shrinks by a factor of ``chunks``.

    Only interleaved takes several chunks. It needs at least two stages, and a multiple of ``stages`` microbatches.
    With a single stage every schedule is a backward after each forward.
    """
    if schedule == "interleaved":
        assert stages > 1 and microbatches % stages == 0, (stages, microbatches)
    else:
        assert chunks == 1, (schedule, chunks)
    order = [
        (chunk, microbatch)
        for first in range(0, microbatches, stages)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + stages, microbatches))
    ]
    last = stages * chunks - 1

    def action(kind: Kind, chunk: int, microbatch: int) -> Action:
        virtual = chunk * stages + stage
        receives, sends = virtual > 0, virtual < last
        return Action(kind, chunk, microbatch, *((receives, sends) if kind == "forward" else (sends, receives)))

    forwards = [action("forward", chunk, microbatch) for chunk, microbatch in order]
    backwards = [action("backward", chunks - 1 - chunk, microbatch) for chunk, microbatch in order]
    warmup = min(_warmup(schedule, stage, stages, chunks, microbatches), len(order))
    alternating = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return (*forwards[:warmup], *alternating, *backwards[len(order) - warmup :])


def _warmup(schedule: Schedule, stage: int, stages: int, chunks: int, microbatches: int) -> int:
    """Return the number of forwards before the first backward, minus one (Megatron-Core's ``get_pp_rank_microbatches``)."""
    if schedule == "interleaved":
        return (stages - stage - 1) * 2 + (chunks - 1) * stages
    if schedule == "gpipe" and stages > 1:
        return microbatches
    return stages - stage - 1


def in_flight_by_chunk(run: Sequence[Action]) -> list[int]:
    """Return for each chunk the largest number of microbatches in flight, between their forward and their backward."""
    most: list[int] = []
    alive: list[int] = []
    for action in run:
        while action.chunk >= len(most):
            most.append(0)
            alive.append(0)
        alive[action.chunk] += 1 if action.kind == "forward" else -1
        most[action.chunk] = max(most[action.chunk], alive[action.chunk])
    return most


def edges(pipeline: tuple[int, ...], chunks: int) -> tuple[Edge, ...]:
    """Return all edges between the ranks of one pipeline, in the same order on every rank.

    With several chunks the last rank also sends activations to the first, and the first sends gradients to the last.
    """
    pairs = list(pairwise(pipeline))
    if chunks > 1:
        pairs.append((pipeline[-1], pipeline[0]))
    return tuple(edge for a, b in pairs for edge in (Edge("forward", a, b), Edge("backward", b, a)))
