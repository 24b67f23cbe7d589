"""Graphed runs against the eager runs of their workload: may they be compared, and what comes of it?

Each graphed run is first held against the eager run of its own repeat, which shared its allocation: that settles what
keeps a pair from being compared, a number that only the eager run has finite, and equality to the bit. The rest is judged
over all repeats together. What passes is held against the attempts before it (analysis.retried).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np

from analysis import loss, pair_speed, replay
from analysis.before_capture import misplaced, parted
from analysis.completeness import eager_fault, incomplete
from analysis.deviation import Floor, floor_of, measure
from analysis.environment import differences
from analysis.load import Attempt, Run, attempts_of
from analysis.retried import contradictions
from analysis.steps import Steps
from analysis.verdict import Verdict, worst
from launch.record import Cell, Margins
from launch.spec import RunSpec

REQUIRED_DIGESTS = ("code", "data", "libraries")
"""What must be the same, and recorded, on both sides."""
_IDENTITY = ("versions.", "code.", "data_digest", "digests.")
_HOW_OFTEN = "run the cell in a sweep of its own with more repeats, to see how often it comes, and mend that first"
_RESUME = "run `python -m orchestrator resume --unfinished` on the sweep"

_OPEN = Verdict("INCONCLUSIVE", "judged over all repeats together")
"""Of a pair that settles nothing by itself, until it is."""

Digests = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PairResult:
    """One graphed run against the eager run of the same repeat, where there is one.

    ``verdict`` is the pair's own where the pair settles it, else that of all repeats, with the pair's evidence.
    """

    repeat: int
    eager: Optional[Run]
    graphed: Run
    verdict: Verdict
    speed: pair_speed.PairSpeed
    replay: Optional[replay.Replay]
    differences: tuple[str, ...]
    """Where the two environments differ, as "settings.NCCL_ALGO: Ring (eager), Tree (graphed)"."""


@dataclass(frozen=True)
class EagerSide:
    """The eager side of a workload. ``repeats`` holds the steps of its complete runs by repeat, by their digests."""

    runs: tuple[Run, ...]
    repeats: Mapping[Digests, Mapping[int, Steps]]

    @property
    def floor(self) -> Optional[Floor]:
        """Over the whole run; None where no two repeats are complete and alike."""
        found = (floor_of(tuple(repeats.values()), slice(None)) for repeats in self.repeats.values())
        return next((floor for floor in found if floor), None)


def eager_side(runs: tuple[Run, ...], cell: Cell) -> EagerSide:
    """The eager ``cell`` of a workload."""
    expected = np.arange(cell.run_spec.training.steps)
    complete: dict[Digests, dict[int, Steps]] = {}
    for run in runs:
        for attempt in attempts_of([run]):
            whole = not incomplete(attempt.steps, expected, "eager run")
            if attempt.outcome.results_intact and not attempt.problems and whole:
                complete.setdefault(attempt.digests, {})[run.repeat] = attempt.steps
    return EagerSide(runs, complete)


def compare_pairs(
    runs: Sequence[Run], side: EagerSide, spec: RunSpec, margins: Margins
) -> tuple[tuple[PairResult, ...], Optional[Verdict]]:
    """What comes of the graphed ``runs`` of ``spec``, pair by pair and over all; None where there are no runs.

    Runs are judged together with those that share their digests. The worst verdict counts.
    """
    faced = [_face(run, side, spec, margins) for run in runs]
    margins = margins_of(spec, margins)
    together: dict[Digests, Verdict] = {}
    pairs = []
    for pair in faced:
        if pair.verdict is not _OPEN:
            pairs.append(pair)
            continue
        group = [other for other in faced if _goes_with(other, pair)]
        eager = _eager(group, side.repeats.get(_digests(pair), {}))
        if _digests(pair) not in together:
            together[_digests(pair)] = _judge_together(eager, group, margins)
        pairs.append(_with(pair, together[_digests(pair)], eager))
    pairs = [_held_against_before(pair, margins) for pair in pairs]
    came_and_went = [_of_repeat(pair) for pair in pairs if pair.verdict.remedy == _HOW_OFTEN]
    settled = (_of_repeat(pair) for pair in faced if pair.verdict is not _OPEN)
    verdicts = [*came_and_went, *settled, *together.values()]
    return tuple(pairs), worst(verdicts) if verdicts else None


def margins_of(spec: RunSpec, margins: Margins) -> Margins:
    """Who asks for determinism asks for equality to the bit."""
    return Margins(loss=0.0, grad_norm=0.0) if spec.training.deterministic else margins


def _held_against_before(pair: PairResult, margins: Margins) -> PairResult:
    """``pair``, which does not pass where an attempt before it of the graphed run came to something else."""
    found = contradictions(pair.graphed, margins) if pair.verdict.passes else ()
    if not found:
        return pair
    reason = f"{'; '.join(found)}: it comes and goes"
    return replace(pair, verdict=replace(pair.verdict, word="INCONCLUSIVE", reason=reason, remedy=_HOW_OFTEN))


def _of_repeat(pair: PairResult) -> Verdict:
    """A pair's own verdict, whose reason says which repeat it is of."""
    verdict = pair.verdict
    return replace(verdict, reason=f"repeat {pair.repeat}: {verdict.reason}") if verdict.reason else verdict


