"""Find the first layer that differs. Run a cell again with step checks that compare each layer's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analysis.pairing.step_checks import StepChecks, collect_step_checks
from analysis.records.load import load_planned
from analysis.records.run import Attempt
from analysis.sweep.cell_results import CellResult
from launch.common.text import numbered
from launch.contract.paths import SweepPaths
from launch.contract.plan import Cell, Plan
from launch.contract.records.step_check import LayerResult, TensorDifference, layer_names, with_article
from launch.contract.spec import RunSpec
from orchestrator.bisect.failure_status import DIVERGED, cause_unknown, classify_failure, judge_cell
from orchestrator.bisect.search import Answer, Search
from orchestrator.bisect.side_sweep import plan_side_sweep, raise_if_rejected
from orchestrator.plan.sound_fixes import keep_sound_fixes
from orchestrator.rules import refusals
from orchestrator.targets.slurm_cluster import Target

STEPS_PAST = 2
"""How many steps may be checked after the last step at which a repeat failed."""
MOST_CHECKS = 20
"""The most checked steps. A check takes as long as a few steps."""
MOST_NAMED = 4
"""The most ranks that a sentence names."""


@dataclass(frozen=True)
class LayerSearch(Search):
    """A search for the first layer that differs. ``trial`` is the cell's spec with checks of layers."""

    trial: RunSpec

    purpose = "layers"
    specs = "a run whose layers are checked"
    compares = False


@dataclass(frozen=True)
class FirstFault:
    """The first place at which a layer differs by more than noise, and the ``ranks`` on which it does."""

    step: int
    result: LayerResult
    ranks: tuple[int, ...]
    difference: TensorDifference

    def explain(self, names: Sequence[str]) -> str:
        """Return what is at fault, given that everything before it agrees. ``names`` are the model's layers."""
        if not self.result.is_gradient:
            layer = with_article(self.result.layer)
            return (
                f"Everything before it agrees up to rounding, so {layer} computes another result from the same input."
            )
        later = names[self.result.position + 1 :]
        culprit = f"the backward pass of {with_article(later[0])}" if later else "the output layer or the loss"
        return (
            f"All outputs and the gradients of later layers agree up to rounding, so {culprit} computes another result."
        )


def start_search(sweep: SweepPaths, plan: Plan, cell: Cell, target: Target) -> LayerSearch:
    """Return the search for the first layer of ``cell`` that differs.

    Raises:
        InputError: the cell captures nothing, is not known to have different results, or cannot run with checks of layers.
    """
    result = judge_cell(sweep, plan, cell)
    status = classify_failure(result)
    if status is None or (status.status, status.failure) != ("fails", DIVERGED):
        fix = "name a run that DIVERGED or ended NUMERIC, or bisect without --layers"
        raise cause_unknown(plan, cell, status, "change its results", fix)
    trial = _with_checks(result, cell.run_spec)
    raise_if_rejected(cell.cell_id, keep_sound_fixes(trial, refusals(trial) or target.check_spec(trial)))
    return LayerSearch(plan, cell, status.description, trial)


def _with_checks(result: CellResult, spec: RunSpec) -> RunSpec:
    """Return ``spec`` with checks of steps up to ``STEPS_PAST`` past the last failure of a repeat.

    If no single step fails, check up to the last step. At most ``MOST_CHECKS`` steps are checked.
    """
    failed = [pair.verdict for pair in result.pairs if pair.verdict.verdict == DIVERGED]
    last = max(v.deviation.step + STEPS_PAST if v.deviation else spec.training.steps for v in failed)
    # The capture's own step cannot be checked, so its failure is sought in the next step.
    steps = min(max(last, spec.first_compared) + 1, spec.training.steps)
    return replace(spec, layer_check_steps=steps, step_checks=min(steps - spec.first_compared, MOST_CHECKS))


def read_answer(sweep: SweepPaths, search: LayerSearch, target: Target) -> Answer:
    """Return what the records of the search's own ``sweep`` show."""
    (cell,) = plan_side_sweep(search, [search.trial], target).cells
    ((run,),) = load_planned(sweep, replace(search.plan, cells=(cell,))).runs.values()
    attempt = run.attempt
    if attempt is None or not attempt.outcome.is_informative:
        return Answer(search, (search.trial,), json_fields={"first": None, "checks": None})
    first, checks = _first_fault(attempt), collect_step_checks([(0, attempt)], search.trial)
    lacking = _lacking_check(attempt, first, search.trial) if first else ""
    return Answer(
        search,
        (),
        is_found=bool(checks and checks.fault) and not lacking,
        evidence=_evidence(attempt, checks) if checks else (),
        sentences=_sentences(first, checks, lacking, search.trial),
        json_fields={"first": first, "checks": checks},
    )


def _first_fault(attempt: Attempt) -> FirstFault | None:
    found = [(c.step, *c.first, rank) for rank, checks in attempt.step_checks.items() for c in checks if c.first]
    if not found:
        return None
    step, result, difference, _ = min(found, key=lambda one: (one[0], one[1].place, one[3]))
    ranks = tuple(sorted(rank for s, r, _, rank in found if (s, r) == (step, result)))
    return FirstFault(step, result, ranks, difference)


def _lacking_check(attempt: Attempt, first: FirstFault, spec: RunSpec) -> str:
    """Return which missing check may have found an earlier place than ``first``, or an empty text."""
    planned = {step for step in spec.checked_steps if step <= first.step}
    for rank in range(spec.parallelism.world_size):
        missing = planned - {check.step for check in attempt.step_checks.get(rank, ()) if not check.missing}
        if missing:
            return f"rank {rank} has no check of step {min(missing)}"
    return ""


def _evidence(attempt: Attempt, checks: StepChecks) -> list[str]:
    outcome = attempt.outcome
    ended = [] if outcome.results_intact else [f"The run {attempt.ending} in {outcome.phase}."]
    return [f"Checked: {checks.summary}.", *ended, *attempt.problems]


def _sentences(first: FirstFault | None, checks: StepChecks | None, lacking: str, spec: RunSpec) -> list[str]:
    if lacking:
        return [f"No layer can be named: {lacking}. Delete the run's folder, and the same command runs it again."]
    if first:
        size = first.difference
        return [
            f"First to differ: step {first.step}, the {first.result.name}, on {numbered('rank', first.ranks, MOST_NAMED)}.",
            f"It differs by {size.difference:.2g} of its norm, but rounding explains only {size.limit:.2g}.",
            first.explain(layer_names(spec.model.num_layers)),
        ]
    if checks is None:
        return ["No layer can be named: the run has no step after its capture."]
    if checks.fault:
        return [f"All layers agree up to rounding. Another result does not: {checks.fault}."]
    why = checks.undecided or "the replays of all checked steps agree with uncaptured code up to rounding"
    return [f"No layer can be named: {why}."]
