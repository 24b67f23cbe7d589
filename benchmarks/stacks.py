"""The stacks of layers that models.py trains, with a training step of the engine and one of transformers.

A stack is eight layers of a published model. The vocabulary is cut to 32,768, so that the layers dominate and not the output
layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import yaml

from launch.contract.spec import Data, Model, Placement, RunSpec, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import build
from launch.engines.torch_native.optim.adamw import Optimizer
from launch.engines.torch_native.optim.flat_parameters import FlatParameters

PRESETS = Path(__file__).resolve().parent.parent / "recipes" / "models"
STACKS = {"llama": "llama3_8b", "qwen": "qwen3_30b_a3b"}

TINY = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16,
    "ffn_hidden_size": 128, "vocab_size": 512,
}  # fmt: skip
TINY_MOE = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}

Step = Callable[[torch.Tensor], torch.Tensor]
"""Take one optimizer step over a batch, as ``Engine.step`` takes it. Return the mean cross-entropy."""


def stack(preset: str, device: torch.device, tiny: bool) -> RunSpec:
    model = Model(**yaml.safe_load((PRESETS / f"{preset}.yaml").read_text()))
    sizes: dict[str, Any] = {"num_layers": 8, "vocab_size": 32_768}
    if tiny:
        sizes = TINY | (TINY_MOE if model.is_moe else {})
    # Leave out the router's losses, because those of transformers cost more than the engine's.
    return RunSpec(
        model=dataclasses.replace(model, **sizes, moe_aux_loss_coeff=0.0),
        training=Training(
            sequence_length=32 if tiny else 2048, micro_batch_size=2, global_batch_size=4, precision="bf16",
            learning_rate=1e-5, learning_rate_schedule="constant",
        ),
        data=Data(kind="synthetic"),
        placement=Placement(device="cuda" if device.type == "cuda" else "cpu"),
    )  # fmt: skip


def our_step(spec: RunSpec, device: torch.device) -> Step:
    engine = build(spec, RankPlace(0, 1, device))
    return lambda batch: engine.step(batch).loss


def their_step(spec: RunSpec, device: torch.device, compiled: bool = False, experts: str = "grouped_mm") -> Step:
    """Return the engine's own step around a model of transformers."""
    module = their_model(spec, device, experts)
    main = FlatParameters(module)
    optimizer = Optimizer(main, spec.training)
    forward = torch.compile(module, dynamic=False) if compiled else module
    numbers = count()

    def step(batch: torch.Tensor) -> torch.Tensor:
        share = 1.0 / len(batch)
        total = torch.zeros((), device=device)
        for tokens in batch:
            logits = forward(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            with main.accumulate_gradients(share):
                torch.autograd.grad(loss, main.parameters)
            total.add_(loss.detach(), alpha=share)
        optimizer.set_rate(next(numbers))
        optimizer.update()
        return total

    return step


def their_model(spec: RunSpec, device: torch.device, experts: str) -> torch.nn.Module:
    import transformers

    model = spec.model
    sizes: dict[str, Any] = {
        "vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups, "head_dim": model.kv_channels,
        "rms_norm_eps": model.norm_epsilon, "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "max_position_embeddings": spec.training.sequence_length,
    }  # fmt: skip
    implementation = {"attn_implementation": "sdpa", "dtype": torch.bfloat16}
    config: Any = transformers.LlamaConfig(**sizes)
    if model.is_moe:
        implementation["experts_implementation"] = experts
        config = transformers.Qwen3MoeConfig(
            **sizes,
            num_experts=model.num_moe_experts,
            num_experts_per_tok=model.moe_router_topk,
            moe_intermediate_size=model.moe_ffn_hidden_size,
            norm_topk_prob=model.moe_router_normalize_topk,
        )
    torch.manual_seed(spec.training.seed)
    with device:
        auto: Any = transformers.AutoModelForCausalLM  # This class has no annotations.
        module: torch.nn.Module = auto.from_config(config, **implementation)
    return module
