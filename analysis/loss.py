"""Does a graphed run compute what its eager twin computes? Pure rules over two curves, pointwise and keyed by step.

The rules, in the order in which they apply (every gate is written so that NaN fails it):

1. After the capture, a loss or gradient norm that is NaN or infinite on one side only: DIVERGED.
2. A step that is missing, twice or unexpected on either side, or no step after the capture: INCOMPARABLE.
3. A difference beyond its margin at any step: DIVERGED where eager repeats agree with each other within that margin
   (the floor), INCONCLUSIVE where they do not, or where there are too few repeats to know.
4. NaN or infinity on both sides, or on either side before the capture: INCONCLUSIVE.
5. Every loss and gradient norm equal to the bit: BITWISE.
6. Fewer than two eager repeats, a floor beyond the margin, or fewer than ``MINIMUM_STEPS`` steps: INCONCLUSIVE.
7. EQUIVALENT: every step within the margins. The floor never widens them.

The length in rule 6 comes from a known failure: Megatron-LM issue 5966 (TE graphs over attention) leaves the eager
curve at step 81 and is NaN at 91, so that a check over 50 steps passes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional

import numpy as np

from analysis.deviation import (
    METRIC_NAMES,
    Deviation,
    Evidence,
    Spread,
    Window,
    bitwise,
    ended_together,
    evidence_of,
    finite_steps,
    first_beyond,
    first_one_sided,
    incomplete,
    shared_steps,
    window_of,
)
from analysis.steps import Metric, Steps
from launch.record import Margins

Word = Literal["BITWISE", "EQUIVALENT", "INCONCLUSIVE", "UNFINISHED", "INCOMPARABLE", "DIVERGED"]
WORDS: tuple[Word, ...] = ("BITWISE", "EQUIVALENT", "INCONCLUSIVE", "UNFINISHED", "INCOMPARABLE", "DIVERGED")
"""From the best to the worst. UNFINISHED is a pair of which a run has no outcome yet."""
PASSES: tuple[Word, ...] = ("BITWISE", "EQUIVALENT")

MINIMUM_STEPS = 100
"""Steps after the capture that EQUIVALENT needs."""

_NO_FLOOR = "fewer than two complete eager repeats give no floor"
_REPEAT = "set repeats to 2 or more: a second eager repeat shows how far eager is from itself"
_TRAIN = "make eager train first: lower training.learning_rate, or change the data"
_REPRODUCE = "make eager reproduce itself first: training.deterministic=true, or a lower learning rate"


@dataclass(frozen=True)
class Verdict:
    """``reason`` says why, ``remedy`` what would settle it most cheaply; both are empty where nothing is open."""

    word: Word
    reason: str = ""
    remedy: str = ""
    evidence: Optional[Evidence] = None
    deviation: Optional[Deviation] = None

    @property
    def passes(self) -> bool:
        return self.word in PASSES


def margin_of(margins: Margins, metric: Metric) -> float:
    return margins.loss if metric == "loss" else margins.grad_norm


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of several verdicts, the first of equals."""
    return max(verdicts, key=lambda verdict: WORDS.index(verdict.word))


def judge(eager: Steps, graphed: Steps, spread: Optional[Spread], margins: Margins, expected_steps: int) -> Verdict:
    """The verdict on one graphed run against one eager run of the same workload.

    ``spread`` is None where fewer than two eager repeats are there to give the floor.
    """
    captures = np.flatnonzero(graphed.phase == "capture")
    if len(captures) == 0:
        return Verdict("INCOMPARABLE", "the graphed run recorded no capture step", "see its failure, or its log")
    first = int(captures[-1]) + 1
    shared = min(shared_steps(eager, graphed), expected_steps)
    window = window_of(eager.take(slice(shared)), graphed.take(slice(shared)), first) if shared > first else None
    one_sided = first_one_sided(window) if window else None
    if window and one_sided:
        return _diverged(window, spread, one_sided)
    gap = incomplete(eager, expected_steps, "eager") or incomplete(graphed, expected_steps, "graphed")
    if gap and not (window and ended_together(window, eager, graphed)):
        return Verdict("INCOMPARABLE", gap, "run the pair again: a comparison needs every step of both")
    if not _in_order(graphed):
        reason = "the graphed run's phases are out of order: warm-up, one capture, then steps that replay"
        return Verdict("INCOMPARABLE", reason, "run the pair again: its records are damaged")
    if window is None:
        remedy = f"set training.steps to {first + MINIMUM_STEPS} or more"
        return Verdict("INCOMPARABLE", f"no step ran after the capture (step {first - 1})", remedy)
    return _beyond(window, spread, margins) or _unsound(window, spread) or _within(window, spread, margins)


