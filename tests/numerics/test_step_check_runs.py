"""Test runs with step checks: the checks find nothing, and change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launch.contract.spec import CudaGraph, Data, GraphImpl, Model, Parallelism
from tests.distributed import workers
from tests.numerics.checked_step import FULL, PIPELINE, ZERO, layer_results, run_with_checks
from tests.numerics.test_graphed_layers import EXPERTS
from tests.numerics.tiny import GPT_OSS, MOE, make_spec


@pytest.mark.parametrize(
    ("impl", "scope", "optimizer", "layout"),
    [
        ("full_iteration", (), True, ZERO),
        ("full_iteration", (), False, PIPELINE),
        ("torch", ("attn", "moe_router"), False, PIPELINE),
        ("transformer_engine", (), False, Parallelism()),
        ("transformer_engine", ("attn", "moe"), False, ZERO),
    ],
)
def test_checks_find_nothing_and_change_nothing(
    impl: GraphImpl, scope: tuple[str, ...], optimizer: bool, layout: Parallelism
) -> None:
    spec = make_spec(replace(EXPERTS, num_layers=4), steps=4, global_batch_size=4)
    spec = replace(spec, parallelism=layout, cuda_graph=CudaGraph(impl, scope, 1, optimizer=optimizer))
    ranks = workers(layout.world_size)
    plain, checked = (
        ranks.run(run_with_checks, replace(spec, step_checks=count, layer_check_steps=2 * count)) for count in (0, 2)
    )
    parts = [with_checks["layers"] for with_checks in checked]
    assert set().union(*parts) == layer_results(spec)
    assert layout.pp == 1 or parts[0].isdisjoint(parts[1])
    for without, with_checks in zip(plain, checked, strict=True):
        assert with_checks["checks"] == [(2, True, 0, 0), (3, True, 0, 0)]
        assert with_checks["results"] == without["results"] and with_checks["proven"]
        assert torch.equal(with_checks["weights"], without["weights"])


@pytest.mark.parametrize("model", [MOE, GPT_OSS], ids=["moe", "gpt-oss"])
def test_whole_steps_on_packed_sequences_are_those_of_eager_code_and_pass_their_checks(model: Model) -> None:
    """Every step has other borders of documents."""
    packed = Data(kind="synthetic", eod_token=3, packed_sequences=True)
    eager = replace(make_spec(model, steps=4, sequence_length=32), data=packed)
    unpacked = replace(eager, data=replace(packed, packed_sequences=False))
    found = run_with_checks(replace(eager, cuda_graph=replace(FULL, optimizer=True), step_checks=2))
    assert found["checks"] == [(2, True, 0, 0), (3, True, 0, 0)] and found["proven"]
    assert found["results"] == run_with_checks(eager)["results"] != run_with_checks(unpacked)["results"]
