"""Count the replays that train a user's model, and leave out those of evaluations. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low


@dataclass(frozen=True)
class TrainingReplays:
    """The replays that train the model, without those of evaluations between steps."""

    replays: int
    """Their number in all steps."""
    per_step: int
    """Their number in a complete step."""
    steady: bool
    """Whether each step replayed the same graphs. A capture between such steps belongs to an evaluation."""


def count_training_replays(replayed: Sequence[Mapping[int, int]], *, recaptured: bool) -> TrainingReplays:
    """Count the replays that train, from how often each step replayed each graph, by the graph's number.

    A graph trains as often as in the median step. A step that ran eagerly, or replayed other graphs instead, lacks replays.
    Further replays belong to evaluations if at most half of the steps have any, and these steps share a graph. Otherwise a part
    of the step was captured again and again. If nothing was ``recaptured``, steps may replay different graphs, as for batches of
    different sizes, but not fewer.
    """
    if not replayed:
        return TrainingReplays(0, 0, False)
    graphs = {graph for step in replayed for graph in step}
    usual = {graph: _usual([step.get(graph, 0) for step in replayed]) for graph in graphs}
    totals, again = [sum(step.values()) for step in replayed], False
    if not recaptured and (len({*totals}) == 1 or not any(usual.values())):
        per_step = median_high(totals)
        counts = [min(total, per_step) for total in totals]
    else:
        per_step = sum(usual.values())
        counts = [sum(min(step.get(graph, 0), number) for graph, number in usual.items()) for step in replayed]
        further = [found for step in replayed if (found := {graph for graph in step if step[graph] > usual[graph]})]
        again = 2 * len(further) > len(replayed) or (bool(further) and not set.intersection(*further))
    return TrainingReplays(sum(counts), per_step, 0 < per_step == min(counts) and not again)


def _usual(numbers: Sequence[int]) -> int:
    """Return the median; of an even number of steps the higher one, or 0 if half of the steps replay nothing."""
    return median_low(numbers) and median_high(numbers)
