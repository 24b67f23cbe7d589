"""Compare the operators of steps, and find the generators from which these steps draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from launch.contract.records.inspection import Finding, FindingKind
from launch.train.inspection.dispatch_trace import CaptureBlocker, Operators, default_generators, first_divergence
from launch.train.inspection.source_line import NOWHERE, Line


class StepOperators:
    """The operators of at least two steps that follow one another.

    Args:
        find_line: returns the line of code that runs.
    """

    def __init__(self, device: torch.device, find_line: Callable[[], Line]) -> None:
        self._find_line = find_line
        self._generators = default_generators(device)
        self._before = [generator.get_state() for generator in self._generators]
        self._steps: list[Operators] = []

    def begin(self) -> Operators:
        """Return the mode to run the next step in."""
        self._steps.append(Operators(self._generators, self._find_line))
        return self._steps[-1]

    def findings(self) -> list[Finding]:
        """Return how later steps differ from the first one, and the generators that advanced."""
        first, *others = (step.operations for step in self._steps)
        changes = [change for later in others for change in first_divergence(first, later)]
        drawn = [draw for step in self._steps for draw in step.drawn]
        drawn += self._hidden_draws({draw.kind for draw in drawn})
        return [*findings_of(changes, len(others)), *findings_of(drawn, len(self._steps))]

    def _hidden_draws(self, known: set[FindingKind]) -> list[CaptureBlocker]:
        """Return generators that advanced without a visible operator, for example in compiled code or a library."""
        return [
            CaptureBlocker(kind, NOWHERE, "in compiled code or a library")
            for (generator, kind), state in zip(self._generators.items(), self._before, strict=True)
            if kind not in known and not torch.equal(generator.get_state(), state)
        ]


def findings_of(seen: Sequence[CaptureBlocker], steps: int) -> list[Finding]:
    """Return one finding per line and kind, in order of first occurrence.

    Drop changing shapes without a line if others have a line, because the backward pass repeats those of the forward pass.
    """
    counts = Counter((one.kind, one.line) for one in seen)
    details: dict[tuple[FindingKind, Line], str] = {}
    for one in seen:
        details.setdefault((one.kind, one.line), one.detail)
    has_line = any(kind == "shape" and line != NOWHERE for kind, line in counts)
    return [
        Finding(kind, line.name, line.number, line.function, line.code, count / steps, details[kind, line])
        for (kind, line), count in counts.items()
        if not (has_line and kind == "shape" and line == NOWHERE)
    ]