def _in_order(graphed: Steps) -> bool:
    """Whether the one capture stands where a capture does: else a window could begin wherever a record says."""
    at = int(np.argmax(graphed.phase == "capture"))
    before, after = graphed.phase[:at], graphed.phase[at + 1 :]
    return bool((before == "warmup").all() and np.isin(after, ("settle", "measure")).all())


def _diverged(window: Window, spread: Optional[Spread], deviation: Deviation) -> Verdict:
    step, name = deviation.step, METRIC_NAMES[deviation.metric]
    eager, graphed = (float(side.of(deviation.metric)[step]) for side in (window.eager, window.graphed))
    reason = f"first at step {step}: the {name} is {graphed:.9g} graphed and {eager:.9g} eager"
    if np.isfinite(deviation.size):
        reason += f", a difference of {deviation.size:.3g}{' of it' if deviation.metric == 'grad_norm' else ''}"
    remedy = "capture less (a smaller scope) until it agrees, and compare the first diverging step"
    return Verdict("DIVERGED", reason, remedy, evidence_of(window, spread), deviation)


def _beyond(window: Window, spread: Optional[Spread], margins: Margins) -> Optional[Verdict]:
    """Rule 3, for each metric by its own floor."""
    found = [first_beyond(window, metric, margin_of(margins, metric)) for metric in METRIC_NAMES]
    deviations = sorted((d for d in found if d is not None), key=lambda deviation: deviation.step)
    if not deviations:
        return None
    floor = spread.floor(window.first) if spread else None
    for deviation in deviations:
        if floor is not None and floor.of(deviation.metric) <= margin_of(margins, deviation.metric):
            return _diverged(window, spread, deviation)
    at = deviations[0]
    seen = f"the {METRIC_NAMES[at.metric]} difference of {at.size:.3g} at step {at.step} is beyond the margin of "
    seen += f"{margin_of(margins, at.metric):g}"
    if floor is None:
        return _inconclusive(window, spread, f"{seen}, and {_NO_FLOOR}", _REPEAT)
    reason = f"{seen}, but eager repeats themselves differ by up to {floor.of(at.metric):.3g}"
    return _inconclusive(window, spread, reason, _REPRODUCE)


def _inconclusive(window: Window, spread: Optional[Spread], reason: str, remedy: str) -> Verdict:
    return Verdict("INCONCLUSIVE", reason, remedy, evidence_of(window, spread))


def _unsound(window: Window, spread: Optional[Spread]) -> Optional[Verdict]:
    """Rule 4."""
    finite = finite_steps(window.eager) & finite_steps(window.graphed)
    if finite.all():
        return None
    step = int(np.argmin(finite))
    where = "eager and graphed alike" if step >= window.first else "before the capture"
    reason = f"the loss or gradient norm is not finite at step {step}, {where}: there is nothing sound to compare"
    return _inconclusive(window, spread, reason, _TRAIN)


def _within(window: Window, spread: Optional[Spread], margins: Margins) -> Verdict:
    """Rules 5 to 7, for finite curves within the margins."""
    evidence = evidence_of(window, spread)
    if bitwise(window):
        return Verdict("BITWISE", evidence=evidence)
    floor = evidence.floor
    if floor is None:
        return _inconclusive(window, spread, _NO_FLOOR, _REPEAT)
    for metric in METRIC_NAMES:
        if not (floor.of(metric) <= margin_of(margins, metric)):
            reason = f"within the margins, but eager repeats differ in {METRIC_NAMES[metric]} by {floor.of(metric):.3g}"
            return _inconclusive(window, spread, reason, _REPRODUCE)
    if evidence.steps < MINIMUM_STEPS:
        reason = f"within the margins, but over {evidence.steps} steps after the capture; {MINIMUM_STEPS} are needed"
        remedy = f"set training.steps to {window.first + MINIMUM_STEPS} or more"
        return _inconclusive(window, spread, reason, remedy)
    return Verdict("EQUIVALENT", evidence=evidence)
