"""Test the ranks of each kind of parallelism: Megatron-Core's order, and what holds in any order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any, get_args

import pytest

from launch.contract.errors import UnsupportedError
from launch.contract.spec import Axis, Parallelism, RunSpec
from launch.engines.protocol import check_supported

LAYOUTS = [
    Parallelism(tp=tp, dp=dp, pp=pp, ep=ep, cp=cp, etp=etp)
    for tp, dp, pp, cp in product(range(1, 17), range(1, 17), range(1, 17), (1, 2, 3))
    if tp * cp * dp * pp <= 16
    for ep, etp in product(range(1, 17), (1, 2, 4))
    if (tp * cp * dp) % (etp * ep) == 0
]


@pytest.fixture(scope="module")
def rank_generator() -> Callable[..., Any]:
    """Importing megatron-core without Transformer Engine warns about missing features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.parallel_state import RankGenerator
    generator: Callable[..., Any] = RankGenerator
    return generator


def test_groups_are_megatron_cores(rank_generator: Callable[..., Any]) -> None:
    """Megatron-Core's initialize_model_parallel makes these groups."""

    @cache  # Many layouts differ only in their experts.
    def groups_of(token: str, tp: int, ep: int, dp: int, pp: int, cp: int) -> set[tuple[int, ...]]:
        generator = rank_generator(tp=tp, ep=ep, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
        return {tuple(group) for group in generator.get_ranks(token)}

    for dims in LAYOUTS:
        dense = (dims.tp, 1, dims.dp, dims.pp, dims.cp)
        experts = (dims.etp, dims.ep, dims.expert_dp, dims.pp, 1)
        for axis, sizes, token in (
            ("tp", dense, "tp"),
            ("cp", dense, "cp"),
            ("dp", dense, "dp"),
            ("pp", dense, "pp"),
            ("etp", experts, "tp"),
            ("ep", experts, "ep"),
            ("expert_dp", experts, "dp"),
            ("pp", experts, "pp"),
        ):
            assert {*dims.groups(axis)} == groups_of(token, *sizes), (dims, axis)


def test_every_rank_is_in_one_group_of_each_axis_at_its_place() -> None:
    for dims, axis in product(LAYOUTS, get_args(Axis)):
        groups = dims.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(dims.world_size))
        assert {len(group) for group in groups} == {dims.size(axis)}
        for group in groups:
            assert list(group) == sorted(group)
            assert [dims.rank_in(axis, rank) for rank in group] == list(range(len(group)))
            assert {dims.group(axis, rank) for rank in group} == {group}


def test_ranks_of_a_stage_are_told_apart_by_their_places() -> None:
    """Ranks have one place as dense layers see them, and one as experts do."""
    for dims, axes in product(LAYOUTS, (("tp", "cp", "dp", "pp"), ("etp", "ep", "expert_dp", "pp"))):
        places = {tuple(dims.rank_in(axis, rank) for axis in axes) for rank in range(dims.world_size)}
        assert len(places) == dims.world_size


@pytest.mark.parametrize(
    "parallelism", [Parallelism(tp=2, dp=3, ep=4), Parallelism(pp=4, ep=2), Parallelism(tp=2, dp=2, ep=2, etp=4)]
)
def test_a_job_refuses_experts_that_the_ranks_of_a_stage_cannot_share(parallelism: Parallelism) -> None:
    with pytest.raises(UnsupportedError, match=r"etp \* ep \* pp must divide the number of ranks"):
        check_supported(RunSpec(parallelism=parallelism))
