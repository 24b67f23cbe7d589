"""The passes of a checked step by uncaptured code, compared with those of its replay, and the size of rounding in them.

If results differ, the uncaptured code runs once more unchanged, and once with the first layer's output perturbed. If that does not
explain a difference, it runs twice more with that layer's input perturbed too. Large weights may amplify rounding inside this layer,
which its perturbed output does not show.

Top-k routing is discontinuous: a score that is rounded differently sends a token to another expert. So if the choices of both
differ, the uncaptured code repeats the replay's choices, and records how far these are from its own. The passes that measure
rounding repeat choices too. Otherwise the token that a perturbation moves to another expert would count as rounding.

If the code cannot be perturbed, or hides choices, only what it does not repeat itself is known: three uncaptured passes may
differ among themselves, for example by atomic additions. Differences of that size are rounding. Others decide nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from launch.contract.records.step_check import (
    BROKEN_CAPACITY,
    NOISE_MULTIPLE,
    RoutingDifference,
    TensorDifference,
    noise_multiple,
)
from launch.engines.protocol import CheckableStep, ScoredChoice, ScoredChoices
from launch.train.inspection.check_memory import largest_on_ranks
from launch.train.inspection.fingerprint import NOT_FINITE, FingerprintMaker, Fingerprints, Sketches, differences
from launch.train.inspection.snapshot import Snapshot

LEAST_GROWTH = 3.0
"""If a perturbed input of the first layer changes results by more than this many times what its perturbed output changes, in the
median, the layer amplifies rounding. docs/step_check.md has the measurements."""
LEAST_GROWTH_ALONE = 10.0
"""The same of a single result. Gradients inside the first layer may depend on rounding there that later ones hardly see."""

ScoreNoise = tuple[float, float]
"""The noise of the scores of experts, and of the weights by which experts with a capacity keep tokens."""
NO_NOISE: ScoreNoise = (0.0, 0.0)
Routing = Mapping[str, torch.Tensor]
"""The experts of each token by router call, int64 (T, topk). ``~expert`` stands for one that dropped the token."""


@dataclass(frozen=True, eq=False)
class ReplayedStep:
    """The results of the replay, its routing, and the values that its optimizer wrote. ``maker`` makes fingerprints.

    ``held`` are those that it had to leave as they were, and ``changed`` the differences of those that it changed.
    """

    maker: FingerprintMaker
    results: Fingerprints
    routing: Routing
    updated: Fingerprints
    held: Fingerprints
    changed: Mapping[str, float]


class UncapturedPasses:
    """The uncaptured forward and backward passes, compared with those of the replay.

    Attributes:
        is_unequal: whether results differ in a bit, or tokens move, on any rank.
        differences: the differences of results that differ in a bit.
        noise: for each result, the difference that rounding explains, above 0.
    """

    def __init__(self, checked: CheckableStep, batch: torch.Tensor, replay: ReplayedStep, snapshot: Snapshot) -> None:
        self._checked, self._batch, self._replay, self._snapshot = checked, batch, replay, snapshot
        self._plain: Sketches = {}
        self._scored: ScoredChoices = {}
        self._score_noise = NO_NOISE
        self.noise: Mapping[str, float] = {}
        with self._computed():
            self._chosen: Routing = {name: experts.clone() for name, experts in checked.routing().items()}
            self._moved = _count_moved(replay.routing, self._chosen)
            unequal = self._unequal()
            self.is_unequal = bool(largest_on_ranks(bool(unequal or self._moved), batch.device))
            if self.is_unequal:
                self._plain = replay.maker.sketches(checked.results)
        self.differences = differences(self._plain, replay.results.sketches, unequal)

    def calibrate(self) -> bool:
        """Measure the noise, with the replay's routing if routing differs on any rank. Return whether that was possible."""
        repeated = self._chosen
        if largest_on_ranks(bool(self._moved), self._batch.device):
            repeated = self._replay.routing
            with self._computed(repeated):
                unequal, self._plain = self._unequal(), self._replay.maker.sketches(self._checked.results)
            self.differences = differences(self._plain, self._replay.results.sketches, unequal)
            self._scored = self._checked.scored_choices()
        again = self._change(repeated)
        self._score_noise = self._change_of_scores()
        with self._checked.perturbed(math.inf, embedding=False) as possible:
            # A pipeline stage without routers hides no choice, but another one may.
            possible = not largest_on_ranks(not possible, self._batch.device)
            perturbed = self._change(repeated) if possible else {}
        if not possible:
            return self._calibrate_by_repetition(again, repeated)
        self._score_noise = _larger(self._score_noise, self._change_of_scores())
        self.noise = _noise(self._plain, again, perturbed)
        rows: list[TensorDifference | RoutingDifference] = [*self.rows(), *self.routing_differences()]
        if largest_on_ranks(any(row.is_fault for row in rows), self._batch.device):
            self._look_into_first_layer(repeated)
        return True

    def _calibrate_by_repetition(self, again: Mapping[str, float], repeated: Routing) -> bool:
        """Take as the noise what two repetitions change. Return whether that explains all differences on every rank."""
        changes = _changes(self._plain, again, self._change(repeated))
        # If only backward passes add atomically, losses repeat exactly. The noise of the norm is not theirs.
        numbers = _numbers(self._plain)
        losses = [name for name in numbers if name.startswith("loss of ")]
        changes |= _sharing(changes, numbers) | _sharing(changes, losses)
        self._score_noise = _larger(self._score_noise, self._change_of_scores())
        unexplained = any(size > NOISE_MULTIPLE * changes[name] for name, size in self.differences.items())
        unexplained |= any(row.is_fault for row in self.routing_differences())
        explained = not largest_on_ranks(unexplained, self._batch.device)
        self.noise = _with_spacing(self._plain, changes)
        if not explained:
            # A hidden choice may change the scores of later routers, which is no fault of theirs.
            self.noise, self._score_noise = dict.fromkeys(self._plain, NOT_FINITE), (NOT_FINITE, NOT_FINITE)
        return explained

    def _look_into_first_layer(self, repeated: Routing) -> None:
        """Measure the noise with the first layer's input moved too, and no token. It replaces a smaller noise if it is far larger.

        It also replaces the noise of what the layer's perturbed output does not reach, as scores of its own router.
        """
        found, score_noise = [], NO_NOISE
        for toward in (math.inf, -math.inf):
            with self._checked.perturbed(toward, embedding=True):
                found.append(self._change(repeated))
            score_noise = _larger(score_noise, self._change_of_scores())
        inner = _noise(self._plain, *found)
        growth = [inner[name] / self.noise[name] for name, result in self._plain.items() if not result.is_number]
        amplifies = largest_on_ranks(statistics.median(growth) if growth else 0.0, self._batch.device) > LEAST_GROWTH
        if amplifies:
            self._score_noise = _larger(self._score_noise, score_noise)
        self.noise = {
            name: max(noise, inner[name]) if amplifies or inner[name] > LEAST_GROWTH_ALONE * noise else noise
            for name, noise in self.noise.items()
        }
        reached = {name: noise for name, noise in self.noise.items() if noise > self._plain[name].spacing}
        self.noise = {**inner, **reached}
        self._score_noise = self._score_noise[0] or score_noise[0], self._score_noise[1] or score_noise[1]

    def rows(self) -> list[TensorDifference]:
        noise = {name: self.noise[name] for name in self.differences}
        largest = max(noise.values(), default=0.0)
        return [
            TensorDifference(name, size, noise[name], noise_multiple(noise[name], largest))
            for name, size in self.differences.items()
        ]

    def routing_differences(self) -> tuple[RoutingDifference, ...]:
        return tuple(
            _routing_difference(name, count, self._scored[name], self._score_noise)
            for name, count in self._moved.items()
            if name in self._scored
        )

    def score_noise_of_moved(self) -> ScoreNoise:
        """Return the noise of routers that moved tokens on this rank."""
        return self._score_noise if self._moved else NO_NOISE

    def _change_of_scores(self) -> ScoreNoise:
        """Return the largest changes of routers' scores and weights in the last pass, of all ranks."""
        others = self._checked.scored_choices()
        changes: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for name, one in self._scored.items():
            for kind, (other, own) in enumerate(zip(others[name].ranked, one.ranked, strict=True)):
                changes[kind].append((other.values - own.values).abs().max().double())
        scores, weights = (
            largest_on_ranks(max([0.0, *torch.stack(found).tolist()]) if found else 0.0, self._batch.device)
            for found in changes
        )
        return scores, weights

    def _unequal(self) -> list[str]:
        """Return the results of the last pass that differ in a bit from those of the replay."""
        return self._replay.results.unequal(self._replay.maker.digests(self._checked.results))

    def _change(self, repeated: Routing) -> Mapping[str, float]:
        """Run the uncaptured code again, and return how its results differ from those of the plain pass."""
        with self._computed(repeated):
            found = self._replay.maker.sketches(self._checked.results)
        return differences(found, self._plain, list(self._plain))

    @contextmanager
    def _computed(self, repeated: Mapping[str, torch.Tensor] = {}) -> Iterator[None]:
        """Run the uncaptured code. Its results are valid inside the context."""
        with self._snapshot.restored():
            self._checked.recompute(self._batch, repeated)
            yield


