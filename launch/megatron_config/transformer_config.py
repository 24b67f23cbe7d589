"""A RunSpec in Megatron-Core's own fields, as plain values. Pure, without torch: ``export`` prints them.

Names are those of megatron-core 0.16.1: TransformerConfig (and ModelParallelConfig, which it extends), GPTModel,
DistributedDataParallelConfig, OptimizerConfig. Precisions and activations are named, not imported. What is not here is
Megatron's default; what a spec asks for and Megatron cannot express, launch/support refuses.
"""

from __future__ import annotations

from typing import Any, Literal

from launch.contract.spec import Model, RunSpec
from launch.megatron_config.graph_config import Release, graph_settings

Layers = Literal["transformer_engine", "local"]
"""Whose modules layers are built of: Transformer Engine's, or Megatron-Core's own."""

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}
FP8_RECIPES = {"delayed": "delayed", "current": "tensorwise"}
CLAMP = 7.0
"""Of GPT-OSS's activation: openai/gpt-oss, gpt_oss/torch/model.py, ``swiglu``."""


def transformer_settings(
    spec: RunSpec, layers: Layers = "transformer_engine", release: Release = "0.16"
) -> dict[str, Any]:
    """Fields of TransformerConfig."""
    model = spec.model
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_epsilon,
        "add_bias_linear": model.add_bias_linear,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "init_method_std": model.init_std,
        **_attention(model),
        **_activation(model),
        **(_experts(spec) if model.is_moe else {}),
        **_parallelism(spec),
        **_precision(spec),
        **_recomputation(spec),
        **_fusions(spec, layers),
        **graph_settings(spec.cuda_graph, release),
        "deterministic_mode": spec.training.deterministic,
        # Graphs require it, and a pair is to differ in graphs alone.
        "use_te_rng_tracker": layers == "transformer_engine",
    }


def model_settings(spec: RunSpec) -> dict[str, Any]:
    """Arguments of GPTModel. With YaRN also fields that it reads from its configuration (``yarn_``)."""
    model = spec.model
    settings: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "max_sequence_length": spec.training.sequence_length,
        "share_embeddings_and_output_weights": model.tie_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": model.rotary_base,
    }
    if model.rope_scaling == "llama3":
        settings |= {"rope_scaling": True, "rope_scaling_factor": model.rope_scaling_factor}
    return settings | (yarn_settings(model) if model.rope_scaling == "yarn" else {})


def yarn_settings(model: Model) -> dict[str, Any]:
    """GPTModel reads them from its configuration, whose class does not have them (0.16.1 models/gpt/gpt_model.py)."""
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": model.rope_scaling_factor,
        "yarn_original_max_position_embeddings": model.rope_original_max_position,
        "yarn_beta_fast": model.rope_beta_fast,
        "yarn_beta_slow": model.rope_beta_slow,
        "yarn_mscale": None,  # none of both: queries and keys are scaled as in the paper
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": model.rope_truncate,
    }


def data_parallel_settings(spec: RunSpec) -> dict[str, Any]:
    """Fields of DistributedDataParallelConfig."""
    layout = spec.parallelism
    return {
        "grad_reduce_in_fp32": spec.training.gradient_precision == "fp32",
        "use_distributed_optimizer": layout.distributed_optimizer,
        "overlap_grad_reduce": layout.overlap_grad_reduce,
        "overlap_param_gather": layout.overlap_param_gather,
        "delay_wgrad_compute": layout.delay_wgrad_compute,
        # As Megatron-LM pairs them.
        "align_param_gather": layout.overlap_param_gather and layout.vpp > 1,
        # The loop looks at every loss and norm; a look within a step could not be captured.
        "check_for_nan_in_grad": False,
    }


def optimizer_settings(spec: RunSpec) -> dict[str, Any]:
    """Fields of OptimizerConfig."""
    training = spec.training
    return {
        "optimizer": "adam",
        "lr": training.learning_rate,
        "min_lr": training.min_learning_rate,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "adam_eps": training.adam_epsilon,
        "clip_grad": training.clip_grad,
        "bf16": training.precision == "bf16",
        "params_dtype": PRECISIONS[training.precision],
        "use_distributed_optimizer": spec.parallelism.distributed_optimizer,
        "overlap_param_gather": spec.parallelism.overlap_param_gather,
    }


