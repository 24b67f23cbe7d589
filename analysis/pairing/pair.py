"""Pair a graphed run with the eager run of the same repeat and allocation, and check that they are comparable.

A pair alone shows three things: that it is not comparable, that a number is finite only in the eager run, or that both runs are
equal bit for bit. All repeats together decide the rest (analysis.pairing.judge_pairs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.graphs.replay_check import Replay, check_replay
from analysis.pairing.eager_baseline import EagerBaseline
from analysis.pairing.first_replay import compare_first_replays
from analysis.pairing.flaky_attempts import contradictions
from analysis.pairing.parameter_ends import ParameterEnds, compare_ends
from analysis.pairing.parameter_updates import both_update, check_end, check_updates, doubt_updates
from analysis.pairing.precapture_check import (
    capture_step,
    check_between_captures,
    check_numbers,
    check_phases,
    first_capture,
)
from analysis.pairing.program_settings import (
    all_rounded,
    check_settings,
    check_shown_norm,
    check_sources,
    name_other_batches,
    rounded_metrics,
    widen_by_rounding,
)
from analysis.pairing.step_checks import describe_missing_checks, has_clean_checks
from analysis.records.provenance import differences
from analysis.records.run import Attempt, Run, attempts_of
from analysis.records.steps import Steps, shared_steps
from analysis.speed.pair_speed import PairSpeed, pair_speed
from analysis.verdict.completeness import Curves, check_agreement, eager_fault
from analysis.verdict.judge_curves import first_compared, judge_exact
from analysis.verdict.shown_losses import check_shown_losses
from analysis.verdict.verdict import Verdict
from launch.contract.outcomes import Outcome
from launch.contract.plan import Margins
from launch.contract.spec import RunSpec

REQUIRED_DIGESTS = ("code", "data", "libraries")
"""Digests that both runs must record."""
IDENTITY = ("versions.", "packages.", "code.", "data_digest", "digests.")
"""The beginnings of what identifies code, libraries and data in environment.json."""
_MACHINE = ("hardware.", "settings.")
_DAMAGED = "run the pair again, since its records are damaged"
RESUME = "run `python -m orchestrator resume` on the sweep"
SUSPECT_GRAPHS = "eager runs took all steps: suspect the graphs, not the arguments"
WHY_SKIPPED = "read in its log which steps it skipped or why it ended, as after a NaN, and compare its losses with those of the eager run"
RESUME_FAILED = "correct that failure, then run `python -m orchestrator resume` on the sweep with `--failed`"


@dataclass(frozen=True)
class Pair:
    """A graphed run and the eager run of the same repeat, if there is one.

    ``exact`` is the verdict that the pair alone decides: INCOMPARABLE, UNFINISHED, DIVERGED, or BITWISE. If it is None, all
    repeats decide together. ``differences`` lists how the two environments differ, such as "settings.NCCL_ALGO: Ring (eager),
    Tree (graphed)".
    """

    repeat: int
    eager: Run | None
    graphed: Run
    exact: Verdict | None
    speed: PairSpeed = field(default_factory=PairSpeed)
    replay: Replay | None = None
    differences: tuple[str, ...] = ()
    flaky_attempts: Mapping[int, str] = field(default_factory=dict)
    """Descriptions, by number, of attempts of the graphed run that contradict the one that counts."""
    doubt: Verdict | None = None
    """INCONCLUSIVE if small gradients, the ends of parameters, or what no loss depends on differ. It takes the place of a pass."""
    made_elsewhere: bool = False
    """Whether only the logs of both runs are known."""
    learns: bool = False
    """Whether records besides the losses show that both runs update parameters, and in the same way."""
    compiled_alone: bool = False
    """Whether torch.compile compiles code of a user's graphed run, and none of the eager one."""
    host_waits: tuple[float, float] | None = None
    """How often the host waits for the device in a traced step of rank 0, eager and graphed; None if a run did not record it."""
    unjudged_ends: str = ""
    """Parameters that end far from eager runs, if nothing shows how far rounding alone takes them; empty without any."""
    uncompared: str = ""
    """Parameters that an eager run does not have by the name of the graphed run; empty without any."""

    @property
    def comparable(self) -> bool:
        return self.exact is None or self.exact.verdict == "BITWISE"

    @property
    def attempts(self) -> tuple[Attempt, Attempt]:
        """The eager and the graphed attempt. Both must exist."""
        assert self.eager and self.eager.attempt and self.graphed.attempt
        return self.eager.attempt, self.graphed.attempt

    @property
    def first_compared(self) -> int:
        """The index of the first step after the capture; 0 without a capture."""
        return first_compared(self.attempts[1].steps.phase) or 0


