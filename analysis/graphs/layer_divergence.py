"""Find the first layer whose bits differ between runs, and whether the capture caused it, from layer digests alone.

Digests (launch/contract/records/layer_digests.py) show that bits differ, not by how much. A step computes in this order: outputs
from the first layer to the last, their gradients from the last layer to the first, gradients of parameters, updated parameters.
If everything before a place agrees, weights and inputs included, the computation at that place differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from analysis.records.events import DAMAGE, describe_error
from analysis.records.run import Run
from launch.common.atomic_files import RecordError
from launch.contract.paths import SweepPaths
from launch.contract.records.layer_digests import StepDigests, layer_names, read_digests
from launch.contract.spec import RunSpec

What = Literal["outputs", "gradients", "parameter_gradients", "parameters"]
ORDER: tuple[What, ...] = ("outputs", "gradients", "parameter_gradients", "parameters")
OfRanks = Sequence[Sequence[StepDigests]]
"""A run's digests: by rank, by step from 0 on."""


@dataclass(frozen=True)
class DigestDifference:
    """The first place at which two runs have other bits, in the order of a step.

    ``layers`` is one, but several of parameters, which no order is among. ``micro_batch`` is None of those: they are of a
    whole step. ``ranks`` are those on which it is so.
    """

    step: int
    what: What
    micro_batch: int | None
    layers: tuple[str, ...]
    ranks: tuple[int, ...]

    def place(self, names: Sequence[str]) -> tuple[int, int, int, int]:
        """Return its rank in the order of all steps. ``names`` are the model's layers."""
        number = names.index(self.layers[0])
        backward = self.what == "gradients"
        of_step = self.micro_batch is None
        return self.step, ORDER.index(self.what), self.micro_batch or 0, 0 if of_step else -number if backward else number  # fmt: skip


def first_difference(one: OfRanks, other: OfRanks, names: Sequence[str]) -> DigestDifference | None:
    """Return the first difference of two runs of one workload; None where they agree in all steps that both have."""
    for step in range(min(map(len, (*one, *other)))):
        before, after = ([digests[step] for digests in side] for side in (one, other))
        for found in _differences(before, after, names):
            return found
    return None


OfStep = Sequence[StepDigests]
"""One step's, by rank."""


def _differences(one: OfStep, other: OfStep, names: Sequence[str]) -> Iterator[DigestDifference]:
    """Yield the differences of one step, in its order."""
    yield from _in_passes(one, other, "outputs", names)
    yield from _in_passes(one, other, "gradients", names[::-1])
    yield from _of_parameters(one, other, "parameter_gradients", names)
    yield from _of_parameters(one, other, "parameters", names)


def _in_passes(one: OfStep, other: OfStep, what: What, order: Sequence[str]) -> Iterator[DigestDifference]:
    pairs = [(getattr(a, what), getattr(b, what)) for a, b in zip(one, other, strict=True)]
    micro_batches = {len(row) for before, _ in pairs for row in before.values()}
    for number, layer in product(range(max(micro_batches)), order):
        ranks = [r for r, (a, b) in enumerate(pairs) if layer in a and a[layer][number] != b[layer][number]]
        if ranks:
            yield DigestDifference(one[0].step, what, number, (layer,), tuple(ranks))


def _of_parameters(one: OfStep, other: OfStep, what: What, names: Sequence[str]) -> Iterator[DigestDifference]:
    pairs = [(getattr(a, what), getattr(b, what)) for a, b in zip(one, other, strict=True)]
    found = [(layer, r) for layer in names for r, (a, b) in enumerate(pairs) if a.get(layer) != b.get(layer)]
    if found:
        layers = tuple(dict.fromkeys(layer for layer, _ in found))
        yield DigestDifference(one[0].step, what, None, layers, tuple(sorted({rank for _, rank in found})))


# --- several runs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DivergenceLocation:
    """The first places where graphed runs differ from eager ones, and eager ones from each other.

    ``eager`` is None where all eager repeats agree in all of ``steps``; ``graphed`` holds the same of each graphed repeat
    against the eager run of the same repeat.
    """

    names: tuple[str, ...]
    capture_step: int
    steps: int
    repeats: int
    """Of the eager run."""
    eager: DigestDifference | None
    graphed: Mapping[int, DigestDifference | None]

    @property
    def first(self) -> DigestDifference | None:
        """The first place at which a graphed run differs from its eager baseline."""
        return _earliest(self.graphed.values(), self.names)

    @property
    def attributable(self) -> bool:
        """Whether ``first`` is attributable to graphs: the capture was done, and at least two eager runs agree there and
        everywhere before."""
        first = self.first
        return first is not None and first.step >= self.capture_step and self.repeats > 1 and not self.hidden

    @property
    def hidden(self) -> bool:
        """Whether eager runs differ from each other at this place or before it."""
        if self.eager is None:
            return False
        return self.first is None or self.eager.place(self.names) <= self.first.place(self.names)


