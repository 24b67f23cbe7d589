"""Translate a RunSpec to Megatron-Core's own fields, as plain values. Pure, without torch: ``export`` prints them.

Names are those of megatron-core 0.16.1 and 0.19.2: TransformerConfig (and its base, ModelParallelConfig), GPTModel,
DistributedDataParallelConfig, OptimizerConfig. Precisions and activations are names, not objects. Other fields keep Megatron's
defaults. launch/support refuses settings that Megatron cannot express.
"""

from __future__ import annotations

from typing import Any, Literal

from launch.common.atomic_files import members
from launch.contract.spec import Model, Parallelism, RunSpec
from launch.megatron_config.graph_config import graph_settings

Layers = Literal["transformer_engine", "local"]
"""The library whose modules form the layers. ``local`` is Megatron-Core itself."""

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
LEAN_OPTIMIZER = {
    "use_precision_aware_optimizer": True,
    **{f"{moment}_dtype": PRECISIONS["bf16"] for moment in ("exp_avg", "exp_avg_sq")},
}
"""Fields of OptimizerConfig. By default ``store_param_remainders`` is on, and masters are in fp32."""
FP8_RECIPES = {"delayed": "delayed", "current": "tensorwise"}
CLAMP = 7.0
"""The limit of GPT-OSS's activation: openai/gpt-oss, gpt_oss/torch/model.py, ``swiglu``."""


def transformer_settings(spec: RunSpec, layers: Layers = "transformer_engine") -> dict[str, Any]:
    """Return fields of TransformerConfig."""
    model = spec.model
    return {
        **members(model, "num_layers", "hidden_size", "ffn_hidden_size"),
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_epsilon,
        "add_bias_linear": model.add_bias_linear,
        "gated_linear_unit": True,
        "hidden_dropout": model.hidden_dropout,
        "init_method_std": model.init_std,
        **_attention(model),
        **_activation(model),
        **(_experts(spec) if model.is_moe else {}),
        **_parallelism(spec.parallelism),
        **_precision(spec),
        **_recomputation(spec),
        **_fusions(spec, layers),
        **graph_settings(spec.cuda_graph, spec.megatron_core),
        "deterministic_mode": spec.training.deterministic,
        # Graphs require this. The eager baseline has it too, so that graphs are the only difference of a pair.
        "use_te_rng_tracker": layers == "transformer_engine",
    }


def model_settings(spec: RunSpec) -> dict[str, Any]:
    """Return arguments of GPTModel or MambaModel, and for YaRN also the fields that it reads from its configuration (``yarn_``)."""
    model = spec.model
    settings: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "max_sequence_length": spec.training.sequence_length,
        "share_embeddings_and_output_weights": model.tie_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": model.rotary_base,
    }
    if model.is_hybrid:
        # 0.19 calls the model HybridModel and the argument hybrid_layer_pattern. It still takes the names of 0.16.
        settings["hybrid_override_pattern"] = model.hybrid_override_pattern
    if model.rope_scaling == "llama3":
        settings |= {"rope_scaling": True, "rope_scaling_factor": model.rope_scaling_factor}
    return settings | (yarn_settings(model) if model.rope_scaling == "yarn" else {})


def yarn_settings(model: Model) -> dict[str, Any]:
    """Return the fields of YaRN.

    GPTModel reads them from its configuration, although the configuration's class lacks them (0.16.1 models/gpt/gpt_model.py).
    """
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": model.rope_scaling_factor,
        "yarn_original_max_position_embeddings": model.rope_original_max_position,
        "yarn_beta_fast": model.rope_beta_fast,
        "yarn_beta_slow": model.rope_beta_slow,
        # If both are None, queries and keys are scaled as in the paper.
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": model.rope_truncate,
    }


def data_parallel_settings(spec: RunSpec) -> dict[str, Any]:
    """Return fields of DistributedDataParallelConfig."""
    layout = spec.parallelism
    return {
        "grad_reduce_in_fp32": spec.training.gradient_precision == "fp32",
        "use_distributed_optimizer": layout.distributed_optimizer,
        **members(layout, "overlap_grad_reduce", "overlap_param_gather", "delay_wgrad_compute"),
        # Megatron-LM pairs these settings in this way.
        "align_param_gather": layout.overlap_param_gather and layout.vpp > 1,
        # The training loop checks every loss and norm. A check within a step cannot be captured.
        "check_for_nan_in_grad": False,
    }


def optimizer_settings(spec: RunSpec) -> dict[str, Any]:
    """Return fields of OptimizerConfig."""
    training = spec.training
    return {
        "optimizer": "adam",
        "lr": training.learning_rate,
        "min_lr": training.min_learning_rate,
        **members(training, "weight_decay", "adam_beta1", "adam_beta2"),
        "adam_eps": training.adam_epsilon,
        "clip_grad": training.clip_grad,
        "bf16": training.precision == "bf16",
        "params_dtype": PRECISIONS[training.precision],
        "use_distributed_optimizer": spec.parallelism.distributed_optimizer,
        "overlap_param_gather": spec.parallelism.overlap_param_gather,
        **(LEAN_OPTIMIZER if training.optimizer_precision == "lean" else {}),
    }