def collect_pair(graphed: Run, baseline: EagerBaseline, spec: RunSpec, margins: Margins) -> Pair:
    """Collect the evidence of a graphed run and the eager run of the same repeat."""
    eager = next((run for run in baseline.runs if run.repeat == graphed.repeat), None)
    if spec.made_elsewhere and eager and eager.attempt and graphed.attempt:
        unproven, untimed = check_replay(graphed.attempt, spec), PairSpeed(reason="made elsewhere")
        damaged = _damaged(eager.attempt, graphed.attempt)
        return Pair(graphed.repeat, eager, graphed, damaged, untimed, unproven, made_elsewhere=True)
    replay = check_replay(graphed.attempt, spec) if graphed.attempt else None
    if eager is None or eager.damaged or graphed.damaged or replay is None or eager.attempt is None:
        flaky = contradictions(graphed, (), margins)
        return Pair(
            graphed.repeat, eager, graphed, _without_records(eager, graphed), replay=replay, flaky_attempts=flaky
        )
    # The replay check exists only for a graphed attempt.
    assert graphed.attempt is not None
    eager = eager.in_allocation_of(graphed.attempt)
    # in_allocation_of() may choose another attempt, but always returns one.
    assert eager.attempt is not None
    before, after = eager.attempt, graphed.attempt
    exact = _judge_pair(before, after, replay, baseline, spec, margins_for(spec, margins))
    exact = exact and name_other_batches(exact, [(before, after)])
    curves = {**baseline.repeats.get(after.digests, {}), eager.repeat: before.steps}
    ends = _compare_ends(before, after, baseline, spec) if exact is None or exact.passes else None
    return Pair(
        graphed.repeat,
        eager,
        graphed,
        exact,
        _pair_speed(before, after, exact),
        replay,
        differences(before.environment, after.environment),
        contradictions(graphed, tuple(curves.values()), margins_for(spec, margins)),
        _doubt(exact, before, after, ends, baseline, spec, margins_for(spec, margins)) if ends else None,
        learns=both_update(before, after, has_clean_checks(after, spec)),
        compiled_alone=_is_compiled(after) and not _is_compiled(before),
        host_waits=_host_waits(before, after),
        unjudged_ends=ends.unjudged if ends else "",
        uncompared=ends.uncompared if ends and exact is None else "",
    )


def only_graphs_end_early(graphed: Outcome, eager: Iterable[Run]) -> bool:
    """Return whether a user's graphed program took fewer steps than all ``eager`` runs that ended."""
    ended = [one.outcome for one in attempts_of(eager)]
    return graphed.failure_class == "ENDED_EARLY" and bool(ended) and all(one.results_intact for one in ended)


def _compare_ends(eager: Attempt, graphed: Attempt, baseline: EagerBaseline, spec: RunSpec) -> ParameterEnds:
    # With this overlap, parameters of other ranks arrive in the next forward pass.
    if spec.parallelism.overlap_param_gather:
        return ParameterEnds({})
    repeats = [eager, *_others(eager, graphed, baseline)]
    return compare_ends(graphed, repeats, baseline.perturbed.get(graphed.digests), baseline.missing)


def _others(eager: Attempt, graphed: Attempt, baseline: EagerBaseline) -> list[Attempt]:
    """Return the other eager attempts with the digests of ``graphed``."""
    return [one for one in attempts_of(baseline.runs) if one is not eager and one.digests == graphed.digests]


def _is_compiled(attempt: Attempt) -> bool:
    return any(stats.compiled for stats in attempt.proofs.values())


def _host_waits(eager: Attempt, graphed: Attempt) -> tuple[float, float] | None:
    before, after = (one.probes[0].waits if 0 in one.probes else None for one in (eager, graphed))
    return None if before is None or after is None else (before, after)


def _doubt(
    exact: Verdict | None,
    eager: Attempt,
    graphed: Attempt,
    ends: ParameterEnds,
    baseline: EagerBaseline,
    spec: RunSpec,
    margins: Margins,
) -> Verdict | None:
    others, captured = _others(eager, graphed, baseline), capture_step(graphed.steps, spec)
    gradients = compare_first_replays(eager, graphed, others, captured).doubt()
    if doubt := gradients or doubt_updates(eager, graphed, others) or ends.doubt():
        return doubt
    if exact is None and spec.engine == "command" and (shown := check_shown_norm(graphed, captured + 1)):
        return shown
    curves = _eager_curves(eager, graphed, baseline)
    wide = widen_by_rounding(margins, graphed, curves, {"graphed run": graphed.steps}, slice(captured))
    return check_between_captures(tuple(curves.values()), graphed.steps, spec, wide, equal=exact is not None)


