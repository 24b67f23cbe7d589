"""Collect the step checks of a cell's graphed runs, and combine them with the verdict on their curves.

Chaos does not build up within one step, so a difference beyond rounding is a fault, however close the curves are. If eager
noise hides what the curves show, checks without a fault decide instead. Such checks do not excuse curves that diverge: a check
starts from the state that the graphed run has reached, and does not see a change that builds up over several steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from analysis.records.run import Attempt, PartialAttempt
from analysis.verdict.verdict import CHECK_STEPS, STEP_CHECKED, Verdict
from launch.common.text import numbered
from launch.contract.records.step_check import RoutingDifference, StepCheck, TensorDifference, hides_everything
from launch.contract.spec import RunSpec


@dataclass(frozen=True)
class StepChecks:
    """The checks of all steps, ranks and runs together."""

    steps: tuple[int, ...]
    runs: int
    tensors: int
    """The smallest number of results compared in one step on one rank."""
    unequal: int
    """The largest number of results that differ in a bit, in one step on one rank."""
    most: float | None
    """The largest difference, in units of its noise; None if the noise of one check is unknown."""
    moved_tokens: int
    seconds: float
    """The longest check."""
    fault: str = ""
    """A description of the worst difference beyond noise; empty if there is none."""
    left_out: int = 0
    """The largest number of weights and moments of a captured optimizer that one check left to the others."""
    undecided: str = ""
    """Why the checks decide nothing; empty if all of them took place and were calibrated."""

    @property
    def summary(self) -> str:
        moved = f", {self.moved_tokens} tokens between two experts" if self.moved_tokens else ""
        shares = ", the captured optimizer in shares, one in each step" if self.left_out else ""
        return (
            f"{len(self.steps)} steps of {self.runs} graphed runs, each by replay and uncaptured from one state: "
            f"{self.tensors} results on each rank, of which at most {self.unequal} differ, by {self.most:.2g} times the noise "
            f"at most{moved}{shares}"
        )


@dataclass(frozen=True)
class _Found:
    rank: int
    check: StepCheck
    repeat: int | None = None


def collect_step_checks(attempts: Sequence[tuple[int, Attempt]], spec: RunSpec) -> StepChecks | None:
    """Return the findings of the graphed ``attempts``, given with their repeat; None without planned checks or attempts."""
    if not spec.checked_steps or not attempts:
        return None
    found = [one for one in _checks(attempts) if not one.check.missing]
    rows = [row for one in found for row in one.check.differences]
    return StepChecks(
        steps=spec.checked_steps,
        runs=len(attempts),
        tensors=min((one.check.tensors for one in found), default=0),
        unequal=max((one.check.unequal for one in found), default=0),
        most=None if any(one.check.lacks_noise for one in found) else max((row.in_noise for row in rows), default=0.0),
        moved_tokens=sum(row.tokens for one in found for row in one.check.routing),
        seconds=max((one.check.seconds for one in found), default=0.0),
        fault=_describe_fault(found),
        left_out=max((one.check.left_out for one in found), default=0),
        undecided=_undecided(found, attempts, spec),
    )


def has_clean_checks(attempt: Attempt, spec: RunSpec) -> bool:
    """Return whether every planned step of the graphed ``attempt`` was checked, and no check found a fault."""
    checks = collect_step_checks([(0, attempt)], spec)
    return checks is not None and not checks.fault and not checks.undecided


def describe_missing_checks(attempt: Attempt, spec: RunSpec) -> str:
    """Name the ranks of ``attempt`` that lack a planned check; return "" if none does.

    A completed run records a check even if it lacked memory for it.
    """
    steps = {rank: tuple(sorted(one.step for one in checks)) for rank, checks in attempt.step_checks.items()}
    ranks = [rank for rank in range(spec.parallelism.world_size) if steps.get(rank, ()) != spec.checked_steps]
    return f"events of {numbered('rank', ranks)} have no check of every planned step" if ranks else ""


def fault_of(attempt: Attempt | PartialAttempt) -> str:
    """Describe the worst fault that the step checks of ``attempt`` found; return "" without one."""
    fault = _describe_fault([_Found(rank, check) for rank, checks in attempt.step_checks.items() for check in checks])
    return f"in a step check, {fault}" if fault else ""


def judge_with_checks(verdict: Verdict, checks: StepChecks | None) -> Verdict:
    """Return the verdict on curves and step checks together."""
    if checks is None or verdict.verdict in ("INCOMPARABLE", "UNFINISHED"):
        return verdict
    if checks.fault:
        return Verdict("DIVERGED", f"step check: {checks.fault}", _LOOK_AT, verdict.evidence, verdict.deviation)
    if checks.undecided:
        return verdict
    if verdict.verdict == "INCONCLUSIVE" and verdict.noisy:
        return replace(
            verdict, verdict=STEP_CHECKED, reason=f"{checks.summary}; {verdict.reason}", fix="", alternatives=()
        )
    if verdict.verdict == "DIVERGED" and verdict.deviation and math.isfinite(verdict.deviation.size):
        reason = f"the checked steps agree ({checks.summary}), but the curves do not: {verdict.reason}"
        return replace(verdict, verdict="INCONCLUSIVE", reason=reason, fix=_SUSPECT, alternatives=())
    # The steps are checked already, and noise is not the only cause.
    return verdict.without([CHECK_STEPS])


_LOOK_AT = "inspect the named tensor: the graph computes it from different values than uncaptured code does (docs/step_check.md)"
_SUSPECT = "suspect the data, the schedule, or a buffer that changes slowly, since a check sees one step at a time"


def _checks(attempts: Sequence[tuple[int, Attempt]]) -> Iterator[_Found]:
    for repeat, attempt in attempts:
        for rank, checks in attempt.step_checks.items():
            yield from (_Found(rank, check, repeat) for check in checks)


def _describe_fault(found: Sequence[_Found]) -> str:
    faults = [(one, row) for one in found for row in one.check.rows if row.is_fault]
    return _describe(*max(faults, key=lambda each: each[1].in_limits)) if faults else ""


def _describe(found: _Found, row: TensorDifference | RoutingDifference) -> str:
    where = f"step {found.check.step}, rank {found.rank}" + ("" if found.repeat is None else f", repeat {found.repeat}")
    if isinstance(row, RoutingDifference):
        if row.breaks_capacity:
            return (
                f"{row.name} sends or keeps {row.tokens} tokens differently than uncaptured code ({where}): an expert keeps more "
                "tokens than its capacity, or drops one although places are free"
            )
        return (
            f"{row.name} sends {row.tokens} tokens to different experts than uncaptured code ({where}); their scores differ by "
            f"{row.gap:.2g}, but rounding explains only {row.limit:.2g}"
        )
    return (
        f"{row.name} differs from uncaptured code by {row.difference:.2g} of its norm ({where}), but rounding explains only "
        f"{row.limit:.2g}"
    )


def _undecided(found: Sequence[_Found], attempts: Sequence[tuple[int, Attempt]], spec: RunSpec) -> str:
    """Return why the checks decide nothing, or an empty text."""
    for one in _checks(attempts):
        if one.check.missing:
            return (
                f"not step-checked: the check of step {one.check.step} needs {one.check.missing / 2**30:.1f} GiB more of "
                f"{one.check.missing_on} memory"
            )
    if missing := [
        f"repeat {repeat}: {text}" for repeat, one in attempts if (text := describe_missing_checks(one, spec))
    ]:
        return f"not step-checked: {missing[0]}"
    if any(one.check.lacks_noise for one in found):
        return (
            "results differ by more than repetitions of the uncaptured code, and the effect of rounding cannot be measured "
            "(docs/step_check.md, Limits)"
        )
    noise = max((one.check.largest_noise for one in found), default=0.0)
    if hides_everything(noise):
        return f"not step-checked: with a noise of {noise:.2g}, even a difference as large as a result would not be a fault"
    return ""