def _attempts(pair: PairResult) -> tuple[Attempt, Attempt]:
    assert pair.eager and pair.eager.attempt and pair.graphed.attempt  # as every pair has whose curves were read
    return pair.eager.attempt, pair.graphed.attempt


def _digests(pair: PairResult) -> Digests:
    return _attempts(pair)[1].digests


def _goes_with(other: PairResult, pair: PairResult) -> bool:
    """Whether ``other`` is sound too, and of the same code, libraries and data as ``pair``."""
    return (other.verdict is _OPEN or other.verdict.word == "BITWISE") and _digests(other) == _digests(pair)


def _eager(pairs: Sequence[PairResult], complete: Mapping[int, Steps]) -> dict[str, Steps]:
    """The eager run of each pair, and the ``complete`` eager runs of other repeats."""
    found = {**complete, **{pair.repeat: _attempts(pair)[0].steps for pair in pairs}}
    return {f"eager repeat {repeat}": steps for repeat, steps in sorted(found.items())}


def _judge_together(eager: Mapping[str, Steps], pairs: Sequence[PairResult], margins: Margins) -> Verdict:
    graphed = {f"graphed repeat {pair.repeat}": _attempts(pair)[1].steps for pair in pairs}
    expected = np.arange(max(len(steps) for steps in graphed.values()))
    return loss.judge(eager, graphed, expected, max(map(_first, graphed.values())), margins)


def _first(graphed: Steps) -> int:
    return loss.first_compared(graphed.phase.tolist()) or 0


def _with(pair: PairResult, verdict: Verdict, eager: Mapping[str, Steps]) -> PairResult:
    """``pair`` by the ``verdict`` on all repeats, with what was measured of its graphed run against all eager ones."""
    graphed = _attempts(pair)[1].steps
    own = measure(tuple(eager.values()), [graphed], slice(_first(graphed), None)).evidence
    return replace(pair, verdict=replace(verdict, evidence=own))


def _face(graphed: Run, side: EagerSide, spec: RunSpec, margins: Margins) -> PairResult:
    """``graphed``, a run of ``spec``, against the eager run of its repeat."""
    eager = next((run for run in side.runs if run.repeat == graphed.repeat), None)
    proof = replay.prove(graphed.attempt, spec) if graphed.attempt else None
    result = PairResult(graphed.repeat, eager, graphed, _no_eager(graphed), pair_speed.PairSpeed(), proof, ())
    if eager is None:
        return result
    if eager.attempt is None or graphed.attempt is None or proof is None:
        return replace(result, verdict=_unfinished(eager, graphed))
    eager = eager.beside(graphed.attempt)
    assert eager.attempt is not None  # beside() gives a run that has one where this one does
    verdict = _unfit(eager.attempt, graphed.attempt) or _settle(eager.attempt, graphed.attempt, proof, spec)
    verdict = _not_of_graphs(verdict, eager.attempt, graphed.attempt, side, spec, margins) or verdict
    comparable = verdict.word != "INCOMPARABLE"
    none = pair_speed.PairSpeed(reason="the pair is incomparable")
    return replace(
        result,
        eager=eager,
        verdict=verdict,
        speed=pair_speed.pair_speed(eager.attempt, graphed.attempt) if comparable else none,
        differences=differences(eager.attempt.environment, graphed.attempt.environment),
    )


def _no_eager(graphed: Run) -> Verdict:
    reason = f"the sweep ran no eager run of this workload for repeat {graphed.repeat}"
    return Verdict("INCOMPARABLE", reason, "plan the sweep again: it adds the eager twin by itself")


def _unfinished(eager: Run, graphed: Run) -> Verdict:
    sides = (("eager", eager), ("graphed", graphed))
    said = " and ".join(f"the {side} run is {run.status}" for side, run in sides if run.attempt is None)
    return Verdict("UNFINISHED", said, _RESUME)


def _unfit(eager: Attempt, graphed: Attempt) -> Optional[Verdict]:
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


def _other_digests(eager: Attempt, graphed: Attempt) -> Optional[Verdict]:
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
    verdict: Verdict, eager: Attempt, graphed: Attempt, side: EagerSide, spec: RunSpec, margins: Margins
) -> Optional[Verdict]:
    """What the eager side, or the steps before the capture, say against ``verdict`` on a pair, if anything."""
    if verdict.word == "DIVERGED":
        alike = [a.steps for a in (eager, *attempts_of(side.runs)) if a.digests == graphed.digests]
        fault = eager_fault(alike)
        return Verdict("INCOMPARABLE", fault.reason, fault.remedy) if fault else None
    if verdict is not _OPEN and verdict.word != "BITWISE":
        return None
    complete = [steps for steps in side.repeats.get(graphed.digests, {}).values() if steps is not eager.steps]
    equal = verdict.word == "BITWISE"
    return parted([eager.steps, *complete], graphed.steps, spec.cuda_graph.warmup_steps, margins, equal)


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
    first = loss.first_compared(graphed.phase.tolist())
    if first is None:
        return Verdict("INCOMPARABLE", "the graphed run recorded no capture step", "see its failure, or its log")
    settled = loss.settle({"eager run": eager}, {"graphed run": graphed}, np.arange(spec.training.steps), first)
    if settled and settled.word != "BITWISE":
        return settled
    return misplaced(graphed, spec.cuda_graph.warmup_steps) or settled or _OPEN
