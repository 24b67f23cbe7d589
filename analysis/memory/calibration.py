"""Learn a site's constants of the forecast from the finished runs of a sweep.

The fit is the smallest change of constants that explains the measured memory: least squares over cells and phases, separately for
the allocator's reservation and for memory outside it. The built-in constants are the prior.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from analysis.memory.extrapolation import Bytes, fullest_run
from analysis.memory.forecast import forecast
from analysis.memory.measured_constants import MEASURED, SITE, Constants, is_certain
from analysis.memory.term import total
from launch.common.typed_json import Amount
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from launch.contract.records.events import Phase
from launch.contract.spec import RunSpec

PRIOR = 0.5
"""How far a site's constant is expected to be from the built-in one, relative to it (a standard deviation)."""
NOISE = 0.01
"""How far formulas are expected to be off, relative to the peak of a cell."""
BUMP = 0.01
"""The relative change of a constant that shows how the forecast depends on it."""


@dataclass(frozen=True)
class Learned:
    """A constant's value, in bytes or as a factor, and the number of runs that it was learned from."""

    value: Amount
    runs: int


@dataclass(frozen=True)
class SiteConstants:
    """What ``plan --calibrate`` learned from ``sweep``, by the names of Constants."""

    sweep: str
    constants: Mapping[str, Learned] = field(default_factory=dict)

    @property
    def applied(self) -> Constants:
        """The built-in constants with those of the site in their place."""
        return replace(
            MEASURED,
            **{
                name: replace(
                    getattr(MEASURED, name), value=one.value, measured=f"{one.runs} runs of sweep {self.sweep}"
                )
                for name, one in self.constants.items()
            },
        )


@dataclass(frozen=True)
class MeasuredCell:
    """A cell's memory by phase, of its fullest run and rank."""

    spec: RunSpec
    runs: int
    phases: Mapping[Phase, Bytes]

    @property
    def peak(self) -> int:
        return max(map(sum, self.phases.values()))


@dataclass(frozen=True)
class CalibrationResult:
    """What a sweep of ``cells`` taught. Errors are (median, worst) of their peaks, by the built-in and by the site's constants."""

    site: SiteConstants
    cells: int
    before: tuple[float, float]
    after: tuple[float, float]

    @property
    def is_better(self) -> bool:
        return self.after[0] < self.before[0]


def measured_cells(sweep: SweepPaths, plan: Plan) -> list[MeasuredCell]:
    """Return the cells with complete runs on GPUs whose memory the formulas know. Leave out injected faults."""
    found = []
    for cell in plan.cells:
        spec = cell.run_spec
        if spec.placement.device != "cuda" or not is_certain(spec) or spec.fault.is_set:
            continue
        runs, phases = fullest_run(map(sweep.run, cell.repeat_ids))
        if runs:
            found.append(MeasuredCell(spec, runs, phases))
    return found


def errors(cells: Sequence[MeasuredCell], constants: Constants) -> tuple[float, float]:
    """Return the median and the worst error of the cells' peaks, relative to the measured memory."""
    found = [max(rank.peak for rank in forecast(cell.spec, constants)) / cell.peak - 1 for cell in cells]
    return median(map(abs, found)), max(found, key=abs)


def calibrate(name: str, cells: Sequence[MeasuredCell]) -> SiteConstants:
    """Return the constants that explain ``cells`` of sweep ``name``. Leave out those that no cell shows."""
    weights = [1 / (NOISE * cell.peak) for cell in cells]
    effects = {constant: [_effects(cell, constant) for cell in cells] for constant in SITE}
    residuals = [
        weight * (measured - expected)
        for cell, weight in zip(cells, weights, strict=True)
        for measured, expected in _groups(cell, MEASURED)
    ]
    columns = {
        constant: [PRIOR * weight * one for weight, of_cell in zip(weights, found, strict=True) for one in of_cell]
        for constant, found in effects.items()
        if any(map(any, found))
    }
    learned = {}
    for constant, change in _smallest_change(columns, residuals).items():
        runs = sum(cell.runs for cell, found in zip(cells, effects[constant], strict=True) if any(found))
        learned[constant] = Learned(getattr(MEASURED, constant).value * (1 + PRIOR * change), runs)
    return SiteConstants(name, learned)


def _effects(cell: MeasuredCell, constant: str) -> list[float]:
    """Return the change of each group's forecast bytes relative to the change of the constant, times the constant's value."""
    own = getattr(MEASURED, constant)
    bumped = replace(MEASURED, **{constant: replace(own, value=own.value * (1 + BUMP))})
    both = zip(_groups(cell, bumped), _groups(cell, MEASURED), strict=True)
    return [(new - old) / BUMP for (_, new), (_, old) in both]


def _groups(cell: MeasuredCell, constants: Constants) -> Iterator[tuple[int, int]]:
    """Yield the measured and the forecast bytes of each phase: what the allocator reserved, and what is outside of it."""
    ranks = forecast(cell.spec, constants)
    for phase, (*reserved, outside) in cell.phases.items():
        known = [rank.phases[phase] for rank in ranks if phase in rank.phases]
        if known:
            terms = max(known, key=total)
            around = sum(term.bytes for term in terms if term.held == "outside")
            yield sum(reserved), total(terms) - around
            yield outside, around


def _smallest_change(columns: Mapping[str, Sequence[float]], residuals: Sequence[float]) -> dict[str, float]:
    """Return the changes x that minimize |residuals - columns x|^2 + |x|^2, in units of PRIOR. No constant falls below 0."""
    import numpy as np  # plan needs it for nothing else

    matrix = np.array([*columns.values()]).T
    changes = np.linalg.solve(matrix.T @ matrix + np.identity(len(columns)), matrix.T @ np.array(residuals))
    return dict(zip(columns, changes.clip(min=-1 / PRIOR).tolist(), strict=True))
