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
FIELDS: Mapping[str, str] = {
    **TRAINING_FLAGS,
    "lr": "training.learning_rate",
    "min_lr": "training.min_learning_rate",
    "weight_decay": "training.weight_decay",
    "adam_beta1": "training.adam_beta1",
    "adam_beta2": "training.adam_beta2",
    "adam_eps": "training.adam_epsilon",
    "clip_grad": "training.clip_grad",
    "deterministic_mode": "training.deterministic",
    "recompute_granularity": "training.recompute",
    "recompute_modules": "training.recompute_modules",
    "moe_router_fusion": "training.moe_router_fusion",
    "num_layers": "model.num_layers",
    "hybrid_override_pattern": "model.hybrid_override_pattern",
    "hybrid_layer_pattern": "model.hybrid_override_pattern",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "num_query_groups": "model.num_query_groups",
    "kv_channels": "model.kv_channels",
    "padded_vocab_size": "model.vocab_size",
    "norm_epsilon": "model.norm_epsilon",
    "layernorm_epsilon": "model.norm_epsilon",
    "init_method_std": "model.init_std",
    "qk_layernorm": "model.qk_layernorm",
    "add_qkv_bias": "model.add_qkv_bias",
    "rotary_base": "model.rotary_base",
    "rope_scaling_factor": "model.rope_scaling_factor",
    "window_attn_skip_freq": "model.window_attn_skip_freq",
    "attention_dropout": "model.attention_dropout",
    "hidden_dropout": "model.hidden_dropout",
    "num_experts": "model.num_moe_experts",
    "num_moe_experts": "model.num_moe_experts",
    "moe_layer_freq": "model.moe_layer_freq",
    "moe_ffn_hidden_size": "model.moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "model.moe_shared_expert_ffn_hidden_size",
    "moe_router_topk": "model.moe_router_topk",
    "moe_router_score_function": "model.moe_router_score_function",
    "moe_router_enable_expert_bias": "model.moe_router_enable_expert_bias",
    "moe_router_bias_update_rate": "model.moe_router_bias_update_rate",
    "moe_aux_loss_coeff": "model.moe_aux_loss_coeff",
    "moe_z_loss_coeff": "model.moe_z_loss_coeff",
    "moe_expert_capacity_factor": "model.moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity": "model.moe_pad_expert_input_to_capacity",
    "moe_token_dispatcher_type": "parallelism.dispatcher",
    "tensor_model_parallel_size": "parallelism.tp",
    "pipeline_model_parallel_size": "parallelism.pp",
    "context_parallel_size": "parallelism.cp",
    "expert_model_parallel_size": "parallelism.ep",
    "expert_tensor_parallel_size": "parallelism.etp",
    "num_virtual_stages_per_pipeline_rank": "parallelism.vpp",
    "virtual_pipeline_model_parallel_size": "parallelism.vpp",
    "sequence_parallel": "parallelism.sequence_parallel",
    "use_distributed_optimizer": "parallelism.distributed_optimizer",
    "overlap_param_gather": "parallelism.overlap_param_gather",
    "overlap_moe_expert_parallel_comm": "parallelism.overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute": "parallelism.delay_wgrad_compute",
    "batch_p2p_sync": "parallelism.batch_p2p_sync",
    "cuda_graph_impl": "cuda_graph.impl",
    "cuda_graph_scope": "cuda_graph.scope",
    "cuda_graph_modules": "cuda_graph.scope",
    "cuda_graph_warmup_steps": "cuda_graph.warmup_steps",
    "cuda_graph_num_warmup_steps": "cuda_graph.warmup_steps",
    "optimizer_cuda_graph": "cuda_graph.optimizer",
}