def _noise(plain: Sketches, again: Mapping[str, float], perturbed: Mapping[str, float]) -> Mapping[str, float]:
    """Return the noise of each result: the larger difference of both passes, but at least the spacing of its numbers.

    Single numbers share their largest one.
    """
    changes = _changes(plain, again, perturbed)
    return _with_spacing(plain, changes | _sharing(changes, _numbers(plain)))


def _larger(one: ScoreNoise, other: ScoreNoise) -> ScoreNoise:
    return max(one[0], other[0]), max(one[1], other[1])


def _routing_difference(name: str, count: int, choice: ScoredChoice, noise: ScoreNoise) -> RoutingDifference:
    """Return the difference in scores of experts or in weights of tokens, whichever exceeds its noise more."""
    each = (
        RoutingDifference(name, count, min(float(ranked.gap), BROKEN_CAPACITY), size)
        for ranked, size in zip(choice.ranked, noise, strict=False)
    )
    return max(each, key=lambda row: row.in_noise)


def _with_spacing(plain: Sketches, changes: Mapping[str, float]) -> Mapping[str, float]:
    return {name: max(change, plain[name].spacing) for name, change in changes.items()}


def _changes(plain: Sketches, one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the larger difference of two passes from ``plain`` for each result."""
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in plain}


def _numbers(results: Sketches) -> list[str]:
    return [name for name, result in results.items() if result.is_number]


def _sharing(changes: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the largest change of ``names`` for each of them."""
    return dict.fromkeys(names, max((changes[name] for name in names), default=0.0))


def _count_moved(routing: Routing, others: Routing) -> dict[str, int]:
    """Count the tokens of each router call whose two sets of experts differ, without calls that move none."""
    both = sorted(routing.keys() & others.keys())
    if not both:
        return {}
    moved = [(routing[name].sort(-1).values != others[name].sort(-1).values).any(-1).sum() for name in both]
    return {name: count for name, count in zip(both, torch.stack(moved).tolist(), strict=True) if count}
