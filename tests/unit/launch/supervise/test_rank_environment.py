"""Test which variables a run's ranks get."""

from __future__ import annotations

import pytest

from launch.contract.spec import EngineName, RunSpec
from launch.supervise.rank_environment import rank_variables

AUTOTUNED = "TRITON_CACHE_AUTOTUNING"


@pytest.mark.parametrize(
    ("engine", "inherited", "value"),
    [("megatron", {}, "1"), ("torch_native", {}, "1"), ("megatron", {AUTOTUNED: "0"}, "0"), ("command", {}, None)],
)
def test_ranks_share_what_triton_autotuned(engine: EngineName, inherited: dict[str, str], value: str | None) -> None:
    assert rank_variables(RunSpec(engine=engine), {}, {}, inherited).get(AUTOTUNED) == value


def test_ranks_share_the_compile_caches_and_later_sources_win() -> None:
    caches = {"TORCHINDUCTOR_CACHE_DIR": "/caches/inductor", "TRITON_CACHE_DIR": "/caches/triton"}
    inherited = caches | {"A": "inherited", "B": "inherited", "SLURM_PROCID": "3"}
    spec = RunSpec(environment={"A": "recipe"})
    found = rank_variables(spec, {"A": "profile", "B": "profile"}, {"B": "placing"}, inherited)
    assert caches.items() <= found.items()
    assert (found["A"], found["B"]) == ("recipe", "profile") and "SLURM_PROCID" not in found
