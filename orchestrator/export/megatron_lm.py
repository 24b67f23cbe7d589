"""Print a cell as command-line flags of Megatron-LM (``pretrain_gpt.py``). Pure.

The flags are those of core_v0.16.1. Most have the names of TransformerConfig's fields (megatron/training/argument_utils.py,
ArgumentGroupFactory); the others are in megatron/training/arguments.py. tests/golden/megatron_lm_flags.json lists those used
here. The main branch spells graph settings differently.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from launch.contract.spec import RunSpec
from launch.megatron_config.field_names import TRAINING_FLAGS
from launch.megatron_config.graph_config import optimizer_graph_settings
from launch.megatron_config.transformer_config import model_settings, optimizer_settings, transformer_settings
from launch.support.rule import field_value
from orchestrator.export.megatron_flags import spell_flag

FLAG_NAMES = {
    "fp8": "fp8_format",
    "layernorm_epsilon": "norm_epsilon",
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "use_te_rng_tracker": "te_rng_tracker",
}
"""Fields whose flags have another name."""
SWITCHED_OFF = {
    "add_bias_linear": "disable_bias_linear",
    "bias_dropout_fusion": "no_bias_dropout_fusion",
    "apply_rope_fusion": "no_rope_fusion",
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
}
"""Fields that are on by default, and the flags that turn them off."""
WITHOUT_FLAG = {
    "num_query_groups", "gated_linear_unit", "activation_func", "params_dtype", "pipeline_dtype", "overlap_p2p_comm",
    "batch_p2p_comm", "batch_p2p_sync", "bias_activation_fusion", "masked_softmax_fusion",
}  # fmt: skip
"""Fields that follow from other flags, or whose values are Megatron-LM's defaults."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def render(spec: RunSpec) -> tuple[str, tuple[str, ...]]:
    """Return the flags, one per line of a shell command, and notes on what they do not express."""
    flags = [*_model_flags(spec), *_training_flags(spec), *_data_flags(spec)]
    return " \\\n".join(shlex.join(flag) for flag in flags), tuple(_notes(spec))


def _model_flags(spec: RunSpec) -> Iterator[tuple[str, ...]]:
    model, settings = spec.model, transformer_settings(spec)
    yield from _flags({name: value for name, value in settings.items() if name not in WITHOUT_FLAG})
    if model.num_query_groups != model.num_attention_heads:
        yield from _flags({"group_query_attention": True, "num_query_groups": model.num_query_groups})
    yield ("--swiglu",) if model.activation == "swiglu" else ("--quick-geglu",)
    if not settings["bias_activation_fusion"]:
        yield ("--no-bias-gelu-fusion",)
    if settings["cuda_graph_impl"] == "local" and spec.parallelism.ep > 1 and spec.megatron_core == "0.16":
        # Only inference uses it, but every run must set it (core_v0.16.1 megatron/training/arguments.py:1158).
        yield ("--moe-pad-experts-for-cuda-graph-inference",)
    given = model_settings(spec)
    yield from _flags(
        {
            "padded_vocab_size": given["vocab_size"],
            "max_position_embeddings": given["max_sequence_length"],
            "untie_embeddings_and_output_weights": not given["share_embeddings_and_output_weights"],
            "position_embedding_type": "rope",
            "rotary_base": int(given["rotary_base"]),
            "use_rope_scaling": model.rope_scaling == "llama3",
            "rope_scaling_factor": given.get("rope_scaling_factor"),
            "hybrid_override_pattern": given.get("hybrid_override_pattern"),
        }
    )


def _training_flags(spec: RunSpec) -> Iterator[tuple[str, ...]]:
    optimizer = {
        name: "bf16" if value == "bfloat16" else value
        for name, value in optimizer_settings(spec).items()
        if name not in ("bf16", "params_dtype")
    }
    yield from _flags(
        {
            **{flag: field_value(spec, field) for flag, field in TRAINING_FLAGS.items()},
            "eval_iters": 0,
            **optimizer,
            **optimizer_graph_settings(spec.cuda_graph, spec.megatron_core),
            "grad_reduce_in_bf16": spec.training.gradient_precision == "bf16",
            "no_check_for_nan_in_loss_and_grad": True,
        }
    )


def _data_flags(spec: RunSpec) -> Iterator[tuple[str, ...]]:
    if spec.data.kind == "text":
        return
    yield ("--data-path", str(spec.data.path)) if spec.data.kind == "indexed" else ("--mock-data",)
    # The data holds token numbers. The tokenizer adds one token to the size it is given.
    yield from _flags({"tokenizer_type": "NullTokenizer", "vocab_size": spec.model.vocab_size - 1})


def _notes(spec: RunSpec) -> Iterator[str]:
    model, layout = spec.model, spec.parallelism
    # If the token exchange overlaps, Megatron-LM only warns (megatron/training/arguments.py, ``validate_args``).
    needs_one_queue = max(layout.tp, layout.cp) > 1 and not layout.overlap_moe_expert_parallel_comm
    if needs_one_queue and spec.environment.get(CONNECTIONS) != "1":
        yield (
            f"parallelism.tp={layout.tp}, cp={layout.cp}: set {CONNECTIONS}=1 in the job, or Megatron-LM does not start on GPUs "
            "before Blackwell"
        )
    if model.is_hybrid:
        yield (
            "model.hybrid_override_pattern: only Megatron-LM's pretrain_mamba.py takes it, with --spec "
            "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
        )
    if not layout.batch_p2p_sync:
        yield "parallelism.batch_p2p_sync=false: Megatron-LM has no flag for it; set batch_p2p_sync=False in its TransformerConfig"
    if model.rope_scaling == "yarn":
        yield "model.rope_scaling=yarn: Megatron-LM 0.16 has no flag for it; printed as unscaled"
    if model.rotary_base != int(model.rotary_base):
        whole = int(model.rotary_base)
        yield f"model.rotary_base={model.rotary_base}: Megatron-LM takes whole numbers; printed as {whole}"


def _flags(settings: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in settings.items():
        if name in SWITCHED_OFF:
            if not value:
                yield (spell_flag(SWITCHED_OFF[name]),)
        elif value is not None and value is not False and value != []:
            yield (spell_flag(FLAG_NAMES.get(name, name)), *(() if value is True else _words(value)))


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, tuple):
        return (",".join(map(str, value)),)
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)
