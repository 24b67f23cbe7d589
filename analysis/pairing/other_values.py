"""Compare the last values of what no optimizer steps, such as running statistics, although curves differ by rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from analysis.verdict.verdict import Verdict
from launch.common.grouped import grouped
from launch.common.text import listed
from launch.contract.records.sketch import ChangedTensor
from launch.contract.records.state_changes import StateChanges
from launch.contract.records.step_check import NOISE_MULTIPLE

LEAST_OF_ITSELF, LEAST_OF_CHANGE, LEAST_OF_ALL = 1 / 16, 1 / 2, 1 / 50
"""A doubt exceeds these shares: of the tensor's norm, of the norm of its change, and of the norm of all tensors that change.

Rounding that training amplifies stays below one of them. The average of a key's bias, which is mere rounding, is below the last.
"""
LEAST_IF_ROUTED = 1 / 2
"""The first share for experts and routers. Rounding there routes tokens to other experts."""
_MOST_NAMED = 3
_FIX = (
    "check that each replay updates buffers and averaged weights as eager steps do, with the same inputs, and that the warm-up of "
    "the capture leaves them as they were; or update them outside the graph"
)


def doubt_values(rank: int, graphed: StateChanges, eager: Sequence[StateChanges]) -> Verdict | None:
    """Return INCONCLUSIVE if several ``eager`` runs agree on values of ``rank`` from which the ``graphed`` run is far."""
    if len(eager) < 2:
        return None
    agreed = set.intersection(*({*one.counters.items()} for one in eager))
    if others := sorted(f"{name} is {number} there" for name, number in agreed if graphed.counters.get(name) != number):
        told = listed(others, _MOST_NAMED)
        return _doubt(f"counters among buffers of rank {rank} end with other numbers than in eager runs: {told}")
    found = {name: share for name, share in _shares(graphed, eager).items() if share}
    if not found:
        return None
    named = [f"{name} by {share:.2g} of it" for name, share in sorted(found.items(), key=lambda item: -item[1])]
    told = listed(named, _MOST_NAMED, "; ")
    return _doubt(
        f"buffers, or weights that no optimizer steps, of rank {rank} end far from those of eager runs: {told}"
    )


def _doubt(reason: str) -> Verdict:
    return Verdict("INCONCLUSIVE", f"{reason}. No loss of the run depends on them, so curves do not show this", _FIX)


def _shares(graphed: StateChanges, eager: Sequence[StateChanges]) -> dict[str, float]:
    """Return how far each tensor is from the nearest eager one, as a share of its norm, or 0 if that is no doubt."""
    own, found = _by_name(graphed), [_by_name(one) for one in eager]
    of_all = math.sqrt(sum(one.last.norm**2 for one in eager[0].values))
    shares: dict[str, float] = {}
    for name in own.keys() & set.intersection(*(set(one) for one in found)):
        least = LEAST_IF_ROUTED if any(word in name.lower() for word in ("expert", "router")) else LEAST_OF_ITSELF
        noise = max(_distance(one, b[name]) for a, b in combinations(found, 2) for one in a[name])
        for one in own[name]:
            size = min(_distance(one, two[name]) for two in found)
            norm = max(one.last.norm, max(other.last.norm for other in found[0][name]))
            change = max(other.change for other in found[0][name])
            limit = max(least * norm, LEAST_OF_CHANGE * change, LEAST_OF_ALL * of_all, NOISE_MULTIPLE * noise)
            shares[name] = max(shares.get(name, 0.0), size / norm if size > limit else 0.0)
    return shares


def _distance(one: ChangedTensor, others: Sequence[ChangedTensor]) -> float:
    """Return the distance from the nearest of ``others``, because several modules may use one name."""
    return min(one.last.distance(other.last) for other in others)


def _by_name(changes: StateChanges) -> dict[str, list[ChangedTensor]]:
    return grouped((one.last.name, one) for one in changes.values)
