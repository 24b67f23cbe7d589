"""Test that the counted operations of a step are those that PyTorch counts in the engine's own step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from analysis.limits.step_work import work_of_stages
from launch.contract.spec import Model, RunSpec, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from tests.numerics.tiny import CPU, DENSE, MOE

TOKENS, SEQUENCE = 64, 16
Formula = Callable[..., int]
GROUPED: Mapping[Any, Formula] = {
    torch.ops.launch.grouped_mm: lambda x, weight, *_, **__: 2 * x[0] * weight[1] * weight[2],
    torch.ops.launch.grouped_mm_weight_gradient: lambda x, gradient, *_, **__: 2 * x[0] * x[1] * gradient[1],
}
"""Formulas for custom operators, whose operations PyTorch does not count. They take the shapes of the inputs."""
SHARED = replace(MOE, moe_shared_expert_ffn_hidden_size=12)


def counted(spec: RunSpec) -> tuple[int, int]:
    """Return the operations of a step's matrix products, and of its attention, in which no mask saves operations."""
    engine = TorchNativeEngine(spec, RankPlace(0, 1, CPU))
    tokens = torch.randint(spec.model.vocab_size, (spec.num_microbatches, 2, SEQUENCE + 1))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=dict(GROUPED)) as counter:
        engine.step(tokens)
    found = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    attention = found.pop("aten.bmm")
    return sum(found.values()), attention


@pytest.mark.parametrize(
    ("model", "recompute", "modules"),
    [
        (DENSE, "none", ()),
        (DENSE, "full", ()),
        (DENSE, "selective", ("mlp",)),
        (MOE, "none", ()),
        (MOE, "full", ()),
        (MOE, "selective", ("moe",)),
        (SHARED, "none", ()),
    ],
)
def test_operations_are_those_of_the_engine(model: Model, recompute: Any, modules: tuple[str, ...]) -> None:
    training = Training(
        sequence_length=SEQUENCE,
        micro_batch_size=2,
        global_batch_size=4,
        recompute=recompute,
        recompute_modules=modules,
    )
    spec = RunSpec(model=model, training=training)
    (work,) = work_of_stages(spec)
    products, attention = counted(spec)
    # Routers are not counted. There are three products, and one more with recomputation.
    passes = 4 if model.is_moe and recompute != "none" else 3
    routers = passes * 2 * TOKENS * model.hidden_size * model.num_moe_experts * model.num_layers
    assert products - routers == sum(work[kind].operations for kind in ("dense", "grouped", "logits"))
    # A causal mask keeps half of the keys.
    assert attention == 2 * work["attention"].operations