def _attention(model: Model) -> dict[str, Any]:
    return {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "qk_layernorm": model.qk_layernorm,
        "add_qkv_bias": model.add_qkv_bias,
        "attention_dropout": 0.0,
        "softmax_type": "learnable" if model.attention_sinks else "vanilla",
        # Positions seen before a token's own, and after.
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
        "num_moe_experts": model.num_moe_experts,
        "moe_layer_freq": model.moe_layer_freq,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_ffn_hidden_size or None,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_pre_softmax": normalizes_over_all(model),
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": model.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": model.moe_router_bias_update_rate,
        "moe_router_load_balancing_type": "aux_loss" if model.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff or None,
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": model.moe_pad_expert_input_to_capacity,
        "moe_token_dispatcher_type": spec.parallelism.dispatcher,
    }


def normalizes_over_all(model: Model) -> bool:
    """Whether the chosen experts' weights are shares of all experts' softmax. A softmax over all that is then made to
    sum to 1 over the chosen is the softmax over the chosen, which is what Megatron computes without ``pre_softmax``."""
    return model.moe_router_order == "softmax_then_topk" and not model.moe_router_normalize_topk


def _parallelism(spec: RunSpec) -> dict[str, Any]:
    layout = spec.parallelism
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel,
        "overlap_moe_expert_parallel_comm": layout.overlap_moe_expert_parallel_comm,
        "delay_wgrad_compute": layout.delay_wgrad_compute,
        # As Megatron-LM pairs them. Batched transfers between virtual stages of two ranks would be mixed up: each is
        # the other's predecessor and successor.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
    }


def _precision(spec: RunSpec) -> dict[str, Any]:
    """With ``fp8`` activations and weights of Transformer Engine's linear layers are e4m3 where they are multiplied and
    gradients e5m2; parameters stay what they are, and attention, router, embedding and output layer too."""
    training = spec.training
    dtype = PRECISIONS[training.precision]
    in_8_bits = {} if training.fp8 == "none" else {"fp8": "hybrid", "fp8_recipe": FP8_RECIPES[training.fp8]}
    return {"bf16": training.precision == "bf16", "params_dtype": dtype, "pipeline_dtype": dtype, **in_8_bits}


def _recomputation(spec: RunSpec) -> dict[str, Any]:
    granularity = None if spec.training.recompute == "none" else spec.training.recompute
    by_layer = {"recompute_method": "uniform", "recompute_num_layers": 1} if granularity == "full" else {}
    modules = {"recompute_modules": ["core_attn"]} if granularity == "selective" else {}
    return {
        "recompute_granularity": granularity,
        "recompute_method": None,
        "recompute_num_layers": None,
        **by_layer,
        **modules,
    }


def _fusions(spec: RunSpec, layers: Layers) -> dict[str, Any]:
    """What Megatron's own recipes switch on with Transformer Engine; none of it runs without."""
    model, training, on = spec.model, spec.training, layers == "transformer_engine"
    return {
        # The other one copies a number from the host in each call, which no capture can hold.
        "bias_activation_fusion": on and model.activation == "swiglu",
        "bias_dropout_fusion": on and not model.add_bias_linear,
        "masked_softmax_fusion": on,
        # Its kernel takes no scale of YaRN's.
        "apply_rope_fusion": on and model.rope_scaling != "yarn",
        # It gives gradients in bfloat16, and Megatron-LM does not allow it in deterministic mode.
        "cross_entropy_loss_fusion": on and training.precision == "bf16" and not training.deterministic,
        # Transformer Engine's waits for the host, and its gradients have made later releases refuse it (Megatron-LM pull
        # request 5115).
        "cross_entropy_fusion_impl": "native",
        "gradient_accumulation_fusion": on and training.gradient_accumulation_fusion,
        **(_fused_experts(training.moe_router_fusion, on) if model.is_moe else {}),
    }


def _fused_experts(router: bool, on: bool) -> dict[str, bool]:
    return {"moe_grouped_gemm": on, "moe_permute_fusion": on, "moe_router_fusion": on and router}
