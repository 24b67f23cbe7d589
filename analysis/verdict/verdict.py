"""The verdict on the numbers of a graphed cell: its reason, the fix, and the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from analysis.verdict.curve_difference import Deviation
from analysis.verdict.curve_evidence import CurveEvidence

STEP_CHECKED: Final = "EQUIVALENT (step-checked)"
VerdictName = Literal[
    "BITWISE", "EQUIVALENT", "EQUIVALENT (step-checked)", "INCONCLUSIVE", "UNFINISHED", "INCOMPARABLE", "DIVERGED"
]
VERDICTS: tuple[VerdictName, ...] = get_args(VerdictName)
"""From the best to the worst. A pair is UNFINISHED if one of its runs has no outcome yet."""
PASSES: tuple[VerdictName, ...] = ("BITWISE", "EQUIVALENT", STEP_CHECKED)

REPEAT = "add repeats to narrow the interval, or use deterministic mode (training.deterministic: true)"
CHECK_STEPS = "judge single steps despite the noise (step_checks: 5), "
"""A part of a fix. Step checks decide where the noise is the only cause."""


@dataclass(frozen=True)
class Verdict:
    """A verdict with its reason. ``fix`` is the cheapest change that would settle it. Both may be empty."""

    verdict: VerdictName
    reason: str = ""
    fix: str = ""
    evidence: CurveEvidence | None = None
    deviation: Deviation | None = None
    noisy: bool = False
    """Whether too much eager noise for the margin is the only cause of an INCONCLUSIVE."""
    needed_run: str = ""
    """The id of the perturbed run that a more certain verdict needs; empty if it needs none."""

    @property
    def passes(self) -> bool:
        return self.verdict in PASSES

    @property
    def p(self) -> float:
        """The largest p-value of the tests that an EQUIVALENT passed; 1 for all other verdicts."""
        tested = self.evidence.tested if self.evidence and self.verdict == "EQUIVALENT" else ()
        return max((one.p for one in tested), default=1.0)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the worst verdict. Among EQUIVALENT ones it is the least certain, among other equal ones the first.

    An INCONCLUSIVE that only noise causes is better than another INCONCLUSIVE.
    """
    return max(verdicts, key=lambda verdict: (VERDICTS.index(verdict.verdict), not verdict.noisy, verdict.p))
