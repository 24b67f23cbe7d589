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
    """Count the replays that train, from how often each step replayed each graph.

    A graph trains as often as in the median step. So a step that ran eagerly, or replayed other graphs instead, lacks replays.
    If the median step replays graphs besides, then these were captured again and again, as if the steps that do share no graph.
    If nothing was ``recaptured``, steps may replay different graphs, as for batches of different sizes, but not fewer.
    """
    if not replayed:
        return TrainingReplays(0, 0, False)
    graphs = {graph for step in replayed for graph in step}
    usual = {graph: _usual([step.get(graph, 0) for step in replayed]) for graph in graphs}
    totals = [sum(step.values()) for step in replayed]
    if not recaptured and (len({*totals}) == 1 or not any(usual.values())):
        per_step = median_high(totals)
        counts = [min(total, per_step) for total in totals]
        return TrainingReplays(sum(counts), per_step, per_step > 0 and {*counts} == {per_step})
    counts = [sum(min(step.get(graph, 0), number) for graph, number in usual.items()) for step in replayed]
    others = [{graph for graph in step if step[graph] > usual[graph]} for step in replayed]
    again = median_low([len(step) for step in others]) > 0 or not _share(list(filter(None, others)))
    per_step = sum(usual.values())
    return TrainingReplays(sum(counts), per_step, per_step > 0 and {*counts} == {per_step} and not again)


def _share(sets: Sequence[set[int]]) -> bool:
    """Return whether a number is in all ``sets``, or there are none."""
    return not sets or bool(set.intersection(*sets))


def _usual(numbers: Sequence[int]) -> int:
    """Return the median. An evaluation may replay its graphs in half of the steps, but not those that train."""
    return median_low(numbers) and median_high(numbers)
