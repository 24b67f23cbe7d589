"""Compare the parameters with which runs end, by sketches, although curves differ by rounding.

A replay may compute a wrong gradient after the first steps, in a parameter on which losses hardly depend. Such a parameter ends
elsewhere. How far rounding alone takes parameters shows in the distances of eager runs from each other, and from the perturbed run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from analysis.pairing.eager_baseline import MissingRun
from analysis.records.run import Attempt
from analysis.verdict.verdict import Verdict
from launch.common.text import listed
from launch.contract.records.sketch import Sketch
from launch.contract.records.step_check import NOISE_MULTIPLE

LEAST_OF_CHANGE = 1 / 32
"""A doubt exceeds this share of the parameter's change since the capture."""
LEAST_IF_ROUTED = 1 / 2
"""The same for experts and routers. Rounding there routes tokens to other experts."""
MOST_EVERYWHERE, MOST_IF_UNPERTURBED = 1 / 16, 1 / 4
"""Rounding takes all parameters no farther than this share of their change, unless eager runs drift as far. The second holds without
a perturbed run: eager runs may then hardly drift, if only one kernel adds in a varying order."""
_MOST_NAMED = 3
_FIX = (
    "find out from which step on a replay updates these parameters otherwise (compare their gradients in later steps), or capture "
    "fewer parts until the parameters agree"
)

_Place = tuple[int, str]
"""A rank, and the name of a parameter."""


@dataclass(frozen=True)
class _End:
    """How far a parameter of the graphed run ends from the nearest eager run, as a share of its change since the capture.

    ``drift`` is the largest distance between eager runs, as such a share.
    """

    distance: float
    drift: float


@dataclass(frozen=True)
class ParameterEnds:
    """The ends of parameters of a graphed run and of eager ones, of which one may be perturbed. Empty if they cannot be compared."""

    ends: Mapping[_Place, _End]
    missing: MissingRun | None = None
    """The planned perturbed run, if there is none yet."""
    perturbed: bool = False
    """Whether there is a perturbed run, or one is planned."""
    unmatched: tuple[_Place, ...] = ()
    """The parameters of the graphed run that an eager run does not have by that name."""

    def doubt(self) -> Verdict | None:
        """Return INCONCLUSIVE if a parameter ends farther from eager runs than these drift apart. It doubts only a pass."""
        far = self._far
        if not far or not (self.missing or self._is_drift_known):
            return None
        reason = f"parameters end far from those of eager runs: {_named(far)}. Curves hardly show this"
        if self.missing is None:
            return Verdict("INCONCLUSIVE", reason, _FIX)
        reason += f". The perturbed run {self.missing.run_id} shows whether rounding alone explains this"
        return Verdict("INCONCLUSIVE", reason, self.missing.fix, needed_run=self.missing.run_id)

    @property
    def unjudged(self) -> str:
        """Name what ends far from eager runs if nothing shows how far rounding alone goes; return "" otherwise."""
        return "" if self.missing or self._is_drift_known else _named(self._far)

    @property
    def uncompared(self) -> str:
        """Name the ``unmatched`` parameters, whose gradients are not compared either; return "" if there are none."""
        return listed([f"{name} on rank {rank}" for rank, name in self.unmatched], _MOST_NAMED)

    @property
    def _is_drift_known(self) -> bool:
        return any(end.drift for end in self.ends.values())

    @property
    def _far(self) -> Mapping[_Place, _End]:
        """The parameters that are farther away than their drift and the distances of other parameters explain.

        Rounding of other kernels may take all parameters farther than the noise of eager runs does. The lower quartile of distances
        shows how far, because a fault on which losses hardly depend is in fewer parameters. At a low learning rate losses hardly
        depend on any parameter, so a fault may be in all of them, such as a learning rate that a graph has frozen.
        """
        everywhere = _lower_quartile(end.distance for end in self.ends.values())
        drift = _lower_quartile(end.drift for end in self.ends.values())
        most = MOST_EVERYWHERE if self.perturbed else MOST_IF_UNPERTURBED
        if everywhere > max(most, NOISE_MULTIPLE * drift):
            everywhere = 0.0
        return {
            place: end
            for place, end in self.ends.items()
            if end.distance > max(_least(place), NOISE_MULTIPLE * max(end.drift, everywhere))
        }


def compare_ends(
    graphed: Attempt, eager: Sequence[Attempt], perturbed: Attempt | None, missing: MissingRun | None
) -> ParameterEnds:
    """Compare a graphed run with all comparable ``eager`` runs and the ``perturbed`` one, which may be ``missing``."""
    perturbed = perturbed if perturbed and perturbed.parameter_ends else None
    runs = [one for one in (*eager, perturbed) if one and one.parameter_ends]
    if len(runs) < 2:
        return ParameterEnds({})
    ends = {}
    for place, own in graphed.parameter_ends.items():
        found = [one.parameter_ends[place] for one in runs if place in one.parameter_ends]
        change = max(own.change, *(one.change for one in found)) if len(found) == len(runs) else 0.0
        if change:
            distance, drift = (
                min(_distance(own.last, one.last) for one in found),
                max(a.last.distance(b.last) for a, b in combinations(found, 2)),
            )
            ends[place] = _End(distance / change, drift / change)
    unmatched = {place for place in graphed.parameter_ends if any(place not in one.parameter_ends for one in runs)}
    absent = None if perturbed else missing
    return ParameterEnds(ends, absent, bool(perturbed or absent), tuple(sorted(unmatched)))


def _distance(graphed: Sketch, eager: Sketch) -> float:
    """Return how far two ends of a parameter are apart, or 0 if single elements are rounded otherwise.

    A bf16 parameter of few elements may change by few units in the last place. An element near a tie is then rounded up in one
    run and down in another, which is a large share of that change, although no two eager runs need differ.
    """
    return 0.0 if graphed.differs_by_rounding(eager) else graphed.distance(eager)


def _lower_quartile(shares: Iterable[float]) -> float:
    found = sorted(shares)
    return found[len(found) // 4] if found else 0.0


def _least(place: _Place) -> float:
    return LEAST_IF_ROUTED if any(word in place[1].lower() for word in ("expert", "router")) else LEAST_OF_CHANGE


def _named(far: Mapping[_Place, _End]) -> str:
    largest = sorted(far.items(), key=lambda item: -item[1].distance)
    told = [
        f"{name} on rank {rank} by {end.distance:.2g} of its change"
        + f" (eager runs by {end.drift:.2g})" * bool(end.drift)
        for (rank, name), end in largest
    ]
    return listed(told, _MOST_NAMED, "; ")
