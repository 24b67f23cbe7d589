"""Check one step of a graphed run: compute it by replay and by the same code uncaptured, from the same state.

One step has no chaos in it, so that the difference of both is rounding or a fault. If any rank finds a difference, the scale of
rounding is measured in the same place: the uncaptured code runs once more as it is, and once perturbed.

Top-k routing is discontinuous: a score that is rounded otherwise sends a token elsewhere. So the uncaptured code repeats the
replay's choices where they differ from its own, and records how far they are from its own.

A captured optimizer is checked by itself: it runs uncaptured on the gradients of the replay. Adam divides by the size of
gradients, which would make rounding of the smallest ones look large.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from launch.contract.records.step_check import (
    MOST_DIFFERENCES,
    LayerResult,
    RoutingDifference,
    StepCheck,
    TensorDifference,
)
from launch.engines.protocol import CheckableStep, ScoredChoices
from launch.train.inspection.check_memory import (
    largest_on_ranks,
    missing_bytes,
    missing_host_bytes,
    pinned_bytes,
    requested_bytes,
)

CHUNK_ELEMENTS = 2**24
"""Elements compared at once, which bounds the memory of a comparison."""
NOT_FINITE = 1e300
"""The difference of a result that is finite on one side alone, and the noise of results that are not calibrated."""

Copies = Mapping[str, torch.Tensor]
"""Results by name, on the host."""
Routing = Mapping[str, torch.Tensor]
"""The experts of each token by router call, int64 (T, topk)."""


@dataclass(frozen=True)
class _Difference:
    """Of two tensors: the relative 2-norm, and the largest of an element."""

    relative: float
    largest: float


def check_step(
    checked: CheckableStep, number: int, batch: torch.Tensor, needed: int = 0, ranks_on_host: int = 1
) -> StepCheck:
    """Check step ``number`` if its memory is there on all ranks, and restore the state before it. A collective call.

    Args:
        batch: int64 (microbatches, microbatch size, sequence + 1).
        needed: the bytes of GPU memory that an eager step uses beside the state.

    Raises:
        torch.OutOfMemoryError: memory that was there is missing in a pass of several ranks, which wait for this one.
    """
    lacked = missing_host_bytes(_copied_bytes(checked), ranks_on_host)
    if missing := largest_on_ranks(lacked, batch.device):
        return StepCheck(number, missing=int(missing), missing_on="host")
    if missing := largest_on_ranks(missing_bytes(needed, batch.device), batch.device):
        return StepCheck(number, missing=int(missing))
    try:
        return _check_step(checked, number, batch)
    except torch.OutOfMemoryError as error:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise torch.OutOfMemoryError(f"in the check of step {number}, where other ranks wait: {error}") from error
        return StepCheck(number, missing=requested_bytes(error))


def _copied_bytes(checked: CheckableStep) -> int:
    """Return what lies on the host at once: the state, and results of the replay and of an uncaptured pass."""
    results, updated = ((one for _, one in found) for found in (checked.results(), checked.updated()))
    return 2 * pinned_bytes(results) + pinned_bytes(updated) + pinned_bytes(checked.state())


def _check_step(checked: CheckableStep, number: int, batch: torch.Tensor) -> StepCheck:
    begun = time.perf_counter()
    replayed, routing, updated = _replay(checked, batch)
    found = _update(checked, replayed, updated)
    rows = _rows(found, {name: _spacing(updated[name]) for name in found})
    passes = _Passes(checked, batch, replayed, routing)
    calibrated = True
    if largest_on_ranks(passes.is_unequal, batch.device):
        calibrated = passes.calibrate()
        rows += _rows(passes.differences, passes.noise)
    first = _first_fault(rows, checked.layers())
    rows.sort(key=lambda row: row.difference / row.noise, reverse=True)
    return StepCheck(
        number,
        len(replayed) + len(updated),
        len(rows),
        tuple(rows[:MOST_DIFFERENCES]),
        passes.routing_differences(),
        calibrated,
        max((row.noise for row in rows), default=0.0),
        time.perf_counter() - begun,
        first,
    )


def _first_fault(
    rows: Iterable[TensorDifference], layers: Iterable[LayerResult]
) -> tuple[LayerResult, TensorDifference] | None:
    """Return the first result of a layer, in the order of the step, that is a fault."""
    results = {layer.name: layer for layer in layers}
    faults = [(results[row.name], row) for row in rows if row.is_fault and row.name in results]
    return min(faults, key=lambda fault: fault[0].place, default=None)


class _Passes:
    """The uncaptured forward and backward passes beside those of the replay.

    Attributes:
        differences: of results that differ in a bit.
        noise: what rounding explains of each result's difference, above 0.
    """

    def __init__(self, checked: CheckableStep, batch: torch.Tensor, replayed: Copies, routing: Routing) -> None:
        self._checked, self._batch, self._replayed, self._routing = checked, batch, replayed, routing
        self.differences = self._run(replayed)
        chosen = checked.routing()
        both = routing.keys() & chosen.keys()
        self._moved = {name: count for name in sorted(both) if (count := _count_moved(routing[name], chosen[name]))}
        self._scored: ScoredChoices = {}
        self._score_noise = 0.0
        self.noise: Mapping[str, float] = {}

    @property
    def is_unequal(self) -> bool:
        return bool(self.differences or self._moved)

    def calibrate(self) -> bool:
        """Measure the noise, with the replay's routing if it differs on any rank. Return whether that is possible."""
        repeated: Routing = {}
        if largest_on_ranks(bool(self._moved), self._batch.device):
            repeated = self._routing
            self.differences = self._run(self._replayed, repeated)
            self._scored = self._checked.scored_choices()
        plain = _copies(self._checked.results())
        again = self._run(plain, repeated)
        self._compare_scores()
        with self._checked.perturbed() as calibrated:
            perturbed = self._run(plain, repeated)
        self._compare_scores()
        self.noise = _noise(plain, again, perturbed) if calibrated else dict.fromkeys(plain, NOT_FINITE)
        return calibrated

    def routing_differences(self) -> tuple[RoutingDifference, ...]:
        return tuple(
            RoutingDifference(name, count, float(self._scored[name].gap), self._score_noise)
            for name, count in self._moved.items()
            if name in self._scored
        )

    def _compare_scores(self) -> None:
        others = self._checked.scored_choices()
        changes = (float((others[name].scores - one.scores).abs().max()) for name, one in self._scored.items())
        self._score_noise = max(self._score_noise, *changes, 0.0)

    def _run(self, reference: Copies, repeated: Mapping[str, torch.Tensor] = {}) -> dict[str, _Difference]:
        """Run the passes, and return how their results differ from ``reference``."""
        with _restored(self._checked):
            self._checked.recompute(self._batch, repeated)
            return _compare(self._checked.results(), reference)


