"""The answer of `bisect --layers`: the first layer that differs, or why none can be named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from analysis.pairing.step_checks import StepChecks, collect_step_checks
from analysis.records.run import Attempt
from launch.contract.records.step_check import NOISE_MULTIPLE, LayerResult, TensorDifference, layer_names, with_article
from launch.contract.spec import AXES, RunSpec
from orchestrator.bisect.search import Answer, Search, join_names

MOST_NAMED = 4
"""How many ranks a sentence names."""


@dataclass(frozen=True)
class LayerSearch(Search):
    """A search for the first layer that differs. ``trial`` is the cell's spec with checks of layers."""

    trial: RunSpec

    purpose = "layers"
    specs = "a run whose layers are checked"
    compares = False


@dataclass(frozen=True)
class FirstFault:
    """The first place at which a layer differs beyond noise, and the ``ranks`` on which it does."""

    step: int
    result: LayerResult
    ranks: tuple[int, ...]
    difference: TensorDifference

    def explain(self, names: Sequence[str]) -> str:
        """Return what is at fault if everything before agrees. ``names`` are the model's layers."""
        if not self.result.is_gradient:
            layer = with_article(self.result.layer)
            return f"Everything before agrees up to rounding: {layer} computes another result from the same input."
        later = names[self.result.position + 1 :]
        culprit = f"the backward pass of {with_article(later[0])}" if later else "the output layer or the loss"
        return f"All outputs and the gradients of later layers agree up to rounding: {culprit} computes another result."


@dataclass(frozen=True)
class LayerAnswer(Answer):
    """``attempt`` is the run with checks; None while it is missing."""

    search: LayerSearch
    attempt: Attempt | None = None

    @cached_property
    def first(self) -> FirstFault | None:
        checks = self.attempt.step_checks if self.attempt else {}
        found = [(c.step, *c.first, rank) for rank, of_rank in checks.items() for c in of_rank if c.first]
        if not found:
            return None
        step, result, difference, _ = min(found, key=lambda one: (one[0], one[1].place, one[3]))
        ranks = tuple(sorted(rank for s, r, _, rank in found if (s, r) == (step, result)))
        return FirstFault(step, result, ranks, difference)

    @property
    def lacking(self) -> str:
        """Return which check is missing that may have found an earlier place than ``first``."""
        if not (self.attempt and self.first):
            return ""
        planned = [step for step in self.search.trial.checked_steps if step <= self.first.step]
        for rank in range(self.search.trial.parallelism.world_size):
            checks = self.attempt.step_checks.get(rank, ())
            missing = {*planned} - {check.step for check in checks if not check.missing}
            if missing:
                return f"rank {rank} has no check of step {min(missing)}"
        return ""

    @cached_property
    def checks(self) -> StepChecks | None:
        return collect_step_checks([(0, self.attempt)], self.search.trial) if self.attempt else None

    @property
    def is_found(self) -> bool:
        return bool(self.checks and self.checks.fault) and not self.lacking

    @property
    def evidence(self) -> Sequence[str]:
        if self.attempt is None or self.checks is None:
            return []
        outcome = self.attempt.outcome
        ended = [] if outcome.results_intact else [f"The run {self.attempt.ending} in {outcome.phase}."]
        return [f"Checked: {self.checks.summary}.", *ended, *self.attempt.problems]

    @property
    def sentences(self) -> Sequence[str]:
        if self.lacking:
            return [
                f"No layer can be named: {self.lacking}. Delete the run's folder, and the same command runs it again."
            ]
        if first := self.first:
            spec, size = self.search.trial, first.difference
            return [
                f"First to differ: step {first.step}, the {first.result.name}{_ranks(first.ranks, spec)}.",
                f"It differs by {size.difference:.2g} of its norm, where rounding explains {NOISE_MULTIPLE * size.noise:.2g}.",
                first.explain(layer_names(spec.model.num_layers)),
            ]
        if self.checks is None:
            return ["No layer can be named: the run has no step after its capture."]
        if self.checks.fault:
            return [f"All layers agree up to rounding. Another result does not: {self.checks.fault}."]
        why = self.checks.undecided or "the replays of all checked steps agree with uncaptured code up to rounding"
        return [f"No layer can be named: {why}."]

    @property
    def json_fields(self) -> Mapping[str, Any]:
        return {"first": self.first, "checks": self.checks}


def _ranks(ranks: Sequence[int], spec: RunSpec) -> str:
    layout, world = spec.parallelism, spec.parallelism.world_size
    if world == 1:
        return ""
    if len(ranks) == world:
        return f", on all {world} ranks"
    if len(ranks) > MOST_NAMED:
        return f", on {len(ranks)} ranks (the first is rank {ranks[0]})"
    axes = [axis for axis in AXES if axis != "expert_dp" and layout.size(axis) > 1]
    names = [f"rank {rank} ({', '.join(f'{axis} {layout.rank_in(axis, rank)}' for axis in axes)})" for rank in ranks]
    return f", on {join_names(names)}"