def _eager_curves(eager: Attempt, graphed: Attempt, baseline: EagerBaseline) -> Curves:
    """Return the curve of ``eager``, and those of the complete other repeats with the digests of ``graphed``."""
    complete = baseline.repeats.get(graphed.digests, {}).values()
    others = (steps for steps in complete if steps is not eager.steps)
    return {f"eager run {place}": steps for place, steps in enumerate((eager.steps, *others))}


def margins_for(spec: RunSpec, margins: Margins) -> Margins:
    """Return ``margins``, or margins of 0 if ``spec`` asks for deterministic training and thus for bitwise equality."""
    return replace(margins, loss=0.0, grad_norm=0.0) if spec.training.deterministic else margins


def _pair_speed(eager: Attempt, graphed: Attempt, exact: Verdict | None) -> PairSpeed:
    if exact and exact.verdict == "INCOMPARABLE":
        return PairSpeed(reason="the pair is incomparable")
    if unlike := [text for text in differences(eager.environment, graphed.environment) if text.startswith(_MACHINE)]:
        return PairSpeed(reason=f"the runs had different machines or settings: {'; '.join(unlike)}")
    return pair_speed(eager, graphed)


def _without_records(eager: Run | None, graphed: Run) -> Verdict:
    """Return the verdict on a pair that lacks a run, or a readable outcome of one."""
    if eager is None:
        reason = f"the sweep ran no eager run of this workload for repeat {graphed.repeat}"
        return Verdict("INCOMPARABLE", reason, "plan the sweep again: planning adds the eager baseline")
    sides = (("eager", eager), ("graphed", graphed))
    damaged = [name for name, run in sides if run.damaged]
    if damaged:
        fix = "move away the folder of each attempt with a damaged outcome; resume then retries the run"
        return Verdict("INCOMPARABLE", f"an outcome of the {' and the '.join(damaged)} run is damaged", fix)
    reason = " and ".join(
        f"the {side} run has not {'ended' if run.begun else 'begun'}" for side, run in sides if run.attempt is None
    )
    return Verdict("UNFINISHED", reason, RESUME)


def _judge_pair(
    eager: Attempt, graphed: Attempt, replay: Replay, baseline: EagerBaseline, spec: RunSpec, margins: Margins
) -> Verdict | None:
    """Judge two attempts by their records and curves; return None if only all repeats together can decide."""
    if only_graphs_end_early(graphed.outcome, baseline.runs):
        early = _ended_early("graphed", graphed)
        return replace(early, reason=f"{early.reason}, but {SUSPECT_GRAPHS}", fix=WHY_SKIPPED)
    if excluded := _exclude(eager, graphed, spec, margins):
        return excluded
    exact = _compare_curves(eager.steps, graphed.steps, spec)
    sides = (("eager", eager), ("graphed", graphed))
    stopped = [(side, attempt) for side, attempt in sides if not attempt.outcome.results_intact]
    diverged = exact is not None and exact.verdict == "DIVERGED"
    # A run that stopped at its first NaN cannot prove replay, but its curve up to there is sufficient evidence.
    if stopped and not diverged:
        return _ended_early(*stopped[0])
    if exact and exact.verdict == "INCOMPARABLE":
        return exact
    if not stopped and not replay.proven:
        evidence = (exact.evidence, exact.deviation) if exact else (None, None)
        return Verdict("INCOMPARABLE", f"replay {replay.summary}", replay.fix, *evidence)
    if diverged:
        comparable = [a.steps for a in (eager, *attempts_of(baseline.runs)) if a.digests == graphed.digests]
        return eager_fault(comparable) or exact
    return _judge_complete_pair(exact, eager, graphed, baseline, spec, margins)


def _judge_complete_pair(
    exact: Verdict | None, eager: Attempt, graphed: Attempt, baseline: EagerBaseline, spec: RunSpec, margins: Margins
) -> Verdict | None:
    """Judge two complete attempts with proven replay. ``exact`` is BITWISE, or None if the curves do not decide."""
    others = _others(eager, graphed, baseline)
    if stuck := check_updates(eager, graphed, others):
        return stuck
    replayed = compare_first_replays(eager, graphed, others, capture_step(graphed.steps, spec))
    if changed := replayed.fault() or _check_shown_losses(eager.steps, graphed.steps, spec, margins):
        return changed
    curves, began = _eager_curves(eager, graphed, baseline), first_capture(graphed.steps, spec)
    wide = widen_by_rounding(margins, graphed, curves, {"graphed run": graphed.steps}, slice(began))
    if unlike := check_agreement([*curves.values()], [graphed.steps], began, wide, equal=exact is not None):
        return unlike
    # With this overlap, parameters of other ranks arrive in the next forward pass.
    ended = exact if spec.parallelism.overlap_param_gather else check_end(exact, eager, graphed, others)
    if spec.engine != "command" or not rounded_metrics(graphed):
        return ended
    # Rounding of other kernels may change parameters alone. All repeats together decide on numbers that may be rounded.
    known = exact if all_rounded(eager, graphed) else ended
    return None if known and known.verdict == "BITWISE" else known


