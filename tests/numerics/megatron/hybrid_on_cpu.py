"""Build Megatron-Core's hybrid models without a GPU: its stack, layers and mixer, with another scan.

mamba-ssm and causal-conv1d do not run on a CPU. A simple function of the same arguments replaces the scan, so nothing here tests
the scan itself. Megatron-Core's own linear layers and norms replace Transformer Engine's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from launch.engines.megatron.init import weight_map

OWN_NORM = {"norm.weight": ("mamba.input_norm.weight", "whole")}
"""The norm of a Mamba layer, which Transformer Engine puts into the first linear layer."""


class GatedNorm(nn.Module):
    """The norm of ``mamba_ssm``, without a gate."""

    def __init__(self, size: int, eps: float = 1e-5, dtype: torch.dtype | None = None, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def scan(
    projected: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, step_bias: torch.Tensor, decay: torch.Tensor,
    headdim: int, **named: Any,
) -> torch.Tensor:  # fmt: skip
    """Return something that depends on every argument and on earlier tokens: (batch, sequence, inner width)."""
    inner = projected.shape[-1] - len(weight) - len(decay)
    gate, mixed, steps = projected.split([inner, len(weight), len(decay)], -1)
    mixed = mixed * weight.sum(-1) + bias
    sizes = nn.functional.softplus(steps + step_bias) * decay * named["D"]
    out = nn.functional.silu(gate) * mixed[..., :inner].cumsum(1) * sizes.repeat_interleave(headdim, -1)
    result: torch.Tensor = out + mixed.mean()
    return result.to(projected.dtype)


def module(name: str, **content: Any) -> dict[str, ModuleType]:
    made = ModuleType(name)
    made.__path__ = []
    vars(made).update(content)
    return {name: made}


def rearrange(x: torch.Tensor, pattern: str) -> torch.Tensor:
    """Do what ``einops`` does for the two patterns of a training step."""
    return x.squeeze(1) if pattern == "d 1 w -> d w" else x.transpose(0, 1)


ABSENT = {
    **module("mamba_ssm"), **module("mamba_ssm.ops"), **module("mamba_ssm.ops.triton"),
    **module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GatedNorm),
    **module("mamba_ssm.ops.triton.ssd_combined", mamba_split_conv1d_scan_combined=scan, mamba_chunk_scan_combined=scan),
    **module("mamba_ssm.ops.triton.selective_state_update", selective_state_update=None),
    **module("causal_conv1d", causal_conv1d_fn=None, causal_conv1d_update=None),
    **module("causal_conv1d.causal_conv1d_varlen", causal_conv1d_varlen_states=None),
    **module("einops", rearrange=rearrange, repeat=None),
    **module("megatron.core.inference.contexts.attention_context.triton.tensor_ops", tensor_get_slice_after=None,
             tensor_masked_update=None, tensor_merge=None),
}  # fmt: skip
"""Packages that only GPU hosts have, and the module of Megatron-Core that imports triton for inference."""
ANEW = ("megatron.core.ssm", "megatron.core.models.mamba", "megatron.core.models.hybrid")


@contextmanager
def hybrid_models() -> Iterator[None]:
    """Import Megatron-Core's hybrid models anew, with these packages in place of absent ones."""
    before = {name: sys.modules.pop(name) for name in _replaced()}
    sys.modules.update(ABSENT)
    try:
        sys.modules.update(module("megatron.core.models.mamba.mamba_layer_specs", mamba_stack_spec=_stack()))
        with (
            mock.patch.dict(weight_map.LAYER_PARAMETERS, OWN_NORM),
            mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        ):
            yield
    finally:
        for name in _replaced():
            del sys.modules[name]
        sys.modules.update(before)


def _replaced() -> list[str]:
    return [name for name in sys.modules if name.startswith(ANEW) or name in ABSENT]


def _stack() -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    # The stack's class moved in 0.19, and its module makes the final norm.
    stack = getattr(mamba_block, "MambaStack", None) or mamba_block.HybridStack
    parts = getattr(mamba_block, "MambaStackSubmodules", None) or mamba_block.HybridStackSubmodules
    vars(sys.modules[stack.__module__])["TENorm"] = WrappedTorchNorm
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    causal = {"attn_mask_type": AttnMaskType.causal}
    of_mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm, mixer=ModuleSpec(MambaMixer, submodules=mixer), mamba_bda=get_bias_dropout_add
    )
    of_attention = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(SelfAttention, params=causal, submodules=attention),
        self_attn_bda=get_bias_dropout_add,
    )
    of_mlp = TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=get_bias_dropout_add)
    return ModuleSpec(
        stack,
        submodules=parts(
            mamba_layer=ModuleSpec(MambaLayer, submodules=of_mamba),
            attention_layer=ModuleSpec(TransformerLayer, submodules=of_attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=of_mlp),
        ),
    )
