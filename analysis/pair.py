"""One graphed run against the eager run of its workload and repeat: may they be compared, and what comes of it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Optional

from analysis import loss, replay, speedup
from analysis.deviation import Spread, incomplete, spread_of
from analysis.environment import differences
from analysis.load import Attempt, Run, attempts_of
from analysis.steps import Steps
from launch.record import Cell, Margins
from launch.spec import RunSpec

REQUIRED_DIGESTS = ("code", "data", "libraries")
"""What must be the same, and recorded, on both sides."""
_IDENTITY = ("versions.", "code.", "data_digest", "digests.")
_RESUME = "run `python -m orchestrator resume --unfinished` on the sweep"


@dataclass(frozen=True)
class PairResult:
    """One graphed run against the eager run of the same repeat, where there is one."""

    repeat: int
    eager: Optional[Run]
    graphed: Run
    verdict: loss.Verdict
    speed: speedup.PairSpeed
    replay: Optional[replay.Replay]
    differences: tuple[str, ...]
    """Where the two environments differ, as "settings.NCCL_ALGO: Ring (eager), Tree (graphed)"."""


@dataclass(frozen=True)
class EagerSide:
    """The eager side of a workload. ``spreads`` are by the digests that its repeats share."""

    runs: tuple[Run, ...]
    spreads: Mapping[tuple[tuple[str, str], ...], Spread]


def eager_side(runs: tuple[Run, ...], cell: Cell) -> EagerSide:
    """The eager ``cell`` of a workload, with the spread of its complete repeats."""
    complete: dict[tuple[tuple[str, str], ...], list[Steps]] = {}
    for attempt in attempts_of(runs):
        whole = not incomplete(attempt.steps, cell.run_spec.training.steps, "eager")
        if attempt.outcome.results_intact and not attempt.problems and whole:
            complete.setdefault(attempt.digests, []).append(attempt.steps)
    spreads = ((digests, spread_of(repeats)) for digests, repeats in complete.items())
    return EagerSide(runs, {digests: spread for digests, spread in spreads if spread is not None})


def compare_pair(graphed: Run, side: EagerSide, spec: RunSpec, margins: Margins) -> PairResult:
    """What comes of ``graphed``, a run of ``spec``, against the eager run of its repeat."""
    eager = next((run for run in side.runs if run.repeat == graphed.repeat), None)
    proof = replay.prove(graphed.attempt, spec) if graphed.attempt else None
    result = PairResult(graphed.repeat, eager, graphed, _no_eager(graphed), speedup.PairSpeed(), proof, ())
    if eager is None:
        return result
    if eager.attempt is None or graphed.attempt is None or proof is None:
        return replace(result, verdict=_unfinished(eager, graphed))
    eager = eager.beside(graphed.attempt)
    assert eager.attempt is not None  # beside() gives a run that has one where this one does
    result = replace(result, eager=eager)
    verdict = _unfit(eager.attempt, graphed.attempt)
    if verdict is None:
        verdict = _judge(eager.attempt, graphed.attempt, proof, side, spec, margins)
    comparable = verdict.word != "INCOMPARABLE"
    none = speedup.PairSpeed(reason="the pair is incomparable")
    return replace(
        result,
        verdict=verdict,
        speed=speedup.pair_speed(eager.attempt, graphed.attempt) if comparable else none,
        differences=differences(eager.attempt.environment, graphed.attempt.environment),
    )


def _no_eager(graphed: Run) -> loss.Verdict:
    reason = f"the sweep ran no eager run of this workload for repeat {graphed.repeat}"
    return loss.Verdict("INCOMPARABLE", reason, "plan the sweep again: it adds the eager twin by itself")


def _unfinished(eager: Run, graphed: Run) -> loss.Verdict:
    sides = (("eager", eager), ("graphed", graphed))
    said = " and ".join(f"the {side} run is {run.status}" for side, run in sides if run.attempt is None)
    return loss.Verdict("UNFINISHED", said, _RESUME)


def _unfit(eager: Attempt, graphed: Attempt) -> Optional[loss.Verdict]:
    """Why the records of a pair do not let it be compared, whatever its curves say."""
    sides = (("eager", eager), ("graphed", graphed))
    for side, attempt in sides:
        if not attempt.outcome.results_intact and attempt.outcome.outcome != "NUMERIC":
            return _ended_early(side, attempt)
    problems = [f"{side} run: {problem}" for side, attempt in sides for problem in attempt.problems]
    if problems:
        return loss.Verdict("INCOMPARABLE", "; ".join(problems), "run the pair again: its records are damaged")
    if "capture" in eager.steps.phase or any(stats.impl != "none" for stats in eager.proofs.values()):
        return loss.Verdict("INCOMPARABLE", "the eager run captured something", "see its records: it is no eager run")
    if any(probe.graph_launches for probe in eager.probes.values()):
        return loss.Verdict("INCOMPARABLE", "the eager run launched CUDA graphs", "see its records: it is no eager run")
    return _other_digests(eager, graphed)


def _ended_early(side: str, attempt: Attempt) -> loss.Verdict:
    outcome = attempt.outcome
    return loss.Verdict("INCOMPARABLE", f"the {side} run ended {outcome.outcome} in {outcome.phase}", outcome.remedy)


def _other_digests(eager: Attempt, graphed: Attempt) -> Optional[loss.Verdict]:
    before, after = dict(eager.digests), dict(graphed.digests)
    missing = [name for name in REQUIRED_DIGESTS if name not in before or name not in after]
    if missing:
        return loss.Verdict("INCOMPARABLE", f"no digest of {', '.join(missing)} was recorded", "run the pair again")
    differing = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if not differing:
        return None
    seen = [d for d in differences(eager.environment, graphed.environment) if d.startswith(_IDENTITY)]
    return loss.Verdict(
        "INCOMPARABLE",
        f"the runs differ in {', '.join(differing)}: {'; '.join(seen)}",
        "run both again in one bundle, with the same code, libraries and data",
    )


def _judge(
    eager: Attempt, graphed: Attempt, proof: replay.Replay, side: EagerSide, spec: RunSpec, margins: Margins
) -> loss.Verdict:
    if spec.training.deterministic:
        margins = Margins(loss=0.0, grad_norm=0.0)  # who asks for determinism asks for equality to the bit
    verdict = loss.judge(eager.steps, graphed.steps, side.spreads.get(eager.digests), margins, spec.training.steps)
    for name, attempt in (("eager", eager), ("graphed", graphed)):
        # A run that stopped at its first NaN cannot give proof of replay; its curve up to there is evidence enough.
        if not attempt.outcome.results_intact:
            return verdict if verdict.word in ("DIVERGED", "INCONCLUSIVE") else _ended_early(name, attempt)
    if verdict.word == "INCOMPARABLE" or proof.proven:
        return verdict
    remedy = "find in the graphed run's log why steps fell back to eager, or why they were captured again"
    return replace(verdict, word="INCOMPARABLE", reason=f"replay {proof.summary}", remedy=remedy)
