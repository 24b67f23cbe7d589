"""Megatron's names of fields that have the same values as in a recipe. Pure, without torch.

``export`` prints flags by this table, ``init`` reads flags by it, and messages about recipes translate names by it. The names
are those of Megatron-LM's flags, most of which equal the names of TransformerConfig's fields.
"""

from __future__ import annotations

from collections.abc import Mapping

TRAINING_FLAGS: Mapping[str, str] = {
    "seq_length": "training.sequence_length",
    "micro_batch_size": "training.micro_batch_size",
    "global_batch_size": "training.global_batch_size",
    "train_iters": "training.steps",
    "overlap_grad_reduce": "parallelism.overlap_grad_reduce",
    "lr_decay_style": "training.learning_rate_schedule",
    "lr_warmup_iters": "training.learning_rate_warmup_steps",
    "seed": "training.seed",
}
"""Flags of the training loop. Megatron-Core has no fields for them."""
DEPRECATED: Mapping[str, tuple[str, str]] = {
    "enable_cuda_graph": ("cuda_graph.impl", "local"),
    "external_cuda_graph": ("cuda_graph.impl", "transformer_engine"),
}
"""Switches of releases before 0.16, with the field and the value that they mean."""
_SAME_NAME: Mapping[str, tuple[str, ...]] = {
    "training": (
        "weight_decay", "adam_beta1", "adam_beta2", "clip_grad", "recompute_modules", "moe_router_fusion",
    ),
    "model": (
        "num_layers", "hybrid_override_pattern", "hidden_size", "ffn_hidden_size", "num_attention_heads",
        "num_query_groups", "kv_channels", "norm_epsilon", "qk_layernorm", "add_qkv_bias", "rotary_base",
        "rope_scaling_factor", "window_attn_skip_freq", "attention_dropout", "hidden_dropout", "num_moe_experts",
        "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function",
        "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_aux_loss_coeff", "moe_z_loss_coeff",
        "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
    ),
    "parallelism": (
        "sequence_parallel", "overlap_param_gather", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
        "batch_p2p_sync",
    ),
}  # fmt: skip
"""Fields that have one name in Megatron and in a recipe, by section of the recipe."""
FIELDS: Mapping[str, str] = {
    **TRAINING_FLAGS,
    **{name: f"{section}.{name}" for section, names in _SAME_NAME.items() for name in names},
    "lr": "training.learning_rate",
    "min_lr": "training.min_learning_rate",
    "adam_eps": "training.adam_epsilon",
    "deterministic_mode": "training.deterministic",
    "recompute_granularity": "training.recompute",
    "hybrid_layer_pattern": "model.hybrid_override_pattern",
    "padded_vocab_size": "model.vocab_size",
    "layernorm_epsilon": "model.norm_epsilon",
    "init_method_std": "model.init_std",
    "num_experts": "model.num_moe_experts",
    "moe_shared_expert_intermediate_size": "model.moe_shared_expert_ffn_hidden_size",
    "moe_token_dispatcher_type": "parallelism.dispatcher",
    "tensor_model_parallel_size": "parallelism.tp",
    "pipeline_model_parallel_size": "parallelism.pp",
    "context_parallel_size": "parallelism.cp",
    "expert_model_parallel_size": "parallelism.ep",
    "expert_tensor_parallel_size": "parallelism.etp",
    "num_virtual_stages_per_pipeline_rank": "parallelism.vpp",
    "virtual_pipeline_model_parallel_size": "parallelism.vpp",
    "use_distributed_optimizer": "parallelism.distributed_optimizer",
    "cuda_graph_impl": "cuda_graph.impl",
    "cuda_graph_scope": "cuda_graph.scope",
    "cuda_graph_modules": "cuda_graph.scope",
    "cuda_graph_warmup_steps": "cuda_graph.warmup_steps",
    "cuda_graph_num_warmup_steps": "cuda_graph.warmup_steps",
    "optimizer_cuda_graph": "cuda_graph.optimizer",
}
