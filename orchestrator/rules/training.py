"""Training settings and data that cannot work, or after which nothing would be measured."""

from __future__ import annotations

from collections.abc import Mapping

from launch.contract.errors import DataError
from launch.contract.spec import RunSpec
from launch.data.fields import check_fields
from launch.megatron_config.determinism import ALLOW
from orchestrator.rules.bounds import ABOVE_ZERO, COUNT, POSITIVE, Interval, outside
from orchestrator.rules.rule import ANY, ARITHMETIC, BOTH, CONFIG, MCORE, MCORE_016, MEGATRON, Rule, divides

CAPTURE_STEPS, SETTLE_STEPS, LEAST_MEASURED_STEPS = 1, 2, 1

SIZES: Mapping[str, Interval] = {
    "steps": POSITIVE,
    "sequence_length": POSITIVE,
    "micro_batch_size": POSITIVE,
    "global_batch_size": POSITIVE,
    "learning_rate_warmup_steps": COUNT,
    "seed": COUNT,
}
FRACTION = Interval(0, 1)
RATES: Mapping[str, Interval] = {
    "learning_rate": ABOVE_ZERO,
    "min_learning_rate": COUNT,
    "weight_decay": COUNT,
    "adam_beta1": FRACTION,
    "adam_beta2": FRACTION,
    "adam_epsilon": ABOVE_ZERO,
    "clip_grad": COUNT,
}


def sizes_out_of_range(spec: RunSpec) -> str | None:
    """Steps, lengths and batches are positive."""
    return outside("training", spec.training, SIZES)


def rates_out_of_range(spec: RunSpec) -> str | None:
    """Rates are finite and in range: learning rate and epsilon above 0, betas from 0 to below 1, none negative."""
    return outside("training", spec.training, RATES)


def rising_schedule(spec: RunSpec) -> str | None:
    """The learning rate ends no higher than it peaks, and has peaked when training ends."""
    training = spec.training
    falls = training.min_learning_rate <= training.learning_rate
    if falls and training.learning_rate_warmup_steps <= max(training.steps, 0):
        return None
    return (
        f"training.learning_rate={training.learning_rate:g}, min_learning_rate={training.min_learning_rate:g}, "
        f"learning_rate_warmup_steps={training.learning_rate_warmup_steps}, steps={training.steps}"
    )


def batch_indivisible(spec: RunSpec) -> str | None:
    """micro_batch_size * dp divides the global batch."""
    training, dp = spec.training, spec.parallelism.dp
    if divides(training.micro_batch_size * dp, training.global_batch_size):
        return None
    return (
        f"training.global_batch_size={training.global_batch_size} with micro_batch_size={training.micro_batch_size} "
        f"and parallelism.dp={dp}"
    )


def offloading_with_others(spec: RunSpec) -> str | None:
    """CPU offloading goes neither with recomputation nor with pipeline stages."""
    training, pp = spec.training, spec.parallelism.pp
    if not training.cpu_offloading or (training.recompute == "none" and pp <= 1):
        return None
    return f"training.cpu_offloading=true with training.recompute={training.recompute} and parallelism.pp={pp}"


def nothing_measured(spec: RunSpec) -> str | None:
    """A run lasts beyond its warm-up, the capture and two steps to settle; its eager twin is measured over the same."""
    before = spec.cuda_graph.warmup_steps + CAPTURE_STEPS + SETTLE_STEPS
    if spec.training.steps >= before + LEAST_MEASURED_STEPS:
        return None
    return (
        f"training.steps={spec.training.steps}, but cuda_graph.warmup_steps={spec.cuda_graph.warmup_steps} + "
        f"{CAPTURE_STEPS} capture + {SETTLE_STEPS} to settle take {before}"
    )


def gradients_below_weights(spec: RunSpec) -> str | None:
    """Gradients are accumulated in bf16 only where the model computes in bf16."""
    training = spec.training
    if training.gradient_precision == "fp32" or training.precision == "bf16":
        return None
    return f"training.gradient_precision={training.gradient_precision} with training.precision={training.precision}"


def fp8_below_bf16(spec: RunSpec) -> str | None:
    """fp8 is of a model that computes in bf16."""
    training = spec.training
    if training.fp8 == "none" or training.precision == "bf16":
        return None
    return f"training.fp8={training.fp8} with training.precision={training.precision}"


def fp8_sizes(spec: RunSpec) -> str | None:
    """With fp8, tokens and widths that a rank multiplies in a layer are multiples of 16, and of 8 the tokens that it holds
    with sequence_parallel."""
    if spec.training.fp8 == "none":
        return None
    found = {name: size for name, (size, step) in _multiplied(spec).items() if size % step}
    return f"training.fp8={spec.training.fp8} with {', '.join(f'{n}={s}' for n, s in found.items())}" if found else None


