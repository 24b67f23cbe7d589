"""Test arrays and chains: the limits always hold, and no bundle is omitted, whatever is submitted and whenever."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.submit.job_arrays import Array, count_chains, form_arrays
from orchestrator.targets.job_request import JobRequest


def request(nodes: int = 1, minutes: int = 10) -> JobRequest:
    return JobRequest(nodes=nodes, ranks_per_node=2, cpus_per_rank=1, gpus_per_node=0, minutes=minutes)


some_requests = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4),
    st.builds(request, nodes=st.integers(1, 3), minutes=st.integers(1, 60)),
    max_size=40,
)
some_limits = st.none() | st.integers(1, 12)
some_loads = st.lists(st.floats(0, 500), min_size=1, max_size=6)


@given(some_requests, st.none() | some_loads, st.integers(0, 7))
def test_every_bundle_is_in_one_array_of_its_like(
    requests: Mapping[str, JobRequest], loads: list[float] | None, most: int
) -> None:
    arrays = form_arrays(requests, loads, most)
    assert sorted(bundle for array in arrays for bundle in array.bundles) == sorted(requests)
    for array in arrays:
        assert {requests[bundle] for bundle in array.bundles} == {array.request}
        assert 1 <= len(array.bundles) <= max(1, most)
        assert array.chain in (range(len(loads)) if loads is not None else (None,))


@given(some_requests, some_loads, st.integers(1, 7))
def test_no_more_arrays_than_needed(requests: Mapping[str, JobRequest], loads: list[float], most: int) -> None:
    for chosen in (None, loads):
        by_kind: dict[object, list[Array]] = defaultdict(list)
        for array in form_arrays(requests, chosen, most):
            by_kind[array.chain, array.request].append(array)
        for arrays in by_kind.values():
            assert sum(len(array.bundles) < most for array in arrays) <= 1


@given(some_requests, some_loads)
def test_chains_end_within_one_bundle_of_each_other(requests: Mapping[str, JobRequest], loads: list[float]) -> None:
    """A chain gets another bundle only if it is the first to become free."""
    ends = Counter(dict(enumerate(loads)))
    longest = 0
    for array in form_arrays(requests, loads, 1000):
        assert array.chain is not None
        ends[array.chain] += array.request.minutes * len(array.bundles)  # type: ignore[assignment]
        longest = max(longest, array.request.minutes)
    given_more = {array.chain for array in form_arrays(requests, loads, 1000)}
    assert all(ends[chain] <= min(ends.values()) + longest + 1e-6 for chain in given_more if chain is not None)


@given(st.lists(st.integers(1, 4), min_size=1), some_limits, some_limits)
def test_one_job_a_chain_keeps_within_the_limits(
    widths: list[int], max_nodes: int | None, max_jobs: int | None
) -> None:
    if max_nodes is not None and max(widths) > max_nodes:
        with pytest.raises(InputError, match=f"{max_nodes}: a bundle of this sweep takes {max(widths)} nodes"):
            count_chains(max(widths), max_nodes, max_jobs)
        return
    chains = count_chains(max(widths), max_nodes, max_jobs)
    if chains is None:
        assert max_nodes is None and max_jobs is None
        return
    at_once = sorted(widths)[-chains:]
    assert len(at_once) >= 1
    assert max_jobs is None or len(at_once) <= max_jobs
    assert max_nodes is None or sum(at_once) <= max_nodes
