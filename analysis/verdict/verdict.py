"""The verdict on the numbers of a graphed cell: its reason, the fix, and the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from analysis.verdict.curve_difference import CurveEvidence, Deviation

VerdictName = Literal["BITWISE", "EQUIVALENT", "INCONCLUSIVE", "UNFINISHED", "INCOMPARABLE", "DIVERGED"]
VERDICTS: tuple[VerdictName, ...] = ("BITWISE", "EQUIVALENT", "INCONCLUSIVE", "UNFINISHED", "INCOMPARABLE", "DIVERGED")
"""From the best to the worst. UNFINISHED is a pair of which a run has no outcome yet."""
PASSES: tuple[VerdictName, ...] = ("BITWISE", "EQUIVALENT")

REPEAT = "add repeats to narrow the interval, or use deterministic mode (training.deterministic: true)"


@dataclass(frozen=True)
class Verdict:
    """``reason`` says why, ``fix`` what would settle it at the least cost; both may be empty."""

    verdict: VerdictName
    reason: str = ""
    fix: str = ""
    evidence: CurveEvidence | None = None
    deviation: Deviation | None = None
    needed_run: str = ""
    """The id of the perturbed run without which nothing more is known; empty where none is missing."""

    @property
    def passes(self) -> bool:
        return self.verdict in PASSES

    @property
    def p(self) -> float:
        """The largest p of the tests that an EQUIVALENT passed; 1 for all other verdicts."""
        tested = self.evidence.tested if self.evidence and self.verdict == "EQUIVALENT" else ()
        return max((one.p for one in tested), default=1.0)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the worst of several verdicts; of several EQUIVALENT ones the least certain, else the first."""
    return max(verdicts, key=lambda verdict: (VERDICTS.index(verdict.verdict), verdict.p))
