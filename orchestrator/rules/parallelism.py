"""Rules on layouts that no set of ranks can form. launch/support/layout.py has the rules on what must be divisible."""

from __future__ import annotations

from launch.support.rule import ALL_ENGINES, CONFIG, MCORE, MegatronRule, Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "layout.world",
        ("parallelism.tp", "parallelism.cp", "parallelism.pp", "parallelism.dp", "placement.nodes", "placement.ranks_per_node"),
        "tp * cp * pp * dp must equal nodes * gpus_per_node",
        lambda spec: spec.parallelism.world_size != spec.placement.nodes * spec.placement.ranks_per_node,
        fix="Choose tp * cp * pp * dp equal to resources.nodes * resources.gpus_per_node. If dp is left out, it is computed "
        "where possible.",
        source=f"{MCORE}parallel_state.py:738",
        engines=ALL_ENGINES,
    ),
    Rule(
        "layout.expert_parallel_dense", ("parallelism.ep", "parallelism.etp", "model.num_moe_experts"),
        "expert parallelism needs experts",
        lambda spec: not spec.model.is_moe and (spec.parallelism.ep > 1 or spec.parallelism.etp > 1),
        fix="Set parallelism.ep=1 and parallelism.etp=1.",
        source=f"{CONFIG}:1048",
    ),
    Rule(
        "layout.sequence_parallel", ("parallelism.sequence_parallel", "parallelism.tp"), "sequence_parallel needs tp above 1",
        lambda spec: spec.parallelism.sequence_parallel and spec.parallelism.tp <= 1,
        fix="Set parallelism.sequence_parallel=false, or parallelism.tp=2.",
        source=f"{MCORE}model_parallel_config.py:409",
    ),
    MegatronRule(
        "layout.moe_sequence_parallel", ("model.num_moe_experts", "parallelism.tp", "parallelism.sequence_parallel"),
        "a mixture of experts with tp above 1 needs sequence_parallel",
        lambda spec: spec.model.is_moe and spec.parallelism.tp > 1 and not spec.parallelism.sequence_parallel,
        fix="Set parallelism.sequence_parallel=true, or parallelism.tp=1.",
        source=f"{MCORE}transformer/moe/moe_layer.py:379",
    ),
    MegatronRule(
        "layout.biased_experts", ("model.add_bias_linear", "parallelism.etp"), "experts with biases cannot be split, so etp must be 1",
        lambda spec: spec.model.is_moe and spec.model.add_bias_linear and spec.parallelism.etp > 1,
        fix="Set parallelism.etp=1, or model.add_bias_linear=false (another model).",
        source=f"{CONFIG}:1588",
    ),
)  # fmt: skip