def _earliest(found: Iterable[DigestDifference | None], names: Sequence[str]) -> DigestDifference | None:
    return min((one for one in found if one), key=lambda one: one.place(names), default=None)


def locate(eager: Mapping[int, OfRanks], graphed: Mapping[int, OfRanks], spec: RunSpec) -> DivergenceLocation:
    """Locate the first differences by repeat; every graphed run has its eager baseline. ``spec`` is that of the graphed runs.

    Raises:
        RecordError: a rank has other layers in one of the runs than in another.
    """
    _check_ranks(eager, graphed)
    names = layer_names(spec.model.num_layers)
    first, *others = eager.values()
    return DivergenceLocation(
        names,
        spec.cuda_graph.capture_step,
        min(len(digests) for run in (*eager.values(), *graphed.values()) for digests in run),
        len(eager),
        _earliest((first_difference(first, other, names) for other in others), names),
        {repeat: first_difference(eager[repeat], run, names) for repeat, run in graphed.items()},
    )


def _check_ranks(eager: Mapping[int, OfRanks], graphed: Mapping[int, OfRanks]) -> None:
    """Check that a rank has the same layers in all steps of all runs."""
    runs = {f"{side} repeat {n}": run for side, of in (("eager", eager), ("graphed", graphed)) for n, run in of.items()}
    (name, first), *_ = runs.items()
    for (other, run), what in product(runs.items(), ORDER):
        for rank, (before, after) in enumerate(zip(first, run, strict=True)):
            if len({frozenset(getattr(step, what)) for step in (*before[:1], *after)}) > 1:
                raise RecordError(
                    f"rank {rank} has {what} of other layers in a step of {other} than at first in {name}"
                )


# --- from records ---------------------------------------------------------------------------------------------------


def load_digests(sweep: SweepPaths, run: Run, spec: RunSpec) -> OfRanks:
    """Read the digests of the attempt of ``run`` that counts.

    Raises:
        RecordError: they are damaged, or some are missing: of a run whose results are intact, all steps are there.
    """
    assert run.attempt is not None
    attempt = sweep.run(run.run_id).attempt(run.attempt.number)
    found = []
    for rank in range(spec.parallelism.world_size):
        try:
            found.append(tuple(read_digests(attempt, rank)))
        except DAMAGE as error:
            raise RecordError(
                f"{run.run_id}: digests of rank {rank} cannot be read: {describe_error(error)}"
            ) from error
    _check(run.run_id, found, spec)
    if run.attempt.outcome.results_intact and {*map(len, found)} != {spec.digest_steps}:
        steps = " and ".join(map(str, sorted({*map(len, found)})))
        raise RecordError(f"{run.run_id}: digests are of {steps} steps, and {spec.digest_steps} were to be digested")
    return found


def _check(run_id: str, found: OfRanks, spec: RunSpec) -> None:
    for rank, digests in enumerate(found):
        if not digests or [one.step for one in digests] != list(range(len(digests))):
            raise RecordError(f"{run_id}: digests of rank {rank} are not of steps 0, 1, 2 and so on")
    for step in range(min(map(len, found))):
        _check_step(run_id, [digests[step] for digests in found], spec)


def _check_step(run_id: str, ranks: Sequence[StepDigests], spec: RunSpec) -> None:
    """Check that each layer has a digest for each micro-batch: missing ones would count as equal."""
    names = layer_names(spec.model.num_layers)
    for what in ORDER:
        rows = [row for digests in ranks for row in getattr(digests, what).items()]
        in_passes = what in ("outputs", "gradients")
        if {layer for layer, _ in rows} != set(names if in_passes else names[:-1]):
            raise RecordError(f"{run_id}: {what} of step {ranks[0].step} lack a layer")
        if in_passes and {len(row) for _, row in rows} != {spec.num_microbatches}:
            raise RecordError(f"{run_id}: {what} of step {ranks[0].step} lack a micro-batch")
