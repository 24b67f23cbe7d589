"""Rules on models that cannot be built."""

from __future__ import annotations

from launch.contract.mamba_sizes import WIDTH_MULTIPLE
from launch.contract.spec import LAYER_LETTERS, RunSpec
from launch.support.rule import ARITHMETIC, CONFIG, MCORE, Rule, divides


def _missing_sizes(spec: RunSpec) -> list[str]:
    dense = ("ffn_hidden_size",) if spec.model.has_dense_layers else ()
    experts = ("moe_ffn_hidden_size", "moe_router_topk") if spec.model.is_moe else ()
    return [f"model.{name}" for name in (*dense, *experts) if getattr(spec.model, name) < 1]


def _wrong_pattern(spec: RunSpec) -> bool:
    pattern = spec.model.hybrid_override_pattern
    return bool(pattern) and (
        len(pattern) != spec.model.num_layers or not set(pattern) <= LAYER_LETTERS.keys() or "M" not in pattern
    )


def _empty_rope_range(spec: RunSpec) -> list[str]:
    model, fields = spec.model, []
    if model.rope_scaling == "llama3" and not model.rope_high_freq_factor > model.rope_low_freq_factor:
        fields = ["rope_high_freq_factor", "rope_low_freq_factor"]
    if model.rope_scaling == "yarn" and not (model.rope_beta_fast > model.rope_beta_slow and model.rotary_base > 1):
        fields = ["rope_beta_fast", "rope_beta_slow", "rotary_base"]
    return [f"model.{name}" for name in fields]


def _router_without_gradient(spec: RunSpec) -> bool:
    model = spec.model
    normalized = model.moe_router_normalize_topk or model.moe_router_order == "topk_then_softmax"
    return model.is_moe and model.moe_router_topk == 1 and normalized


RULES: tuple[Rule, ...] = (
    Rule(
        "model.sizes", (), "dense layers need ffn_hidden_size, and layers with experts need moe_ffn_hidden_size and "
        "moe_router_topk",
        _missing_sizes,
        fix="Set the named fields to 1 or more.",
        source=ARITHMETIC,
    ),
    Rule(
        "model.hybrid_override_pattern", ("model.hybrid_override_pattern", "model.num_layers"),
        "a hybrid model needs one letter for each layer: M (Mamba-2), * (attention) or - (MLP), with at least one M",
        _wrong_pattern,
        fix="Write num_layers of these letters, or leave the pattern out. Run other layers by engine: command.",
        source="megatron-core 0.16.1 ssm/mamba_hybrid_layer_allocation.py:84",
    ),
    Rule(
        "model.mamba_width", ("model.hybrid_override_pattern", "model.hidden_size"),
        f"the groups of a Mamba-2 layer need a hidden_size that {WIDTH_MULTIPLE} divides",
        lambda spec: "M" in spec.model.hybrid_override_pattern and not divides(WIDTH_MULTIPLE, spec.model.hidden_size),
        fix=f"Make hidden_size a multiple of {WIDTH_MULTIPLE}.",
        source=f"{MCORE}ssm/mamba_mixer.py:230",
    ),
    Rule(
        "model.query_groups", ("model.num_attention_heads", "model.num_query_groups"),
        "num_query_groups must divide num_attention_heads",
        lambda spec: not divides(spec.model.num_query_groups, spec.model.num_attention_heads),
        fix="Make num_attention_heads a multiple of num_query_groups.",
        source=ARITHMETIC,
    ),
    Rule(
        "model.topk", ("model.moe_router_topk", "model.num_moe_experts"), "a token cannot choose more experts than there are",
        lambda spec: spec.model.is_moe and spec.model.moe_router_topk > spec.model.num_moe_experts,
        fix="Set moe_router_topk to num_moe_experts or fewer.",
        source=ARITHMETIC,
    ),
    Rule(
        "model.padding", ("model.moe_pad_expert_input_to_capacity", "model.moe_expert_capacity_factor"),
        "padding to capacity needs a capacity factor",
        lambda spec: spec.model.moe_pad_expert_input_to_capacity and spec.model.moe_expert_capacity_factor is None,
        fix="Set model.moe_pad_expert_input_to_capacity=false, or model.moe_expert_capacity_factor=1.0.",
        source=f"{CONFIG}:1131",
    ),
    Rule(
        "model.rope_scaling", ("model.rope_scaling", "model.rope_original_max_position"),
        "scaled rotary embeddings (llama3, yarn) need the original sequence length of the model",
        lambda spec: spec.model.rope_scaling != "none" and spec.model.rope_original_max_position == 0,
        fix="Set model.rope_original_max_position (8192 for Llama 3.1, 4096 for GPT-OSS), or model.rope_scaling=none.",
        source=ARITHMETIC,
    ),
    Rule(
        "model.rope_range", (),
        "llama3 needs rope_high_freq_factor above rope_low_freq_factor, and yarn needs rope_beta_fast above rope_beta_slow and "
        "rotary_base above 1",
        _empty_rope_range,
        fix="Leave these fields out for their defaults (4 and 1 for llama3, 32 and 1 for yarn).",
        source="launch/engines/torch_native/layers/rotary.py",
    ),
    Rule(
        "model.expert_bias",
        ("model.moe_router_enable_expert_bias", "model.moe_router_score_function", "model.num_moe_experts"),
        "the expert bias needs experts with sigmoid scores",
        lambda spec: spec.model.moe_router_enable_expert_bias
        and not (spec.model.is_moe and spec.model.moe_router_score_function == "sigmoid"),
        fix="Set model.moe_router_enable_expert_bias=false, or model.moe_router_score_function=sigmoid.",
        source=f"{CONFIG} (aux-loss-free routing supports the sigmoid score function only)",
    ),
    Rule(
        "model.router_gradient", ("model.moe_router_topk", "model.moe_router_normalize_topk", "model.moe_router_order"),
        "the normalised weight of a single expert is always 1, so the router would get no gradient",
        _router_without_gradient,
        fix="Set model.moe_router_normalize_topk=false and model.moe_router_order=softmax_then_topk.",
        source=f"{CONFIG}:1641; Switch Transformers, arXiv:2101.03961, section 2.1",
    ),
    Rule(
        "model.sigmoid", ("model.moe_router_score_function", "model.moe_router_order"),
        "sigmoid scores need a router that computes scores before it chooses experts",
        lambda spec: spec.model.moe_router_score_function == "sigmoid"
        and spec.model.moe_router_order != "softmax_then_topk",
        fix="Set model.moe_router_order=softmax_then_topk: with sigmoid scores it means sigmoid, then top-k.",
        source=f"{MCORE}transformer/moe/moe_utils.py topk_routing_with_score_function",
    ),
)  # fmt: skip