def _replay(checked: CheckableStep, batch: torch.Tensor) -> tuple[Copies, Routing, Copies]:
    """Return the replay's results, its routing, and what its optimizer wrote."""
    with _restored(checked):
        checked.replay(batch)
        routing = {name: experts.clone() for name, experts in checked.routing().items()}
        return _copies(checked.results()), routing, _copies(checked.updated())


def _update(checked: CheckableStep, replayed: Copies, updated: Copies) -> dict[str, _Difference]:
    """Run the optimizer uncaptured on the replay's gradients. Return how the captured one's results differ."""
    if not updated:
        return {}
    with _restored(checked):
        checked.update(replayed)
        return _compare(checked.updated(), updated)


def _noise(
    plain: Copies, again: Mapping[str, _Difference], perturbed: Mapping[str, _Difference]
) -> Mapping[str, float]:
    """Return the noise of each result: the larger difference of both passes, and at least the spacing of its numbers."""
    relative = {
        name: max((found[name].relative for found in (again, perturbed) if name in found), default=0.0)
        for name in plain
    }
    single = {name for name, result in plain.items() if result.numel() == 1}
    shared = max((relative[name] for name in single), default=0.0)
    return {name: max(shared if name in single else one, _spacing(plain[name])) for name, one in relative.items()}


@contextmanager
def _restored(checked: CheckableStep) -> Iterator[None]:
    """Restore the state of the step and of the default random generators."""
    state = checked.state()
    before = [_to_host(tensor) for tensor in state]
    generators = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        torch.set_rng_state(generators[0])
        if generators[1] is not None:
            torch.cuda.set_rng_state(generators[1])


def _copies(results: Iterator[tuple[str, torch.Tensor]]) -> Copies:
    return {name: _to_host(result) for name, result in results}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())


def _compare(results: Iterator[tuple[str, torch.Tensor]], reference: Copies) -> dict[str, _Difference]:
    """Return how live results differ from ``reference``, for those that differ in a bit. Both sides have the same names."""
    found = {name: _difference(result.detach(), reference[name]) for name, result in results}
    return {name: difference for name, difference in found.items() if difference is not None}


def _difference(result: torch.Tensor, reference: torch.Tensor) -> _Difference | None:
    """Compare two tensors of one shape, chunk by chunk on the device of ``result``. Return None if they have equal bits."""
    squares = torch.zeros((2,), dtype=torch.float64, device=result.device)
    largest = torch.zeros((), dtype=torch.float64, device=result.device)
    equal = True
    for a, other in zip(
        result.reshape(-1).split(CHUNK_ELEMENTS), reference.reshape(-1).split(CHUNK_ELEMENTS), strict=True
    ):
        b = other.to(result.device)
        # NaN equals itself in bits.
        equal = equal and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        change = (a.double() - b.double()).abs()
        squares += torch.stack((change.square().sum(), b.double().square().sum()))
        largest = torch.maximum(largest, change.max())
    if equal:
        return None
    size, scale = squares.sqrt().tolist()
    if not (size < NOT_FINITE and scale < NOT_FINITE):
        return _Difference(NOT_FINITE, NOT_FINITE)
    # Zeros of either sign differ in their bits alone.
    relative = size / scale if scale else (NOT_FINITE if size else 0.0)
    return _Difference(relative, float(largest))


def _rows(differences: Mapping[str, _Difference], noise: Mapping[str, float]) -> list[TensorDifference]:
    return [TensorDifference(name, one.relative, one.largest, noise[name]) for name, one in differences.items()]


def _spacing(result: torch.Tensor) -> float:
    """Return the relative spacing of the numbers of ``result``."""
    return torch.finfo(result.dtype).eps


def _count_moved(experts: torch.Tensor, others: torch.Tensor) -> int:
    """Count the tokens of which two choices differ, each int64 (T, topk), in any order."""
    return int((experts.sort(-1).values != others.sort(-1).values).any(-1).sum())
