"""Models that cannot be built."""

from __future__ import annotations

from collections.abc import Mapping

from launch.contract.spec import RunSpec
from orchestrator.rules.bounds import ABOVE_ZERO, COUNT, POSITIVE, Interval, outside
from orchestrator.rules.rule import ANY, ARITHMETIC, BOTH, CONFIG, MCORE, Rule, divides

SIZES: Mapping[str, Interval] = {
    "num_layers": POSITIVE,
    "hidden_size": POSITIVE,
    "num_attention_heads": POSITIVE,
    "num_query_groups": POSITIVE,
    "kv_channels": POSITIVE,
    "vocab_size": POSITIVE,
    "moe_layer_freq": POSITIVE,
    "num_moe_experts": COUNT,
    "moe_shared_expert_ffn_hidden_size": COUNT,
    "window_size": COUNT,
    "window_attn_skip_freq": COUNT,
    "rope_original_max_position": COUNT,
}
DENSE_SIZES: Mapping[str, Interval] = {"ffn_hidden_size": POSITIVE}
EXPERT_SIZES: Mapping[str, Interval] = {"moe_ffn_hidden_size": POSITIVE, "moe_router_topk": POSITIVE}
COEFFICIENTS: Mapping[str, Interval] = {
    "norm_epsilon": ABOVE_ZERO,
    "init_std": ABOVE_ZERO,
    "rotary_base": ABOVE_ZERO,
    "rope_scaling_factor": ABOVE_ZERO,
    "rope_low_freq_factor": ABOVE_ZERO,
    "rope_high_freq_factor": ABOVE_ZERO,
    "rope_beta_fast": ABOVE_ZERO,
    "rope_beta_slow": ABOVE_ZERO,
    "moe_router_bias_update_rate": COUNT,
    "moe_aux_loss_coeff": COUNT,
    "moe_z_loss_coeff": COUNT,
}


def sizes_out_of_range(spec: RunSpec) -> str | None:
    """Sizes of the model are positive; what may be absent is 0 or more."""
    model = spec.model
    limits = dict(SIZES)
    if model.has_dense_layers:
        limits |= DENSE_SIZES
    if model.is_moe:
        limits |= EXPERT_SIZES
    return outside("model", model, limits)


def coefficients_out_of_range(spec: RunSpec) -> str | None:
    """Coefficients are finite: epsilon, initial deviation and rotary settings above 0, loss coefficients not below."""
    return outside("model", spec.model, COEFFICIENTS)


def heads_in_groups(spec: RunSpec) -> str | None:
    """Query groups divide the attention heads."""
    model = spec.model
    if divides(model.num_query_groups, model.num_attention_heads):
        return None
    return f"model.num_attention_heads={model.num_attention_heads}, model.num_query_groups={model.num_query_groups}"


def odd_kv_channels(spec: RunSpec) -> str | None:
    """Rotary positions turn pairs of channels: kv_channels is even."""
    return None if divides(2, spec.model.kv_channels) else f"model.kv_channels={spec.model.kv_channels}"


def more_chosen_than_experts(spec: RunSpec) -> str | None:
    """A token chooses among the experts there are."""
    model = spec.model
    if not model.is_moe or model.moe_router_topk <= model.num_moe_experts:
        return None
    return f"model.moe_router_topk={model.moe_router_topk}, model.num_moe_experts={model.num_moe_experts}"


def capacity_out_of_range(spec: RunSpec) -> str | None:
    """An expert's capacity factor, where there is one, is above 0."""
    if spec.model.moe_expert_capacity_factor is None:
        return None
    return outside("model", spec.model, {"moe_expert_capacity_factor": ABOVE_ZERO})


def padding_without_capacity(spec: RunSpec) -> str | None:
    """Padding to capacity needs a capacity factor."""
    model = spec.model
    if not model.moe_pad_expert_input_to_capacity or model.moe_expert_capacity_factor is not None:
        return None
    return "model.moe_pad_expert_input_to_capacity=true without model.moe_expert_capacity_factor"


def scaling_without_original_length(spec: RunSpec) -> str | None:
    """Scaled rotary positions (llama3, yarn) need the length the model was first trained at."""
    model = spec.model
    if model.rope_scaling == "none" or model.rope_original_max_position != 0:
        return None
    return f"model.rope_scaling={model.rope_scaling} with model.rope_original_max_position=0"


def scaling_without_range(spec: RunSpec) -> str | None:
    """Scaled rotary positions have a band between slow and fast pairs: high above low, beta_fast above beta_slow."""
    model = spec.model
    if model.rope_scaling == "llama3" and not model.rope_high_freq_factor > model.rope_low_freq_factor:
        return f"rope_high_freq_factor={model.rope_high_freq_factor}, rope_low_freq_factor={model.rope_low_freq_factor}"
    if model.rope_scaling == "yarn" and not (model.rope_beta_fast > model.rope_beta_slow and model.rotary_base > 1):
        return (
            f"rope_beta_fast={model.rope_beta_fast}, rope_beta_slow={model.rope_beta_slow}, "
            f"rotary_base={model.rotary_base}"
        )
    return None


