"""Test that a job rejects a model or a batch that its ranks cannot divide."""

from __future__ import annotations

from typing import Any

import pytest

from launch.contract.errors import UnsupportedError
from launch.contract.spec import Model, Parallelism, RunSpec, Training
from launch.engines.protocol import check_supported


@pytest.mark.parametrize(
    ("model", "layout", "training", "said"),
    [
        ({}, {"tp": 3}, {}, "tp=3, model.num_query_groups=4, but tp must divide"),
        ({"vocab_size": 257}, {"tp": 2}, {}, "model.vocab_size=257, parallelism.tp=2"),
        ({"num_moe_experts": 6, "moe_router_topk": 1}, {"ep": 4, "dp": 4}, {}, "ep=4, model.num_moe_experts=6"),
        (
            {"num_moe_experts": 4, "moe_router_topk": 1, "moe_ffn_hidden_size": 9},
            {"tp": 2, "etp": 2},
            {},
            "model.moe_ffn_hidden_size=9, parallelism.etp=2",
        ),
        ({}, {"pp": 4}, {}, "pp=4, parallelism.vpp=1, model.num_layers=2"),
        ({}, {"pp": 2, "vpp": 2}, {}, "schedule=1f1b, parallelism.pp=2, parallelism.vpp=2"),
        (
            {"num_layers": 4},
            {"pp": 2, "vpp": 2, "schedule": "interleaved"},
            {"global_batch_size": 3},
            "num_microbatches=3, parallelism.pp=2",
        ),
        ({}, {"tp": 2, "sequence_parallel": True}, {"sequence_length": 127}, "sequence_length=127, parallelism.cp=1"),
        ({}, {"cp": 2}, {"sequence_length": 126}, "sequence_length=126, parallelism.cp=2"),
        ({}, {"cp": 2, "tp": 4, "sequence_parallel": True}, {"sequence_length": 132}, "cp=2, parallelism.tp=4"),
        ({}, {"dp": 3}, {}, "global_batch_size=8, training.micro_batch_size=1, parallelism.dp=3"),
        ({"kv_channels": 15}, {}, {}, "model.kv_channels=15"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_its_numbers(
    model: dict[str, Any], layout: dict[str, Any], training: dict[str, Any], said: str
) -> None:
    spec = RunSpec(model=Model(**model), parallelism=Parallelism(**layout), training=Training(**training))
    with pytest.raises(UnsupportedError) as caught:
        check_supported(spec)
    assert said in str(caught.value)
    check_supported(RunSpec())
