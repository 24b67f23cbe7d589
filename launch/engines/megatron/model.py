"""This rank's part of Megatron-Core's GPTModel for a spec, or of its hybrid model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

from launch.contract.spec import RunSpec
from launch.megatron_config.transformer_config import Layers, model_settings, transformer_settings

APEX_KERNEL = "fused_weight_gradient_mlp_cuda"
"""The package that accumulates weight gradients in Megatron-Core's own linear layers. Transformer Engine's layers need none."""
ACTIVATIONS = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu}


@dataclass
class Configuration(TransformerConfig):  # type: ignore[misc]  # Megatron-Core brings no types
    """TransformerConfig with YaRN's fields, which GPTModel also reads from it."""

    yarn_rotary_scaling_factor: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    yarn_correction_range_round_to_int: bool = True


def has_apex_kernel() -> bool:
    return find_spec(APEX_KERNEL) is not None


def make_config(spec: RunSpec, layers: Layers, device: torch.device) -> Configuration:
    """Return Megatron-Core's configuration. It leaves weights uninitialized, because init/weight_map.py draws them."""
    fields: dict[str, Any] = transformer_settings(spec, layers)
    fields["gradient_accumulation_fusion"] &= has_apex_kernel()
    fields |= {name: value for name, value in model_settings(spec).items() if name.startswith("yarn_")}
    return Configuration(
        **fields
        | {name: getattr(torch, fields[name]) for name in ("params_dtype", "pipeline_dtype")}
        | {"activation_func": ACTIVATIONS[fields["activation_func"]]},
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
    )


def build_chunk(spec: RunSpec, config: Configuration, layers: Layers, stage: int | None) -> Any:
    """Build this rank's virtual stage ``stage``, None without virtual stages. Its weights are uninitialized."""
    arguments = {name: value for name, value in model_settings(spec).items() if not name.startswith("yarn_")}
    if spec.model.is_hybrid:
        # These modules need Transformer Engine when they are imported.
        from megatron.core.models.mamba import MambaModel
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

        return MambaModel(config, mamba_stack_spec, **arguments)
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(
            config, layers == "transformer_engine", normalization=config.normalization, vp_stage=stage
        ),
        **arguments,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
    )


def fuse_gradient_accumulation(config: Configuration, chunks: Iterable[Any]) -> None:
    """Enable fused gradient accumulation in Transformer Engine's modules, which do not need Apex's kernel.

    0.16.1 has one setting for these modules and for the output layer, which does need the kernel. It reads the setting again
    when it captures local graphs (transformer/cuda_graphs.py:725).
    """
    config.gradient_accumulation_fusion = True
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