def bias_without_sigmoid(spec: RunSpec) -> str | None:
    """The expert bias steers sigmoid scores, of experts."""
    model = spec.model
    if not model.moe_router_enable_expert_bias or (model.is_moe and model.moe_router_score_function == "sigmoid"):
        return None
    return (
        f"model.moe_router_enable_expert_bias=true with moe_router_score_function={model.moe_router_score_function} "
        f"and num_moe_experts={model.num_moe_experts}"
    )


def router_without_gradient(spec: RunSpec) -> str | None:
    """The weight of a token's only expert is not normalised: it would be 1 whatever the router says."""
    model = spec.model
    normalised = model.moe_router_normalize_topk or model.moe_router_order == "topk_then_softmax"
    if not model.is_moe or model.moe_router_topk != 1 or not normalised:
        return None
    return (
        f"model.moe_router_topk=1 with moe_router_normalize_topk={str(model.moe_router_normalize_topk).lower()} and "
        f"moe_router_order={model.moe_router_order}: the loss tells the router nothing"
    )


def sigmoid_after_topk(spec: RunSpec) -> str | None:
    """Sigmoid scores come before the choice: topk_then_softmax has none."""
    model = spec.model
    if model.moe_router_score_function != "sigmoid" or model.moe_router_order == "softmax_then_topk":
        return None
    return f"model.moe_router_score_function=sigmoid with moe_router_order={model.moe_router_order}"


RULES: tuple[Rule, ...] = (
    Rule(
        "model.sizes", BOTH, ANY, sizes_out_of_range,
        remedy="Correct the fields named, or start from a preset (model: {preset: tiny_moe}).",
        source=ARITHMETIC,
    ),
    Rule(
        "model.coefficients", BOTH, ANY, coefficients_out_of_range,
        remedy="Correct the fields named, or leave them out for their defaults.",
        source=ARITHMETIC,
    ),
    Rule(
        "model.query_groups", BOTH, ANY, heads_in_groups,
        remedy="Make num_attention_heads a multiple of num_query_groups.",
        source=ARITHMETIC,
    ),
    Rule(
        "model.kv_channels", BOTH, ANY, odd_kv_channels,
        remedy="Make kv_channels even.",
        source=ARITHMETIC,
    ),
    Rule(
        "model.topk", BOTH, ANY, more_chosen_than_experts,
        remedy="Set moe_router_topk to num_moe_experts or fewer.",
        source=ARITHMETIC,
    ),
    Rule(
        "model.capacity_factor", BOTH, ANY, capacity_out_of_range,
        remedy="Set moe_expert_capacity_factor above 0 (1.0 gives each expert its even share), or leave it out for "
        "dropless experts.",
        source=f"{CONFIG}:1109 (a negative factor is silently taken for none)",
    ),
    Rule(
        "model.padding", BOTH, ANY, padding_without_capacity,
        remedy="Set moe_expert_capacity_factor, or moe_pad_expert_input_to_capacity to false.",
        source=f"{CONFIG}:1131",
    ),
    Rule(
        "model.rope_scaling", BOTH, ANY, scaling_without_original_length,
        remedy="Set rope_original_max_position (8192 for Llama 3.1, 4096 for GPT-OSS), or rope_scaling to none.",
        source=ARITHMETIC,
    ),
    Rule(
        "model.rope_range", BOTH, ANY, scaling_without_range,
        remedy="Leave them out for their defaults (4 and 1 for llama3, 32 and 1 for yarn).",
        source="launch/engines/torch_native/layers/rotary.py",
    ),
    Rule(
        "model.expert_bias", BOTH, ANY, bias_without_sigmoid,
        remedy="Set moe_router_score_function to sigmoid in a model with experts, or moe_router_enable_expert_bias to "
        "false.",
        source=f"{CONFIG} (aux-loss-free routing supports the sigmoid score function only)",
    ),
    Rule(
        "model.router_gradient", BOTH, ANY, router_without_gradient,
        remedy="Set moe_router_normalize_topk to false and moe_router_order to softmax_then_topk.",
        source=f"{CONFIG}:1641; Switch Transformers, arXiv:2101.03961, section 2.1",
    ),
    Rule(
        "model.sigmoid", BOTH, ANY, sigmoid_after_topk,
        remedy="Set moe_router_order to softmax_then_topk, which is sigmoid_then_topk here.",
        source=f"{MCORE}transformer/moe/moe_utils.py topk_routing_with_score_function",
    ),
)  # fmt: skip
