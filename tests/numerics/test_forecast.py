"""Test that the forecast of a rank's memory equals what the engine allocates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from analysis.memory.activations import layer_bytes, recomputed_bytes
from analysis.memory.static_memory import MOMENTS, Parameters, bytes_of_stages, stages
from launch.contract.spec import Model, RunSpec, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.decoder import build_decoder
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.layers import pointwise
from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.parallel.buckets import ALIGNMENT
from launch.engines.torch_native.parallel.sharding import find_shardings
from tests.numerics.parallel.layouts import Layout, legal_layouts
from tests.numerics.tiny import CPU
from tests.pairwise import cover

EVERY = legal_layouts()
MOST_AN_ELEMENT = 2 + 4 + 4 + MOMENTS
PRECISIONS = (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32"))
CASES = [(EVERY[number], *each) for number in cover([layout.values for layout in EVERY]) for each in PRECISIONS]
COVERING = [CASES[number] for number in cover([(*layout.values, *each) for layout, *each in CASES])]


@contextmanager
def alone_as(rank: int, of: int) -> Iterator[None]:
    """Act as one rank of many. Collectives reach no other rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=of)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("layout", "precision", "gradients"), COVERING, ids=str)
def test_a_rank_of_each_stage_holds_what_is_forecast(layout: Layout, precision: Any, gradients: Any) -> None:
    training = replace(layout.spec.training, precision=precision, gradient_precision=gradients)
    spec, dims = replace(layout.spec, training=training), layout.spec.parallelism
    held, expected = stages(spec.model, spec.parallelism), bytes_of_stages(spec)
    for stage in range(dims.pp):
        rank = dims.world_size // dims.pp * stage
        with alone_as(rank, dims.world_size):
            engine = TorchNativeEngine(spec, RankPlace(rank, dims.world_size, CPU))
        assert parameters_of(engine) == held[stage]
        # Each parameter begins at a multiple of ALIGNMENT elements. Buckets that ranks share are padded to equal parts, which
        # are such multiples too.
        padded = ALIGNMENT * dims.world_size * (len(engine.flat_parameters.parameters) + 1)
        sharded_masters = precision == "fp32" and spec.parallelism.distributed_optimizer
        padding = padded * MOST_AN_ELEMENT + (engine.flat_parameters.weights.nbytes if sharded_masters else 0)
        assert expected[stage] <= allocated(engine) <= expected[stage] + padding


def parameters_of(engine: TorchNativeEngine) -> Parameters:
    """Return the parameters. Count tied ones once."""
    chunks = nn.ModuleList(engine.chunks)
    shardings = find_shardings(chunks)
    named = [(parameter.numel(), shardings[name].axis == "ep") for name, parameter in chunks.named_parameters()]
    return Parameters(
        sum(size for size, of_experts in named if not of_experts), sum(size for size, of_experts in named if of_experts)
    )


def allocated(engine: TorchNativeEngine) -> int:
    """Return the bytes of weights, gradients and masters, of which two may be one, and of moments, which the first step
    creates."""
    main = engine.flat_parameters
    storages = [tensor.untyped_storage() for tensor in (*main.parameters, main.gradients, main.weights)]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(held.values()) + MOMENTS * main.weights.numel()


DENSE = Model(num_layers=1, num_attention_heads=4, num_query_groups=2, kv_channels=32, ffn_hidden_size=96)
EXPERTS = replace(DENSE, num_moe_experts=8, moe_router_topk=4, moe_ffn_hidden_size=48, moe_aux_loss_coeff=1e-3)
CLAMPED: Any = "clamped_quick_gelu_glu"
MODELS = {
    "dense": DENSE,
    "clamped": replace(DENSE, activation=CLAMPED),
    "normed heads": replace(EXPERTS, qk_layernorm=True),
    "dropout": replace(DENSE, hidden_dropout=0.1),
    "dropout before experts": replace(EXPERTS, hidden_dropout=0.1),
    "shared expert": replace(EXPERTS, moe_shared_expert_ffn_hidden_size=32),
    "padded": replace(EXPERTS, moe_expert_capacity_factor=1.5, moe_pad_expert_input_to_capacity=True),
    "biases": replace(EXPERTS, add_bias_linear=True, add_qkv_bias=True, activation=CLAMPED),
}


class FusedNorm(torch.autograd.Function):
    """Keep what CUDA's kernel keeps: the input, and one number per token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True))
        ctx.save_for_backward(x, weight, scale)
        return (x * scale * weight).to(x.dtype)


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [
        *((name, "") for name in MODELS),
        ("dense", "core_attn"),
        ("clamped", "mlp"),
        ("biases", "moe_act"),
        ("normed heads", "moe"),
        ("dropout", "mlp"),
        ("shared expert", "shared_experts"),
    ],
)
def test_a_layer_keeps_what_is_forecast(name: str, recomputed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Any:
        return FusedNorm.apply(x, weight)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(pointwise, "rms_norm", rms_norm)
    monkeypatch.setattr(pointwise.Elementwise, "rms_norm", staticmethod(rms_norm))
    # This is CUDA's operation. Its mask has booleans.
    monkeypatch.setattr(nn.functional, "dropout", lambda x, share: torch.native_dropout(x, share, True)[0])
    model, training = MODELS[name], Training(precision="bf16", sequence_length=256)
    if recomputed:
        training = replace(training, recompute="selective", recompute_modules=(recomputed,))
    seen = kept_bytes(replace(model, num_layers=2), training) - kept_bytes(model, training)
    spec = RunSpec(model=model, training=training)
    parts = model.parts_of_layer(0)
    expected = sum(layer_bytes(spec, parts).values()) - sum(recomputed_bytes(spec, parts).values())
    assert 0.98 * seen < expected <= seen


def kept_bytes(model: Model, training: Training) -> int:
    """Return the bytes that a decoder keeps for its backward pass, without its parameters."""
    decoder = build_decoder(BuildContext(model, training), 1, torch.bfloat16, CPU)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # The results keep the graph alive while they are counted, and therefore all storages.
        results = decoder.decode(torch.randint(model.vocab_size, (1, training.sequence_length + 1)))
    total = sum(storage.nbytes() for storage in kept.values())
    del results
    return total
