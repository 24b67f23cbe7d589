"""A graphed run against the eager run of its own repeat, which shared its allocation: may they be compared?

That settles what keeps a pair from being compared, a number that only the eager run has finite, and equality to the bit. The
rest is judged over all repeats together (analysis.pairing.repeats).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from analysis.graphs import replay_check as replay
from analysis.pairing.eager_baseline import EagerBaseline
from analysis.records.provenance import differences
from analysis.records.run import Attempt, Run, attempts_of
from analysis.records.steps import Steps
from analysis.speed import pair_speed
from analysis.verdict import ladder
from analysis.verdict.completeness import eager_fault
from analysis.verdict.precapture_check import check_agreement, check_capture_step
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins
from launch.contract.spec import RunSpec

REQUIRED_DIGESTS = ("code", "data", "libraries")
"""What must be the same, and recorded, on both sides."""
_IDENTITY = ("versions.", "code.", "data_digest", "digests.")
_RESUME = "run `python -m orchestrator resume --unfinished` on the sweep"

OPEN = Verdict("INCONCLUSIVE", "judged over all repeats together")
"""Of a pair that settles nothing by itself, until it is."""


@dataclass(frozen=True)
class PairResult:
    """One graphed run against the eager run of the same repeat, where there is one.

    ``verdict`` is the pair's own where the pair settles it, else that of all repeats, with the pair's evidence.
    """

    repeat: int
    eager: Run | None
    graphed: Run
    verdict: Verdict
    speed: pair_speed.PairSpeed
    replay: replay.Replay | None
    differences: tuple[str, ...]
    """Where the two environments differ, as "settings.NCCL_ALGO: Ring (eager), Tree (graphed)"."""

    @property
    def attempts(self) -> tuple[Attempt, Attempt]:
        """The eager and the graphed one of a pair whose curves were read."""
        assert self.eager and self.eager.attempt and self.graphed.attempt
        return self.eager.attempt, self.graphed.attempt

    @property
    def first_compared(self) -> int:
        """The place of its first step after the capture."""
        return ladder.first_compared(self.attempts[1].steps.phase.tolist()) or 0


def compare_pair(graphed: Run, side: EagerBaseline, spec: RunSpec, margins: Margins) -> PairResult:
    """``graphed``, a run of ``spec``, against the eager run of its repeat."""
    eager = next((run for run in side.runs if run.repeat == graphed.repeat), None)
    proof = replay.check_replay(graphed.attempt, spec) if graphed.attempt else None
    result = PairResult(graphed.repeat, eager, graphed, _no_eager(graphed), pair_speed.PairSpeed(), proof, ())
    if eager is None:
        return result
    if eager.damaged or graphed.damaged:
        return replace(result, verdict=_damaged(eager, graphed))
    if eager.attempt is None or graphed.attempt is None or proof is None:
        return replace(result, verdict=_unfinished(eager, graphed))
    eager = eager.beside(graphed.attempt)
    assert eager.attempt is not None  # beside() gives a run that has one where this one does
    verdict = _unfit(eager.attempt, graphed.attempt) or _settle(eager.attempt, graphed.attempt, proof, spec)
    verdict = _not_of_graphs(verdict, eager.attempt, graphed.attempt, side, spec, margins) or verdict
    return replace(
        result,
        eager=eager,
        verdict=verdict,
        speed=_speed(eager.attempt, graphed.attempt, verdict, spec),
        differences=differences(eager.attempt.environment, graphed.attempt.environment),
    )


def _speed(eager: Attempt, graphed: Attempt, verdict: Verdict, spec: RunSpec) -> pair_speed.PairSpeed:
    if verdict.word == "INCOMPARABLE":
        return pair_speed.PairSpeed(reason="the pair is incomparable")
    if spec.digest_steps:
        return pair_speed.PairSpeed(reason="digests of layers were taken in the steps of both runs")
    return pair_speed.pair_speed(eager, graphed)


def _no_eager(graphed: Run) -> Verdict:
    reason = f"the sweep ran no eager run of this workload for repeat {graphed.repeat}"
    return Verdict("INCOMPARABLE", reason, "plan the sweep again: it adds the eager twin by itself")


def _unfinished(eager: Run, graphed: Run) -> Verdict:
    sides = (("eager", eager), ("graphed", graphed))
    said = " and ".join(
        f"the {side} run is {run.status}{' or still running' * run.begun}" for side, run in sides if run.attempt is None
    )
    return Verdict("UNFINISHED", said, _RESUME)


def _damaged(eager: Run, graphed: Run) -> Verdict:
    sides = [name for name, run in (("eager", eager), ("graphed", graphed)) if run.damaged]
    remedy = "move the folder of each attempt whose outcome is damaged away; resume makes the run again"
    return Verdict("INCOMPARABLE", f"an outcome of the {' and the '.join(sides)} run is damaged", remedy)


def _unfit(eager: Attempt, graphed: Attempt) -> Verdict | None:
    """Why the records of a pair do not let it be compared, whatever its curves say."""
    sides = (("eager", eager), ("graphed", graphed))
    for side, attempt in sides:
        if not attempt.outcome.results_intact and attempt.outcome.outcome != "NUMERIC":
            return _ended_early(side, attempt)
    problems = [f"{side} run: {problem}" for side, attempt in sides for problem in attempt.problems]
    if problems:
        return Verdict("INCOMPARABLE", "; ".join(problems), "run the pair again: its records are damaged")
    if "capture" in eager.steps.phase or any(stats.impl != "none" for stats in eager.proofs.values()):
        return Verdict("INCOMPARABLE", "the eager run captured something", "see its records: it is no eager run")
    if any(probe.graph_launches for probe in eager.probes.values()):
        return Verdict("INCOMPARABLE", "the eager run launched CUDA graphs", "see its records: it is no eager run")
    return _other_digests(eager, graphed)


def _ended_early(side: str, attempt: Attempt) -> Verdict:
    outcome = attempt.outcome
    return Verdict("INCOMPARABLE", f"the {side} run ended {outcome.outcome} in {outcome.phase}", outcome.remedy)


def _other_digests(eager: Attempt, graphed: Attempt) -> Verdict | None:
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


def _not_of_graphs(
    verdict: Verdict, eager: Attempt, graphed: Attempt, side: EagerBaseline, spec: RunSpec, margins: Margins
) -> Verdict | None:
    """What the eager side, or the steps before the capture, say against ``verdict`` on a pair, if anything."""
    if verdict.word == "DIVERGED":
        alike = [a.steps for a in (eager, *attempts_of(side.runs)) if a.digests == graphed.digests]
        fault = eager_fault(alike)
        return Verdict("INCOMPARABLE", fault.reason, fault.remedy) if fault else None
    if verdict is not OPEN and verdict.word != "BITWISE":
        return None
    complete = [steps for steps in side.repeats.get(graphed.digests, {}).values() if steps is not eager.steps]
    equal = verdict.word == "BITWISE"
    return check_agreement([eager.steps, *complete], graphed.steps, spec.cuda_graph.capture_step, margins, equal)


def _settle(eager: Attempt, graphed: Attempt, proof: replay.Replay, spec: RunSpec) -> Verdict:
    verdict = _settle_curves(eager.steps, graphed.steps, spec)
    for name, attempt in (("eager", eager), ("graphed", graphed)):
        # A run that stopped at its first NaN cannot give proof of replay; its curve up to there is evidence enough.
        if not attempt.outcome.results_intact:
            return verdict if verdict.word == "DIVERGED" else _ended_early(name, attempt)
    if verdict.word == "INCOMPARABLE" or proof.proven:
        return verdict
    remedy = "find in the graphed run's log why steps fell back to eager, or why they were captured again"
    return replace(verdict, word="INCOMPARABLE", reason=f"replay {proof.summary}", remedy=remedy)


def _settle_curves(eager: Steps, graphed: Steps, spec: RunSpec) -> Verdict:
    """What two curves of ``spec`` settle by themselves."""
    first = ladder.first_compared(graphed.phase.tolist())
    if first is None:
        return Verdict("INCOMPARABLE", "the graphed run recorded no capture step", "see its failure, or its log")
    settled = ladder.judge_exact({"eager run": eager}, {"graphed run": graphed}, np.arange(spec.training.steps), first)
    if settled and settled.word != "BITWISE":
        return settled
    return check_capture_step(graphed, spec.cuda_graph.capture_step) or settled or OPEN
