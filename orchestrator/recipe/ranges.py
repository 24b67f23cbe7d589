"""The allowed ranges of a recipe's numbers, field by field. Rules check relations between fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """The numbers from ``low`` (excluded if ``low_open``) to ``high`` (always excluded). NaN is outside."""

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
_NAMES: Mapping[Interval, Mapping[str, str]] = {
    POSITIVE: {
        "model": "num_layers hidden_size num_attention_heads num_query_groups kv_channels vocab_size moe_layer_freq",
        "parallelism": "tp pp vpp ep etp cp dp",
        "training": "steps sequence_length micro_batch_size global_batch_size",
        "data": "max_documents",
    },
    COUNT: {
        "model": "ffn_hidden_size num_moe_experts moe_ffn_hidden_size moe_router_topk moe_shared_expert_ffn_hidden_size "
        "window_size window_attn_skip_freq rope_original_max_position moe_router_bias_update_rate moe_aux_loss_coeff "
        "moe_z_loss_coeff",
        "training": "learning_rate_warmup_steps seed min_learning_rate weight_decay clip_grad",
        "cuda_graph": "warmup_steps",
        "fault": "step",
        "equivalence": "loss grad_norm",
    },
    ABOVE_ZERO: {
        "model": "norm_epsilon init_std rotary_base rope_scaling_factor rope_low_freq_factor rope_high_freq_factor "
        "rope_beta_fast rope_beta_slow moe_expert_capacity_factor",
        "training": "learning_rate adam_epsilon",
    },
    FRACTION: {"model": "attention_dropout hidden_dropout", "training": "adam_beta1 adam_beta2"},
}


def ranges_of(section: str) -> dict[str, Interval]:
    """Return the range of each bounded field of a ``section``."""
    return {name: interval for interval, names in _NAMES.items() for name in names.get(section, "").split()}
