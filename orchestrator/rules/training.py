"""Rules on training settings that cannot work, or with which nothing would be measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from launch.contract.records.events import SETTLE_STEPS
from launch.contract.spec import Model, RunSpec
from launch.megatron_config.determinism import ALLOW
from launch.support.rule import ALL_ENGINES, ARITHMETIC, CONFIG, MCORE, MegatronRule, Rule

LARGEST_LEAN_BETA = 0.996
"""Numbers of 8 significant bits are at most 2**-8 apart, relative to the larger one. A smaller step from it rounds back."""


RECOMPUTABLE: Mapping[str, Callable[[Model], bool]] = {
    "core_attn": lambda model: True,
    "layernorm": lambda model: True,
    "mlp": lambda model: model.has_dense_layers,
    "moe": lambda model: model.is_moe,
    "moe_act": lambda model: model.is_moe,
    "shared_experts": lambda model: model.moe_shared_expert_ffn_hidden_size != 0,
}
"""The modules that can be recomputed, by name, each with a test of whether a model has it."""
WITHIN_EXPERTS = {"moe_act", "shared_experts"}


def _misnamed_modules(spec: RunSpec) -> bool:
    names = spec.training.recompute_modules
    twice = len(set(names)) < len(names) or ("moe" in names and not WITHIN_EXPERTS.isdisjoint(names))
    return twice or not RECOMPUTABLE.keys() >= set(names)


def _misaligned_fp8_sizes(spec: RunSpec) -> list[str]:
    """Return the fields that give a layer matrices which fp8 kernels cannot multiply. Tokens of experts are padded."""
    model, layout, training = spec.model, spec.parallelism, spec.training
    if training.fp8 == "none":
        return []
    tp, etp, cp = (max(degree, 1) for degree in (layout.tp, layout.etp, layout.cp))
    tokens = training.micro_batch_size * (training.sequence_length // cp)
    queries = model.num_attention_heads * model.kv_channels
    keys_and_values = 2 * model.num_query_groups * model.kv_channels
    batch = ("training.micro_batch_size", "training.sequence_length", "parallelism.cp")
    heads = ("model.num_attention_heads", "model.kv_channels", "parallelism.tp")
    # Each size has its factor and the fields from which it is computed.
    sizes = [
        (tokens, 16, batch),
        (model.hidden_size, 16, ("model.hidden_size",)),
        (queries // tp, 16, heads),
        ((queries + keys_and_values) // tp, 16, (*heads, "model.num_query_groups")),
    ]
    if layout.sequence_parallel:
        sizes.append((tokens // tp, 8, (*batch, "parallelism.tp")))
    if model.has_dense_layers:
        sizes.append((model.ffn_hidden_size // tp, 16, ("model.ffn_hidden_size", "parallelism.tp")))
    if model.is_moe:
        shared = model.moe_shared_expert_ffn_hidden_size // tp
        sizes.append((model.moe_ffn_hidden_size // etp, 16, ("model.moe_ffn_hidden_size", "parallelism.etp")))
        sizes.append((shared, 16, ("model.moe_shared_expert_ffn_hidden_size", "parallelism.tp")))
    misaligned = [field for size, factor, fields in sizes if size % factor for field in fields]
    return ["training.fp8", *dict.fromkeys(misaligned)] if misaligned else []


RULES: tuple[Rule, ...] = (
    Rule(
        "training.schedule",
        ("training.learning_rate", "training.min_learning_rate", "training.learning_rate_warmup_steps", "training.steps"),
        "the learning rate must reach its peak within training, and its minimum cannot exceed its peak",
        lambda spec: not spec.training.min_learning_rate <= spec.training.learning_rate
        or spec.training.learning_rate_warmup_steps > spec.training.steps,
        fix="Lower min_learning_rate to learning_rate or less and learning_rate_warmup_steps to steps or fewer.",
        source=ARITHMETIC,
    ),
    Rule(
        "training.recompute_modules", ("training.recompute", "training.recompute_modules"),
        "modules are recomputed only with recompute=selective",
        lambda spec: bool(spec.training.recompute_modules) and spec.training.recompute != "selective",
        fix="Set training.recompute=selective, or training.recompute_modules=[].",
        source=f"{CONFIG}:1196 (accepted, without effect)",
    ),
    Rule(
        "training.recompute_names", ("training.recompute_modules",),
        f"the modules are {', '.join(RECOMPUTABLE)}, each at most once, and moe already contains "
        f"{' and '.join(sorted(WITHIN_EXPERTS))}",
        _misnamed_modules,
        fix="Set training.recompute_modules=[], or training.recompute_modules=[core_attn], or training.recompute_modules=[moe].",
        source=f"{CONFIG}:1196",
    ),
    Rule(
        "training.recompute_absent",
        ("training.recompute_modules", "model.num_moe_experts", "model.moe_layer_freq", "model.moe_shared_expert_ffn_hidden_size"),
        "recomputing a module that the model lacks saves nothing (mlp needs dense layers, moe and moe_act need experts)",
        lambda spec: any(not RECOMPUTABLE[name](spec.model) for name in spec.training.recomputed & RECOMPUTABLE.keys()),
        fix="Set training.recompute_modules=[], or name modules that the model has.",
        source=f"{MCORE}transformer/transformer_layer.py:445, transformer/moe/moe_layer.py:294 (accepted, without effect)",
    ),
    MegatronRule(
        "training.recompute_fp8", ("training.fp8", "training.recompute_modules"),
        "fp8=delayed does not support recomputation of moe_act or layernorm",
        lambda spec: spec.training.fp8 == "delayed" and not spec.training.recomputed.isdisjoint({"layernorm", "moe_act"}),
        fix="Set training.fp8=current, or training.fp8=none, or training.recompute_modules=[].",
        source=f"{CONFIG}:1243",
    ),
    Rule(
        "training.window", ("training.steps", "cuda_graph.warmup_steps"),
        f"a run needs a measured step after its warm-up, 1 step of capture and {SETTLE_STEPS} to settle",
        lambda spec: spec.training.steps <= spec.first_measured,
        fix=f"Raise training.steps to cuda_graph.warmup_steps + {SETTLE_STEPS + 2} or more (EQUIVALENT needs 100 steps after the "
        "capture).",
        source="docs/rules.md, Measured steps",
        engines=ALL_ENGINES,
    ),
    Rule(
        "training.gradient_precision", ("training.gradient_precision", "training.precision"),
        "only a bf16 model accumulates gradients in bf16",
        lambda spec: spec.training.gradient_precision != "fp32" and spec.training.precision != "bf16",
        fix="Set training.gradient_precision=fp32, or training.precision=bf16.",
        source="Megatron-LM's --accumulate-allreduce-grads-in-fp32, which is on for bf16 by default",
    ),
    Rule(
        "training.optimizer_precision", ("training.optimizer_precision", "training.precision"),
        "lean stores the bits of fp32 masters that bf16 weights lack, so the weights must be bf16",
        lambda spec: spec.training.optimizer_precision == "lean" and spec.training.precision != "bf16",
        fix="Set training.optimizer_precision=fp32, or training.precision=bf16.",
        source="transformer_engine 2.11 pytorch/optimizers/fused_adam.py (store_param_remainders)",
    ),
    Rule(
        "training.lean_moments", ("training.optimizer_precision", "training.adam_beta1", "training.adam_beta2"),
        f"a bf16 moment times a beta above {LARGEST_LEAN_BETA} may round back to the same value, so it would never decay",
        lambda spec: spec.training.optimizer_precision == "lean"
        and max(spec.training.adam_beta1, spec.training.adam_beta2) > LARGEST_LEAN_BETA,
        fix=f"Set training.optimizer_precision=fp32, or lower both betas to {LARGEST_LEAN_BETA} or less.",
        source=ARITHMETIC,
    ),
    Rule(
        "training.fp8_precision", ("training.fp8", "training.precision"), "fp8 needs a model that computes in bf16",
        lambda spec: spec.training.fp8 != "none" and spec.training.precision != "bf16",
        fix="Set training.precision=bf16, or training.fp8=none.",
        source="megatron-bridge 0.3.1 training/mixed_precision.py, which combines fp8 only with 16-bit precisions",
    ),
    Rule(
        "training.fp8_weight_caching", ("training.fp8_weight_caching", "training.fp8"), "without fp8 no weight is cast to 8 bits",
        lambda spec: not spec.training.fp8_weight_caching and spec.training.fp8 == "none",
        fix="Set training.fp8_weight_caching=true, or training.fp8=delayed, or training.fp8=current.",
        source=ARITHMETIC,
    ),
    Rule(
        "training.fp8_sizes", (),
        "fp8 needs tokens and widths that are multiples of 16 on each rank, and with sequence_parallel tokens that are "
        "multiples of 8 after the split",
        _misaligned_fp8_sizes,
        fix="Set training.fp8=none, or round the sizes up to such multiples.",
        source="transformer_engine 2.11 pytorch/utils.py:443; cuBLASLt, leading dimensions of 8-bit matrices in 16 bytes",
    ),
    MegatronRule(
        "training.deterministic_kernels", ("training.deterministic", f"environment.{ALLOW}"),
        "deterministic training excludes Transformer Engine kernels that add numbers in a varying order",
        lambda spec: spec.training.deterministic and spec.environment.get(ALLOW, "0") != "0",
        fix=f"Set environment.{ALLOW} to \"0\" or leave it out, or set training.deterministic=false.",
        source=f"{MCORE}extensions/transformer_engine.py:1254",
    ),
)  # fmt: skip
