"""Compare the decoder with transformers' own Llama 3, Qwen3-MoE and GPT-OSS, from the same checkpoint.

The tests compare logits, loss and every gradient. transformers saves its gradients as if they were weights, and the
decoder reads them as weights. So the comparison needs no second table of names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from launch.checkpoints.config_check import ROTARY_DEFAULTS, YARN_DEFAULTS
from launch.contract.errors import CheckpointError
from launch.contract.spec import Model
from launch.engines.torch_native.decoder import Decoder
from launch.engines.torch_native.init.load_checkpoint import load_weights, unpack_mxfp4
from launch.engines.torch_native.layers.build_context import BuildContext
from tests.numerics.tiny import CPU, logits, make_decoder

# Importing transformers takes two seconds, and every process of pytest-xdist collects this file. So functions import
# it.
if TYPE_CHECKING:
    from transformers import GptOssForCausalLM, LlamaForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"vocab_size": 61, "rms_norm_eps": 1e-5}
BASE = Model(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    vocab_size=61,
    norm_epsilon=1e-5,
)

LLAMA = replace(
    BASE,
    ffn_hidden_size=48,
    rotary_base=500.0,
    rope_scaling="llama3",
    rope_scaling_factor=8.0,
    rope_original_max_position=32,
    rope_low_freq_factor=1.0,
    rope_high_freq_factor=4.0,
)
LLAMA_ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
EXPERTS = replace(BASE, num_moe_experts=6, moe_router_topk=2, moe_ffn_hidden_size=32)
QWEN3_MOE = replace(EXPERTS, qk_layernorm=True, rotary_base=1e4)
GPT_OSS = replace(
    EXPERTS,
    activation="clamped_quick_gelu_glu",
    add_qkv_bias=True,
    add_bias_linear=True,
    rotary_base=150.0,
    rope_scaling="yarn",
    rope_scaling_factor=4.0,
    rope_original_max_position=144,  # The ramp runs from channel 0.5 to 2.5 of 4. Truncating them would show.
    rope_beta_fast=12.0,
    rope_beta_slow=1.0,
    rope_truncate=False,
    window_size=5,
    window_attn_skip_freq=2,
    attention_sinks=True,
    moe_router_order="topk_then_softmax",
)
GPT_OSS_ROTARY = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 4.0,
    "original_max_position_embeddings": 144,
    "beta_fast": 12.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def llama(dtype: torch.dtype = torch.float32, **settings: Any) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _from_config(
        LlamaForCausalLM, LlamaConfig(**SIZES, intermediate_size=48, rope_parameters=LLAMA_ROTARY, **settings), dtype
    )


def qwen3_moe(dtype: torch.dtype, **settings: Any) -> Qwen3MoeForCausalLM:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    rotary = {"rope_type": "default", "rope_theta": 1e4}
    return _from_config(
        Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **experts, rope_parameters=rotary, **settings), dtype
    )


def gpt_oss(dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32}
    return _from_config(
        GptOssForCausalLM, GptOssConfig(**SIZES, **experts, sliding_window=5, rope_parameters=GPT_OSS_ROTARY), dtype
    )


def _from_config(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build a model that uses plain formulas instead of kernels. Draw all its weights, including those that begin as
    zeros or ones."""
    theirs = kind._from_config(config, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    generator = torch.Generator().manual_seed(11)
    for name, parameter in theirs.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        # Make sinks and biases large enough to matter, and products of experts large enough for GPT-OSS to clamp some.
        deviation = 0.8 if parameter.dim() == 3 else 0.3
        parameter.data = (float("norm" in name) + deviation * noise).to(parameter.dtype)
    return theirs


class Doubled(TorchFunctionMode):
    """Use float64 wherever transformers requests float32: it computes norms, rotations and softmax in float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(self._raised, args), **{key: self._raised(item) for key, item in (kwargs or {}).items()})

    def _raised(self, value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value


def computing_in(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Let models of transformers that are built and run inside the block compute only in ``dtype``."""
    return Doubled() if dtype == torch.float64 else nullcontext()


Make = Callable[[torch.dtype], "PreTrainedModel"]
PAIRS: dict[str, tuple[Model, Make]] = {
    "llama3": (LLAMA, llama),
    "llama3, tied": (replace(LLAMA, tie_embeddings=True), lambda dtype: llama(dtype, tie_word_embeddings=True)),
    "qwen3_moe, normalised": (QWEN3_MOE, lambda dtype: qwen3_moe(dtype, norm_topk_prob=True)),
    "qwen3_moe, not normalised": (
        replace(QWEN3_MOE, moe_router_normalize_topk=False),
        lambda dtype: qwen3_moe(dtype, norm_topk_prob=False),
    ),
    "gpt_oss": (GPT_OSS, gpt_oss),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4}
"""Shares of a tensor's largest number. The largest observed differences are 2e-14 and 2e-5."""


def assert_near(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= TOLERANCES[found.dtype], f"{name}: {error:.1e} of its largest number"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("model", "make"), PAIRS.values(), ids=PAIRS.keys())
def test_logits_loss_and_every_gradient_are_those_of_transformers(
    model: Model, make: Make, dtype: torch.dtype, tmp_path: Path
) -> None:
    tokens = torch.randint(model.vocab_size, (3, 41), generator=torch.Generator().manual_seed(5))
    with computing_in(dtype):
        theirs = make(dtype)
        theirs.save_pretrained(tmp_path / "weights")
        output = theirs(tokens, labels=tokens)
        output.loss.backward()
    decoder = make_decoder(replace(model, weights=str(tmp_path / "weights")), 1, dtype, CPU)
    loss = decoder(tokens).cross_entropy
    gradients = torch.autograd.grad(loss, list(decoder.parameters()))

    assert_near(logits(decoder, tokens[:, :-1]), output.logits[:, :-1], "logits")
    assert_near(loss, output.loss, "loss")
    expected = gradients_of(theirs, model, dtype, tmp_path / "gradients")
    for (name, wanted), gradient in zip(expected.named_parameters(), gradients, strict=True):
        assert_near(gradient, wanted, name)


def gradients_of(theirs: PreTrainedModel, model: Model, dtype: torch.dtype, folder: Path) -> Decoder:
    """Return a decoder whose parameters are the gradients of ``theirs``."""
    for parameter in theirs.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    theirs.save_pretrained(folder)
    return make_decoder(replace(model, weights=str(folder)), 1, dtype, CPU)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_in_shards_fills_the_decoder_in_its_own_precision(tmp_path: Path) -> None:
    theirs = llama()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    decoder = Decoder(BuildContext(LLAMA)).bfloat16()
    load_weights(decoder, BuildContext(replace(LLAMA, weights=str(tmp_path))))
    attention, mlp = theirs.model.layers[3].self_attn, theirs.model.layers[3].mlp
    qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    exactly = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(decoder.layers["3"].attention.qkv.weight.data, qkv.data.bfloat16(), **exactly)
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    torch.testing.assert_close(decoder.layers["3"].mlp.gate_up.weight.data, gate_up.data.bfloat16(), **exactly)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged"):
        load_weights(Decoder(BuildContext(LLAMA)), BuildContext(replace(LLAMA, weights=str(tmp_path))))


def test_a_model_with_another_rotary_base_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model = replace(LLAMA, rotary_base=10000.0, weights=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"model.rotary_base=10000.0, but config.json says rope_theta=500.0"):
        load_weights(Decoder(BuildContext(model)), BuildContext(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39], ids=["nan", "inf", "-inf", "1e39"])
@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.experts.4.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"]
)
def test_weights_that_are_not_finite_are_refused_by_name(name: str, value: float, tmp_path: Path) -> None:
    """1e39 is finite in the float64 of the file, but not in the float32 of the decoder."""
    theirs = qwen3_moe(torch.float32)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name].double()
    tensors[name][-1, -1] = value
    save_file(tensors, file)
    model = replace(QWEN3_MOE, weights=str(file))
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=rf"infinite numbers, read in float32, in {name}; copy or download it again"
    ):
        load_weights(Decoder(BuildContext(model)), BuildContext(model))


