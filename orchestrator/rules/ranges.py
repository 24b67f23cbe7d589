"""Rules on the ranges of single numbers: one row for each range, with the fields that it bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from launch.contract.spec import RunSpec
from launch.support.rule import ARITHMETIC, Rule, field_value


@dataclass(frozen=True)
class Interval:
    """From ``low`` to ``high``, without ``high``, and without ``low`` where ``low_open``. NaN is outside."""

    low: float
    high: float = math.inf
    low_open: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value < self.high and not (self.low_open and value == self.low)

    def __str__(self) -> str:
        start = f"{'above' if self.low_open else 'at least'} {self.low:g}"
        return start if self.high == math.inf else f"{start} and below {self.high:g}"


POSITIVE = Interval(1)
COUNT = Interval(0)
ABOVE_ZERO = Interval(0, low_open=True)
FRACTION = Interval(0, 1)
_FIX = "Correct the fields named, or leave them out for their defaults."
_NAMES: Mapping[Interval, Mapping[str, str]] = {
    POSITIVE: {
        "model": "num_layers hidden_size num_attention_heads num_query_groups kv_channels vocab_size moe_layer_freq "
        "ffn_hidden_size moe_ffn_hidden_size moe_router_topk",
        "parallelism": "tp pp vpp ep etp cp dp",
        "placement": "nodes ranks_per_node threads_per_rank",
        "training": "steps sequence_length micro_batch_size global_batch_size",
    },
    COUNT: {
        "model": "num_moe_experts moe_shared_expert_ffn_hidden_size window_size window_attn_skip_freq "
        "rope_original_max_position moe_router_bias_update_rate moe_aux_loss_coeff moe_z_loss_coeff",
        "training": "learning_rate_warmup_steps seed min_learning_rate weight_decay clip_grad",
    },
    ABOVE_ZERO: {
        "model": "norm_epsilon init_std rotary_base rope_scaling_factor rope_low_freq_factor rope_high_freq_factor "
        "rope_beta_fast rope_beta_slow",
        "training": "learning_rate adam_epsilon",
    },
    FRACTION: {"training": "adam_beta1 adam_beta2"},
}
FIELDS: Mapping[Interval, tuple[str, ...]] = {
    interval: tuple(f"{section}.{name}" for section, names in sections.items() for name in names.split())
    for interval, sections in _NAMES.items()
}


def _outside(interval: Interval, spec: RunSpec) -> list[str]:
    unused = set() if spec.model.has_dense_layers else {"model.ffn_hidden_size"}
    if not spec.model.is_moe:
        unused |= {"model.moe_ffn_hidden_size", "model.moe_router_topk"}
    fields = (field for field in FIELDS[interval] if field not in unused)
    return [field for field in fields if field_value(spec, field) not in interval]


RULES: tuple[Rule, ...] = (
    Rule(
        "range.positive", (), "sizes, counts and parallel degrees must be 1 or more", partial(_outside, POSITIVE),
        fix=f"{_FIX} Without dp, it follows from the resources.",
        source=ARITHMETIC,
    ),
    Rule(
        "range.not_negative", (), "sizes of optional parts, seeds and the weights of loss terms must be finite and 0 or more",
        partial(_outside, COUNT),
        fix=_FIX,
        source=ARITHMETIC,
    ),
    Rule(
        "range.above_zero", (), "learning rates, epsilons and rotary settings must be finite and above 0",
        partial(_outside, ABOVE_ZERO),
        fix=_FIX,
        source=f"{ARITHMETIC}; torch.optim.AdamW's own checks",
    ),
    Rule(
        "range.fraction", (), "betas must be from 0 to below 1", partial(_outside, FRACTION),
        fix=_FIX,
        source="torch.optim.AdamW's own checks",
    ),
)  # fmt: skip