def _check_shown_losses(eager: Steps, graphed: Steps, spec: RunSpec, margins: Margins) -> Verdict | None:
    """Return INCOMPARABLE if a user's program shows losses of other steps."""
    first = capture_step(graphed, spec) + 1
    return check_shown_losses(eager, graphed, first, margins) if spec.engine == "command" else None


def _exclude(eager: Attempt, graphed: Attempt, spec: RunSpec, margins: Margins) -> Verdict | None:
    """Return INCOMPARABLE if the records of a pair rule out a comparison, whatever its curves show."""
    sides = (("eager", eager), ("graphed", graphed))
    for side, attempt in sides:
        if not attempt.outcome.results_intact and attempt.outcome.outcome != "NUMERIC":
            return _ended_early(side, attempt)
    if damaged := _damaged(eager, graphed):
        return damaged
    signs = {
        "captured something": "capture" in eager.steps.phase or any(s.impl != "none" for s in eager.proofs.values()),
        "has step checks": any(eager.step_checks.values()),
        "launched CUDA graphs": any(probe.graph_launches for probe in eager.probes.values()),
    }
    if sign := next((sign for sign, is_there in signs.items() if is_there), ""):
        return Verdict("INCOMPARABLE", f"the eager run {sign}", "check its settings, since it is not an eager run")
    if graphed.outcome.results_intact and (missing := describe_missing_checks(graphed, spec)):
        return Verdict("INCOMPARABLE", f"graphed run: {missing}", _DAMAGED)
    if unequal := _unequal_tokens(eager.steps, graphed.steps):
        return Verdict("INCOMPARABLE", unequal, "run the pair again, since both runs must train on the same batches")
    if spec.engine == "command":
        return (
            _missing_digests(eager, graphed)
            or check_settings(eager, graphed, margins)
            or check_sources(eager, graphed)
            or check_numbers(eager, graphed, margins)
        )
    return _missing_digests(eager, graphed) or _compare_digests(eager, graphed)


def _damaged(eager: Attempt, graphed: Attempt) -> Verdict | None:
    sides = (("eager", eager), ("graphed", graphed))
    problems = [f"{side} run: {problem}" for side, attempt in sides for problem in attempt.problems]
    return Verdict("INCOMPARABLE", "; ".join(problems), _DAMAGED) if problems else None


def _unequal_tokens(eager: Steps, graphed: Steps) -> str:
    """Return why two runs trained different numbers of tokens, or an empty text."""
    steps, of_eager, of_graphed = shared_steps(eager.step, graphed.step)
    before, after = eager.tokens[of_eager], graphed.tokens[of_graphed]
    if not len(other := np.flatnonzero(before != after)):
        return ""
    at = other[0]
    return (
        f"the runs trained different numbers of tokens: {before[at]} eager and {after[at]} graphed in step {steps[at]}"
    )


def _ended_early(side: str, attempt: Attempt) -> Verdict:
    outcome = attempt.outcome
    return Verdict("INCOMPARABLE", f"the {side} run ended {outcome.outcome} in {outcome.phase}", outcome.remedy)


def _missing_digests(eager: Attempt, graphed: Attempt) -> Verdict | None:
    """Return INCOMPARABLE if a required digest is missing."""
    both = dict(eager.digests).keys() & dict(graphed.digests).keys()
    if missing := [name for name in REQUIRED_DIGESTS if name not in both]:
        return Verdict("INCOMPARABLE", f"no digest of {', '.join(missing)} was recorded", "run the pair again")
    return None


def _compare_digests(eager: Attempt, graphed: Attempt) -> Verdict | None:
    """Return INCOMPARABLE if any digest differs."""
    before, after = dict(eager.digests), dict(graphed.digests)
    differing = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if not differing:
        return None
    identities = [d for d in differences(eager.environment, graphed.environment) if d.startswith(IDENTITY)]
    return Verdict(
        "INCOMPARABLE",
        f"the runs differ in {', '.join(differing)}: {'; '.join(identities)}",
        "run both again in one bundle, with the same code, libraries and data",
    )


def _compare_curves(eager: Steps, graphed: Steps, spec: RunSpec) -> Verdict | None:
    """Judge two curves by the rungs that need no repeats; return None if they do not decide."""
    first = first_compared(graphed.phase)
    if first is None:
        return Verdict("INCOMPARABLE", "the graphed run recorded no capture step", "look at its failure, or its log")
    exact = judge_exact({"eager run": eager}, {"graphed run": graphed}, np.arange(spec.training.steps), first)
    if exact and exact.verdict != "BITWISE":
        return exact
    return check_phases(graphed, spec) or exact
