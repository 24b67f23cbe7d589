"""What each pipeline rank runs, and in which order. Pure, without torch.

The layers are cut into ``stages * chunks`` virtual stages; rank ``stage`` of a pipeline holds, of each chunk, virtual
stage ``chunk * stages + stage``, so that a virtual stage's neighbours are on the neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Kind = Literal["forward", "backward"]

SENDS_IN_FLIGHT = 2
"""How many tensors a rank may have sent on an edge before the first is taken, which bounds what sent tensors hold in
memory. In an even pipeline the receiver takes one before the sender has a third, under every schedule here, so that
nobody waits for it; with one tensor only, slightly uneven stages do wait."""


@dataclass(frozen=True)
class Action:
    """One micro-batch through one chunk of a rank, forward or backward."""

    kind: Kind
    chunk: int
    micro_batch: int
    receives: bool
    """Whether it takes a tensor from another rank: a forward all but the first virtual stage, a backward all but the
    last."""
    sends: bool
    """Whether it gives a tensor to another rank: a forward all but the last virtual stage, a backward all but the
    first."""


@dataclass(frozen=True)
class Edge:
    """One direction in which ranks of the world pass activations (forward) or their gradients (backward)."""

    kind: Kind
    source: int
    destination: int


def actions(schedule: Schedule, stage: int, stages: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """What rank ``stage`` of ``stages`` runs in a step: warm-up forwards, then forward and backward in turn, then the
    backwards that are left.

    - gpipe (Huang et al. 2019): all forwards, then all backwards; every micro-batch is in flight at once.
    - 1f1b (Narayanan et al. 2019): ``stages - stage`` micro-batches are in flight.
    - interleaved (Narayanan et al. 2021, in Megatron-Core's order, schedules.py ``get_schedule_table``): 1F1B over
      several chunks a rank, in groups of ``stages`` micro-batches. The idle time shrinks by ``chunks``.

    Only interleaved takes more than one chunk; it needs two stages or more and a multiple of ``stages`` micro-batches.
    A single stage has nobody to keep busy: there every schedule is a backward after each forward.
    """
    if schedule == "interleaved":
        assert stages > 1 and micro_batches % stages == 0, (stages, micro_batches)
    else:
        assert chunks == 1, (schedule, chunks)
    order = [
        (chunk, micro_batch)
        for first in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + stages, micro_batches))
    ]
    last = stages * chunks - 1

    def action(kind: Kind, chunk: int, micro_batch: int) -> Action:
        virtual = chunk * stages + stage
        receives, sends = virtual > 0, virtual < last
        return Action(kind, chunk, micro_batch, *((receives, sends) if kind == "forward" else (sends, receives)))

    forwards = [action("forward", chunk, micro_batch) for chunk, micro_batch in order]
    backwards = [action("backward", chunks - 1 - chunk, micro_batch) for chunk, micro_batch in order]
    warmup = min(_warmup(schedule, stage, stages, chunks, micro_batches), len(order))
    alternating = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return (*forwards[:warmup], *alternating, *backwards[len(order) - warmup :])


def _warmup(schedule: Schedule, stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """How many forwards come before the first pair of a forward and a backward (Megatron-Core's
    ``get_pp_rank_microbatches``)."""
    if schedule == "interleaved":
        return (stages - stage - 1) * 2 + (chunks - 1) * stages
    if schedule == "gpipe" and stages > 1:
        return micro_batches
    return stages - stage - 1


def in_flight_by_chunk(run: Sequence[Action]) -> list[int]:
    """By chunk, how many micro-batches are between their forward and their backward at once, at most."""
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
    """All edges between the ranks of one pipeline, in an order that is the same on every rank. With several chunks
    the last rank's activations wrap around to the first, and the first one's gradients to the last."""
    pairs = list(pairwise(pipeline))
    if chunks > 1:
        pairs.append((pipeline[-1], pipeline[0]))
    return tuple(edge for a, b in pairs for edge in (Edge("forward", a, b), Edge("backward", b, a)))
