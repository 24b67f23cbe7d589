"""The verdict on the numbers of a graphed cell: its reason, the fix, and the evidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from analysis.verdict.curve_difference import Deviation
from analysis.verdict.curve_evidence import CurveEvidence
from launch.contract.plan import AdvisedSetting

STEP_CHECKED: Final = "EQUIVALENT (step-checked)"
VerdictName = Literal[
    "BITWISE", "EQUIVALENT", "EQUIVALENT (step-checked)", "INCONCLUSIVE", "UNFINISHED", "INCOMPARABLE", "DIVERGED"
]
VERDICTS: tuple[VerdictName, ...] = get_args(VerdictName)
"""From the best to the worst. A pair is UNFINISHED if one of its runs has no outcome yet, or is ordered again after `cancel`."""
PASSES: tuple[VerdictName, ...] = ("BITWISE", "EQUIVALENT", STEP_CHECKED)

DETERMINISTIC = "use deterministic mode (training.deterministic: true)"
CHECK_STEPS = "judge single steps despite the noise (step_checks: 5)"
"""Step checks decide where the noise is the only cause."""
OF_SETTINGS: Mapping[AdvisedSetting, str] = {"training.deterministic=true": DETERMINISTIC, "step_checks=5": CHECK_STEPS}
REPEAT = ("add repeats to narrow the interval", DETERMINISTIC)


@dataclass(frozen=True)
class Verdict:
    """A verdict with its reason. What would settle it is ``fix`` and one of ``alternatives``. All three may be empty."""

    verdict: VerdictName
    reason: str = ""
    fix: str = ""
    evidence: CurveEvidence | None = None
    deviation: Deviation | None = None
    noisy: bool = False
    """Whether too much eager noise for the margin is the only cause of an INCONCLUSIVE."""
    needed_run: str = ""
    """The id of the perturbed run that a more certain verdict needs; empty if it needs none."""
    alternatives: tuple[str, ...] = ()
    """Changes of which one is enough, the cheapest first."""
    copied_logs: tuple[str, ...] = ()
    """Graphed logs with the numbers of an eager one, in words. Each may be a copy instead of the log of a graphed run."""

    @property
    def passes(self) -> bool:
        return self.verdict in PASSES

    @property
    def advice(self) -> str:
        """``fix`` and ``alternatives`` in one text."""
        return "; besides, ".join(filter(None, [self.fix, ", or ".join(self.alternatives)]))

    def without(self, alternatives: Collection[str]) -> Verdict:
        """Return this verdict without some of its alternatives."""
        return replace(self, alternatives=tuple(one for one in self.alternatives if one not in alternatives))

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