def _multiplied(spec: RunSpec) -> dict[str, tuple[int, int]]:
    """Sizes of a rank's matrices in a layer, each with what it is to be a multiple of. An expert's tokens are padded."""
    model, layout, training = spec.model, spec.parallelism, spec.training
    tp, etp, cp = (max(degree, 1) for degree in (layout.tp, layout.etp, layout.cp))
    tokens = training.micro_batch_size * (training.sequence_length // cp)
    sizes = {
        "tokens": (tokens, 16),
        "hidden_size": (model.hidden_size, 16),
        "queries": (model.num_attention_heads * model.kv_channels // tp, 16),
        "queries, keys and values": (
            (model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels // tp,
            16,
        ),
    }
    if layout.sequence_parallel:
        sizes["tokens over tp"] = (tokens // tp, 8)
    if model.has_dense_layers:
        sizes["ffn_hidden_size over tp"] = (model.ffn_hidden_size // tp, 16)
    if model.is_moe:
        sizes["moe_ffn_hidden_size over etp"] = (model.moe_ffn_hidden_size // etp, 16)
        sizes["moe_shared_expert_ffn_hidden_size over tp"] = (model.moe_shared_expert_ffn_hidden_size // tp, 16)
    return sizes


def nondeterministic_kernels(spec: RunSpec) -> str | None:
    """Deterministic training allows no kernels of Transformer Engine's that add in no fixed order."""
    allowed = spec.environment.get(ALLOW, "0")
    if not spec.training.deterministic or allowed == "0":
        return None
    return f"training.deterministic=true with environment.{ALLOW}={allowed}"


def data_does_not_fit(spec: RunSpec) -> str | None:
    """The data section's fields belong to its kind, and its tokens to the vocabulary: text without a tokenizer is bytes,
    which need 256; packed documents need an end-of-document token."""
    try:
        check_fields(spec.data, spec.model.vocab_size)
    except DataError as error:
        return str(error)
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        "training.sizes", BOTH, ANY, sizes_out_of_range,
        remedy="Correct the fields named.",
        source=ARITHMETIC,
    ),
    Rule(
        "training.rates", BOTH, ANY, rates_out_of_range,
        remedy="Correct the fields named, or leave them out for their defaults.",
        source="launch/contract/spec.py Training; torch.optim.AdamW's own checks",
    ),
    Rule(
        "training.schedule", BOTH, ANY, rising_schedule,
        remedy="Lower min_learning_rate to learning_rate or less and learning_rate_warmup_steps to steps or fewer.",
        source=ARITHMETIC,
    ),
    Rule(
        "training.batch", BOTH, ANY, batch_indivisible,
        remedy="Make global_batch_size a multiple of micro_batch_size * dp.",
        source=f"{MCORE}num_microbatches_calculator.py:341",
    ),
    Rule(
        "training.offloading", MEGATRON, MCORE_016, offloading_with_others,
        remedy="Set training.cpu_offloading to false, or training.recompute to none and parallelism.pp to 1.",
        source=f"{CONFIG}:1144, :1149",
    ),
    Rule(
        "training.window", BOTH, ANY, nothing_measured,
        remedy="Raise training.steps (100 beyond the capture give a sound comparison), or lower "
        "cuda_graph.warmup_steps.",
        source="docs/rules.md, Measured steps",
    ),
    Rule(
        "training.gradient_precision", BOTH, ANY, gradients_below_weights,
        remedy="Set training.gradient_precision to fp32, or training.precision to bf16.",
        source="Megatron-LM's --accumulate-allreduce-grads-in-fp32, which is on for bf16 by default",
    ),
    Rule(
        "training.fp8_precision", MEGATRON, MCORE_016, fp8_below_bf16,
        remedy="Set training.precision to bf16, or training.fp8 to none.",
        source="megatron-bridge 0.3.1 training/mixed_precision.py, which has fp8 beside 16 bits alone",
    ),
    Rule(
        "training.fp8_sizes", MEGATRON, MCORE_016, fp8_sizes,
        remedy="Round the sizes named up to multiples of 16, or set training.fp8 to none.",
        source="transformer_engine 2.11 pytorch/utils.py:443; cuBLASLt, leading dimensions of 8-bit matrices in 16 bytes",
    ),
    Rule(
        "training.deterministic_kernels", MEGATRON, MCORE_016, nondeterministic_kernels,
        remedy=f"Set environment.{ALLOW} to \"0\" or leave it out, or training.deterministic to false.",
        source=f"{MCORE}extensions/transformer_engine.py:1254",
    ),
    Rule(
        "training.data", BOTH, ANY, data_does_not_fit,
        remedy="Mend the data section as the message says.",
        source="launch/data/fields.py",
    ),
)  # fmt: skip
