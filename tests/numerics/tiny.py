"""Make small specs and run whole short trainings, for the tests of this folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from launch.contract.spec import CudaGraph, Data, Model, Parallelism, RunSpec, Training
from launch.engines.protocol import RankPlace, StepResult
from launch.engines.torch_native.decoder import Decoder, build_decoder
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.layers.pointwise import Elementwise, compiled
from launch.train.data_loader import batch, open_source
from tests.megatron_release import RELEASE

CPU = torch.device("cpu")

MOE = Model(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=4,
    ffn_hidden_size=24,
    vocab_size=31,
    qk_layernorm=True,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=8,
    init_std=0.2,
)
GPT_OSS = dataclasses.replace(
    MOE,
    num_layers=3,
    qk_layernorm=False,
    activation="clamped_quick_gelu_glu",
    add_bias_linear=True,
    rope_scaling="yarn",
    rope_scaling_factor=4.0,
    rope_original_max_position=64,
    rope_truncate=False,
    rotary_base=100.0,
    window_size=3,
    window_attn_skip_freq=2,
    attention_sinks=True,
    moe_router_order="topk_then_softmax",
    init_std=2.0,  # Make values large enough to reach the activation's clamps.
)
DENSE = dataclasses.replace(MOE, num_moe_experts=0, moe_router_topk=0, moe_ffn_hidden_size=0)


def make_decoder(
    model: Model,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    training: Training | None = None,
    eod_token: int | None = None,
) -> Decoder:
    """Return the whole decoder on one rank."""
    training = training or Training()
    elementwise = compiled() if training.compile == "elementwise" else Elementwise()
    return build_decoder(BuildContext(model, training, eod_token, elementwise), seed, dtype, device)


@contextmanager
def no_inductor() -> Iterator[None]:
    """Let Dynamo and AOTAutograd compile as usual, but run PyTorch's own kernels instead of Inductor's.

    The C++ compiler needs more than a CPU second for each kernel.
    """
    from torch._dynamo.backends.debugging import aot_eager

    with patch("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: aot_eager(graph, inputs)):
        yield


def make_spec(model: Model = MOE, dp: int = 1, graph: CudaGraph | None = None, **training: Any) -> RunSpec:
    settings = {"steps": 4, "sequence_length": 8, "global_batch_size": 4, "learning_rate": 1e-2}
    return RunSpec(
        megatron_core=RELEASE,
        model=model,
        parallelism=Parallelism(dp=dp),
        training=Training(**settings | training),
        data=Data(kind="synthetic"),
        cuda_graph=graph or CudaGraph(),
    )


def batches(spec: RunSpec, rank: int = 0) -> Iterator[torch.Tensor]:
    """Yield the batch of each step: int64 of shape (micro-batches, micro-batch size, sequence + 1)."""
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    for step in range(spec.training.steps):
        yield batch(source, spec, step, rank)


def train(engine: TorchNativeEngine, spec: RunSpec, rank: int = 0) -> list[StepResult]:
    return [engine.step(tokens) for tokens in batches(spec, rank)]


def train_rank(spec: RunSpec) -> dict[str, Any]:
    """Train on one of dp ranks in float64. Return losses and gradient norms of shape (steps,), and the final
    weights.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    engine = TorchNativeEngine(spec, RankPlace(rank, spec.parallelism.dp, CPU), torch.float64)
    results = train(engine, spec, rank)
    return {
        "loss": torch.stack([result.loss for result in results]),
        "grad_norm": torch.stack([result.grad_norm for result in results]),
        "weights": dict(engine.chunks[0].state_dict()),
    }


def logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits: int64 of shape (batch, sequence) -> (batch, sequence, vocabulary)."""
    # ``decode`` omits the last token of its inputs, so append that token once more.
    logits: torch.Tensor = decoder.head(decoder.decode(torch.cat((tokens, tokens[:, -1:]), dim=1))[0])
    return logits