def test_a_scale_of_mxfp4_that_is_no_number_is_refused(tmp_path: Path) -> None:
    theirs = gpt_oss()
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.full((experts, outputs, inputs // 32, 16), 0x11, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 127, dtype=torch.uint8)
    tensors["model.layers.3.mlp.experts.down_proj_scales"][5, 0, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    model = replace(GPT_OSS, weights=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"in model\.layers\.3\.mlp\.experts\.down_proj_blocks, .*_scales; copy"):
        load_weights(Decoder(BuildContext(model)), BuildContext(model))


def test_gpt_oss_has_the_rotary_positions_of_transformers_where_its_configuration_has_none() -> None:
    from transformers import GptOssConfig

    assert GptOssConfig().rope_parameters == {**YARN_DEFAULTS, **ROTARY_DEFAULTS["gpt_oss"], "rope_theta": 150000.0}


def test_mxfp4_is_unpacked_as_transformers_does() -> None:
    """The test covers every byte at every scale that is a number (255 is none). float32 represents each result exactly."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    torch.testing.assert_close(unpack_mxfp4(blocks, scales).transpose(1, 2), expected, rtol=0, atol=0)


def test_packed_experts_fill_the_decoder_as_their_unpacked_twin_does(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    gpt_oss().save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    packed = copy.copy(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = plain[name].shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del packed[name]
    decoders = [Decoder(BuildContext(GPT_OSS)), Decoder(BuildContext(GPT_OSS))]
    for decoder, tensors, file in zip(decoders, (plain, packed), ("plain", "packed"), strict=True):
        path = tmp_path / f"{file}.safetensors"
        save_file(tensors, path)
        load_weights(decoder, BuildContext(replace(GPT_OSS, weights=str(path))))
    torch.testing.assert_close(decoders[0].state_dict(), decoders[1].state_dict(), rtol=0, atol=0)
