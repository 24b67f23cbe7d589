"""The layers of each pipeline stage."""

from __future__ import annotations

from itertools import pairwise


def layers_of(num_layers: int, stages: int, chunks: int) -> tuple[range, ...]:
    """Return the layers of each virtual stage.

    If the layers do not divide evenly, the virtual stages just before the last one get one extra layer each. The last stage gets
    none, because it computes the head and the loss. The first stage is the last to get one: it has the embedding and, with
    1F1B, the most micro-batches in flight. Consecutive virtual stages are on different ranks, which spreads extra layers over
    ranks.

    Raises:
        ValueError: fewer layers than virtual stages.
    """
    parts = stages * chunks
    if num_layers < parts:
        raise ValueError(
            f"num_layers={num_layers} leaves some of pp={stages} * vpp={chunks} = {parts} virtual stages without a "
            f"layer: lower pp or vpp until their product is {num_layers} or less"
        )
    share, extra = divmod(num_layers, parts)
    ends = [(part + 1) * share + max(0, min(part - (parts - 2 - extra), extra)) for part in range(parts)]
    return tuple(range(start, end) for start, end in pairwise([0, *ends]))


def layers_of_stages(num_layers: int, stages: int, chunks: int) -> list[list[int]]:
    """Return the numbers of the layers of each pipeline stage, over all of its chunks."""
    virtual = layers_of(num_layers, stages, chunks)
    return [[number for part in virtual[stage::stages] for number in part] for stage in range(stages)]