def _attention(model: Model) -> dict[str, Any]:
    return {
        **members(model, "num_attention_heads", "num_query_groups", "kv_channels", "qk_layernorm", "add_qkv_bias"),
        "attention_dropout": model.attention_dropout,
        "softmax_type": "learnable" if model.attention_sinks else "vanilla",
        # The number of visible positions before and after a token.
        "window_size": (model.window_size - 1, 0) if model.window_size else None,
        "window_attn_skip_freq": model.window_attn_skip_freq or None,
    }


def _activation(model: Model) -> dict[str, Any]:
    if model.activation == "swiglu":
        return {"activation_func": "silu"}
    return {"activation_func": "quick_gelu", "glu_linear_offset": 1.0, "activation_func_clamp_value": CLAMP}


def _experts(spec: RunSpec) -> dict[str, Any]:
    model = spec.model
    return {
        **members(model, "num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size"),
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_ffn_hidden_size or None,
        **members(model, "moe_router_topk", "moe_router_score_function"),
        "moe_router_pre_softmax": softmax_over_all_experts(model),
        "moe_router_dtype": "fp32",
        **members(model, "moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
        "moe_router_load_balancing_type": "aux_loss" if model.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff or None,
        **members(model, "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
        "moe_token_dispatcher_type": spec.parallelism.dispatcher,
    }


def softmax_over_all_experts(model: Model) -> bool:
    """Return whether weights come from a softmax over all experts and are not normalised over the chosen ones.

    With normalisation, the result equals a softmax over the chosen experts, which Megatron computes without ``pre_softmax``.
    """
    return model.moe_router_order == "softmax_then_topk" and not model.moe_router_normalize_topk


def parallel_sizes(layout: Parallelism) -> dict[str, int | None]:
    """Return the degrees of ``layout``, as TransformerConfig and ``initialize_model_parallel`` name them."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _parallelism(layout: Parallelism) -> dict[str, Any]:
    return {
        **parallel_sizes(layout),
        **members(layout, "sequence_parallel", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
        # Megatron-LM pairs these settings in this way. With pp=2 and virtual stages, each rank is both before and after the
        # other, so batched transfers would be mixed up.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "batch_p2p_sync": layout.batch_p2p_sync,
    }


def _precision(spec: RunSpec) -> dict[str, Any]:
    """Return the fields of precision.

    With ``fp8``, Transformer Engine's linear layers multiply activations and weights in e4m3 and gradients in e5m2. Parameters,
    attention, router, embedding and output layer keep their precision.
    """
    training = spec.training
    dtype = PRECISIONS[training.precision]
    fp8 = {} if training.fp8 == "none" else {"fp8": "hybrid", "fp8_recipe": FP8_RECIPES[training.fp8]}
    return {"bf16": training.precision == "bf16", "params_dtype": dtype, "pipeline_dtype": dtype, **fp8}


def _recomputation(spec: RunSpec) -> dict[str, Any]:
    granularity = None if spec.training.recompute == "none" else spec.training.recompute
    method, layers = ("uniform", 1) if granularity == "full" else (None, None)
    modules = {"recompute_modules": sorted(spec.training.recomputed)} if granularity == "selective" else {}
    return {
        "recompute_granularity": granularity,
        "recompute_method": method,
        "recompute_num_layers": layers,
        **modules,
    }


def _fusions(spec: RunSpec, layers: Layers) -> dict[str, Any]:
    """Return the fusions that Megatron's own recipes turn on. All of them need Transformer Engine."""
    model, training, on = spec.model, spec.training, layers == "transformer_engine"
    experts = {"moe_grouped_gemm": on, "moe_permute_fusion": on, "moe_router_fusion": on and training.moe_router_fusion}
    return {
        # The fused clamped_quick_gelu_glu copies a scalar from the host in each call, which cannot be captured.
        "bias_activation_fusion": on and model.activation == "swiglu",
        "bias_dropout_fusion": on and not model.add_bias_linear,
        "masked_softmax_fusion": on,
        # The fused kernel does not support YaRN's scale.
        "apply_rope_fusion": on and model.rope_scaling != "yarn",
        # The fused loss returns gradients in bfloat16, and Megatron-LM forbids it in deterministic mode.
        "cross_entropy_loss_fusion": on and training.precision == "bf16" and not training.deterministic,
        # Transformer Engine's fusion waits for the host. Later releases reject it because of its gradients (Megatron-LM pull
        # request 5115).
        "cross_entropy_fusion_impl": "native",
        "gradient_accumulation_fusion": on and training.gradient_accumulation_fusion,
        **(experts if model.is_moe else {}),
    }
