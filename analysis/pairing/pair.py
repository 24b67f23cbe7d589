"""A graphed run and the eager run of its own repeat, which shared its allocation: may they be compared?

A pair decides three things by itself: why it cannot be compared, a number that only the eager run has finite, and equality
to the bit. All repeats together decide the rest (analysis.pairing.judge_pairs).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from analysis.graphs.replay_check import Replay, check_replay
from analysis.pairing.eager_baseline import EagerBaseline
from analysis.pairing.flaky_attempts import contradictions
from analysis.records.provenance import differences
from analysis.records.run import Attempt, Run, attempts_of
from analysis.records.steps import Steps
from analysis.speed.pair_speed import PairSpeed, pair_speed
from analysis.verdict import ladder
from analysis.verdict.completeness import eager_fault
from analysis.verdict.precapture_check import check_agreement, check_capture_step
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins
from launch.contract.spec import RunSpec

REQUIRED_DIGESTS = ("code", "data", "libraries")
"""What must be recorded and equal on both sides."""
_IDENTITY = ("versions.", "code.", "data_digest", "digests.")
_RESUME = "run `python -m orchestrator resume --unfinished` on the sweep"


@dataclass(frozen=True)
class Pair:
    """A graphed run and the eager run of the same repeat, where there is one.

    ``exact`` is what the pair decides by itself: INCOMPARABLE, UNFINISHED, DIVERGED at a number that is not finite, or
    BITWISE. None leaves it to all repeats together. ``differences`` are those of the two environments, as
    "settings.NCCL_ALGO: Ring (eager), Tree (graphed)".
    """

    repeat: int
    eager: Run | None
    graphed: Run
    exact: Verdict | None
    speed: PairSpeed = field(default_factory=PairSpeed)
    replay: Replay | None = None
    differences: tuple[str, ...] = ()
    flaky_attempts: tuple[str, ...] = ()
    """Earlier attempts of the graphed run that came to something else."""

    @property
    def comparable(self) -> bool:
        return self.exact is None or self.exact.verdict == "BITWISE"

    @property
    def attempts(self) -> tuple[Attempt, Attempt]:
        """The eager and the graphed attempt of a pair whose curves were read."""
        assert self.eager and self.eager.attempt and self.graphed.attempt
        return self.eager.attempt, self.graphed.attempt

    @property
    def first_compared(self) -> int:
        """The index of the first step after the capture."""
        return ladder.first_compared(self.attempts[1].steps.phase.tolist()) or 0


def collect_pair(graphed: Run, baseline: EagerBaseline, spec: RunSpec, margins: Margins) -> Pair:
    """Collect the evidence of a graphed run and the eager run of the same repeat."""
    eager = next((run for run in baseline.runs if run.repeat == graphed.repeat), None)
    replay = check_replay(graphed.attempt, spec) if graphed.attempt else None
    flaky = contradictions(graphed, margins_for(spec, margins))
    if eager is None or eager.damaged or graphed.damaged or replay is None or eager.attempt is None:
        return Pair(
            graphed.repeat, eager, graphed, _without_records(eager, graphed), replay=replay, flaky_attempts=flaky
        )
    assert graphed.attempt is not None  # it has a replay check
    eager = eager.in_allocation_of(graphed.attempt)
    assert eager.attempt is not None  # as before: beside() may choose another attempt, and never none
    before, after = eager.attempt, graphed.attempt
    exact = _judge_pair(before, after, replay, baseline, spec, margins)
    return Pair(
        graphed.repeat,
        eager,
        graphed,
        exact,
        _pair_speed(before, after, exact, spec),
        replay,
        differences(before.environment, after.environment),
        flaky,
    )


def margins_for(spec: RunSpec, margins: Margins) -> Margins:
    """Return ``margins``, or none where ``spec`` asks for determinism, and so for equality to the bit."""
    return Margins(loss=0.0, grad_norm=0.0) if spec.training.deterministic else margins


def _pair_speed(eager: Attempt, graphed: Attempt, exact: Verdict | None, spec: RunSpec) -> PairSpeed:
    if exact and exact.verdict == "INCOMPARABLE":
        return PairSpeed(reason="the pair is incomparable")
    if spec.digest_steps:
        return PairSpeed(reason="digests of layers were taken in the steps of both runs")
    return pair_speed(eager, graphed)


def _without_records(eager: Run | None, graphed: Run) -> Verdict:
    """The verdict on a pair that lacks a run, or a readable outcome of one."""
    if eager is None:
        reason = f"the sweep ran no eager run of this workload for repeat {graphed.repeat}"
        return Verdict("INCOMPARABLE", reason, "plan the sweep again: planning adds the eager baseline")
    sides = (("eager", eager), ("graphed", graphed))
    damaged = [name for name, run in sides if run.damaged]
    if damaged:
        fix = "move away the folder of each attempt with a damaged outcome; resume then retries the run"
        return Verdict("INCOMPARABLE", f"an outcome of the {' and the '.join(damaged)} run is damaged", fix)
    reason = " and ".join(
        f"the {side} run is {run.status}{' or still running' * run.begun}" for side, run in sides if run.attempt is None
    )
    return Verdict("UNFINISHED", reason, _RESUME)


def _judge_pair(
    eager: Attempt, graphed: Attempt, replay: Replay, baseline: EagerBaseline, spec: RunSpec, margins: Margins
) -> Verdict | None:
    """Judge two attempts by their records and their curves; None leaves the verdict to all repeats together."""
    if excluded := _exclude(eager, graphed):
        return excluded
    found = _compare_curves(eager.steps, graphed.steps, spec)
    stopped = [
        (name, attempt) for name, attempt in (("eager", eager), ("graphed", graphed)) if not _ended_well(attempt)
    ]
    diverged = found is not None and found.verdict == "DIVERGED"
    # A run that stopped at its first NaN cannot prove replay; its curve up to there is evidence enough.
    if stopped and not diverged:
        return _ended_early(*stopped[0])
    if found and found.verdict == "INCOMPARABLE":
        return found
    if not stopped and not replay.proven:
        fix = "find out in the log of the graphed run why steps ran eagerly, or were captured again"
        evidence = (found.evidence, found.deviation) if found else (None, None)
        return Verdict("INCOMPARABLE", f"replay {replay.summary}", fix, *evidence)
    if diverged:
        alike = [a.steps for a in (eager, *attempts_of(baseline.runs)) if a.digests == graphed.digests]
        fault = eager_fault(alike)
        return Verdict("INCOMPARABLE", fault.reason, fault.fix) if fault else found
    complete = baseline.repeats.get(graphed.digests, {}).values()
    others = [steps for steps in complete if steps is not eager.steps]
    capture_step, equal = spec.cuda_graph.capture_step, found is not None
    return check_agreement([eager.steps, *others], graphed.steps, capture_step, margins, equal) or found


def _ended_well(attempt: Attempt) -> bool:
    return attempt.outcome.results_intact


def _exclude(eager: Attempt, graphed: Attempt) -> Verdict | None:
    """Return why the records of a pair do not let it be compared, whatever its curves are."""
    sides = (("eager", eager), ("graphed", graphed))
    for side, attempt in sides:
        if not _ended_well(attempt) and attempt.outcome.outcome != "NUMERIC":
            return _ended_early(side, attempt)
    problems = [f"{side} run: {problem}" for side, attempt in sides for problem in attempt.problems]
    if problems:
        return Verdict("INCOMPARABLE", "; ".join(problems), "run the pair again: its records are damaged")
    if "capture" in eager.steps.phase or any(stats.impl != "none" for stats in eager.proofs.values()):
        return Verdict("INCOMPARABLE", "the eager run captured something", "check its settings: it is not an eager run")
    if any(probe.graph_launches for probe in eager.probes.values()):
        return Verdict(
            "INCOMPARABLE", "the eager run launched CUDA graphs", "check its settings: it is not an eager run"
        )
    return _compare_digests(eager, graphed)


def _ended_early(side: str, attempt: Attempt) -> Verdict:
    outcome = attempt.outcome
    return Verdict("INCOMPARABLE", f"the {side} run ended {outcome.outcome} in {outcome.phase}", outcome.remedy)


def _compare_digests(eager: Attempt, graphed: Attempt) -> Verdict | None:
    before, after = dict(eager.digests), dict(graphed.digests)
    missing = [name for name in REQUIRED_DIGESTS if name not in before or name not in after]
    if missing:
        return Verdict("INCOMPARABLE", f"no digest of {', '.join(missing)} was recorded", "run the pair again")
    differing = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if not differing:
        return None
    seen = [d for d in differences(eager.environment, graphed.environment) if d.startswith(_IDENTITY)]
    return Verdict(
        "INCOMPARABLE",
        f"the runs differ in {', '.join(differing)}: {'; '.join(seen)}",
        "run both again in one bundle, with the same code, libraries and data",
    )


def _compare_curves(eager: Steps, graphed: Steps, spec: RunSpec) -> Verdict | None:
    """Judge two curves of ``spec`` by the rungs that need no repeats."""
    first = ladder.first_compared(graphed.phase.tolist())
    if first is None:
        return Verdict("INCOMPARABLE", "the graphed run recorded no capture step", "look at its failure, or its log")
    exact = ladder.judge_exact({"eager run": eager}, {"graphed run": graphed}, np.arange(spec.training.steps), first)
    if exact and exact.verdict != "BITWISE":
        return exact
    return check_capture_step(graphed, spec.cuda_graph.capture_step) or exact
