"""Print a cell for Megatron Bridge: flags of its performance harness, and overrides of a ConfigContainer. Pure.

Both belong to a recipe of the model's own family, which sets activation and precision. Names are those of megatron-bridge
0.3.1; tests/golden/megatron_bridge_names.json lists them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from launch.contract.spec import RunSpec
from launch.megatron_config.graph_config import graph_settings, optimizer_graph_settings
from launch.megatron_config.transformer_config import (
    FP8_RECIPES,
    data_parallel_settings,
    model_settings,
    optimizer_settings,
    parallel_sizes,
    transformer_settings,
)

SET_BY_RECIPE = {"activation_func", "params_dtype", "pipeline_dtype", "bf16", "fp8", "fp8_recipe",
                 "exp_avg_dtype", "exp_avg_sq_dtype"}  # fmt: skip
"""Fields that are not plain values, or that follow from the recipe's mixed precision."""


def render(spec: RunSpec) -> tuple[str, tuple[str, ...]]:
    """Return flags and overrides, one per line of a shell command, and notes on what they do not express."""
    flags = " \\\n".join(f"{name} {value}" for name, value in _harness_flags(spec).items())
    overrides = " \\\n".join(shlex.quote(f"{name}={_literal(value)}") for name, value in _overrides(spec).items())
    # Only recipes of the harness take this override; elsewhere mixed_precision is not a name. It overrides ddp's setting
    # (training/config.py:1864), and is bf16 in the harness's recipes of MoE models.
    gradients = f"mixed_precision.grad_reduce_in_fp32={_literal(spec.training.gradient_precision == 'fp32')}"
    text = f"# performance harness\n{flags} \\\n{gradients}\n# overrides of ConfigContainer\n{overrides}"
    return text, tuple(_notes(spec))


def _harness_flags(spec: RunSpec) -> dict[str, Any]:
    """Return flags of scripts/performance, which take effect after the overrides.

    Later releases spell graph settings as 0.16 does, too.
    """
    training = spec.training
    sizes = parallel_sizes(spec.parallelism) | (
        {"tensor_model_parallel_size": None} if _splits_layers_only(spec) else {}
    )
    graph = {} if _captures_whole_layers(spec) else graph_settings(spec.cuda_graph, "0.16")
    null_tokenizer = {"--tokenizer_type": "NullTokenizer", "--vocab_size": spec.model.vocab_size - 1}
    flags = {
        **{f"--{name}": size for name, size in sizes.items()},
        "--micro_batch_size": training.micro_batch_size,
        "--global_batch_size": training.global_batch_size,
        "--seq_length": training.sequence_length,
        "--max_steps": training.steps,
        "--cuda_graph_impl": graph.get("cuda_graph_impl"),
        "--cuda_graph_scope": ",".join(graph.get("cuda_graph_scope", ())) or None,
        **(null_tokenizer if spec.data.kind == "synthetic" else {}),
    }
    return {name: value for name, value in flags.items() if value is not None}


def _captures_whole_layers(spec: RunSpec) -> bool:
    """Return whether graphs hold whole layers.

    The harness cannot express this: transformer_engine without a scope is an error
    (scripts/performance/utils/overrides.py:117).
    """
    return spec.cuda_graph.implementation.takes_scope and not spec.cuda_graph.scope


def _splits_layers_only(spec: RunSpec) -> bool:
    """Return whether tp splits layers but not sequences.

    The harness's flag for tp splits both (scripts/performance/utils/overrides.py:298).
    """
    return spec.parallelism.tp > 1 and not spec.parallelism.sequence_parallel


def _overrides(spec: RunSpec) -> dict[str, Any]:
    training = spec.training
    model = transformer_settings(spec) | _renamed(model_settings(spec))
    optimizer = {name: value for name, value in optimizer_settings(spec).items() if name not in SET_BY_RECIPE}
    return {
        **_under("model", {name: value for name, value in model.items() if name not in SET_BY_RECIPE}),
        **_under("optimizer", optimizer | optimizer_graph_settings(spec.cuda_graph, spec.megatron_core)),
        **_under("ddp", data_parallel_settings(spec)),
        # A recipe's own settings would replace those of overlap above (training/comm_overlap.py, ``setup``).
        "comm_overlap": None,
        # Recipes of the performance harness choose experts at random.
        "model.moe_router_force_load_balancing": False,
        # The scheduler's weight decay takes effect. It is 0.033 in Bridge's recipes (recipes/utils/optimizer_utils.py).
        "scheduler.start_weight_decay": training.weight_decay,
        "scheduler.end_weight_decay": training.weight_decay,
        "scheduler.weight_decay_incr_style": "constant",
        "scheduler.lr_decay_style": training.learning_rate_schedule,
        "scheduler.lr_decay_iters": training.steps,
        "scheduler.lr_warmup_iters": training.learning_rate_warmup_steps,
        "train.train_iters": training.steps,
        "train.micro_batch_size": training.micro_batch_size,
        "train.global_batch_size": training.global_batch_size,
        "train.eval_iters": 0,
        "dataset.sequence_length": training.sequence_length,
        "rng.seed": training.seed,
        "rng.te_rng_tracker": True,
        "rerun_state_machine.check_for_nan_in_loss": False,
    }


def _renamed(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return GPTModel's settings under the names of GPTModelProvider."""
    return {("seq_length" if name == "max_sequence_length" else name): value for name, value in model.items()}


def _under(section: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in settings.items()}


def _literal(value: Any) -> str:
    """Return ``value`` in Hydra's grammar of overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _notes(spec: RunSpec) -> Iterator[str]:
    if spec.training.precision != "bf16":
        yield f"training.precision={spec.training.precision}: Bridge's recipes are bf16; set mixed_precision by hand"
    if spec.training.fp8 != "none":
        recipe = FP8_RECIPES[spec.training.fp8]
        yield (
            f"training.fp8={spec.training.fp8}: set mixed_precision by hand, to bf16_mixed with fp8=hybrid and "
            f"fp8_recipe={recipe}; Bridge's own fp8 settings differ from this cell in other fields too"
        )
    if spec.training.optimizer_precision == "lean":
        yield "training.optimizer_precision=lean: set exp_avg_dtype and exp_avg_sq_dtype of optimizer to torch.bfloat16 by hand"
    if spec.training.gradient_precision != "fp32":
        yield (
            f"training.gradient_precision={spec.training.gradient_precision}: mixed_precision overrides "
            "ddp.grad_reduce_in_fp32; set it by hand if the recipe has a mixed_precision"
        )
    if _splits_layers_only(spec):
        yield (
            "parallelism.sequence_parallel=false: the performance harness turns it on with --tensor_model_parallel_size; use "
            "the override"
        )
    if _captures_whole_layers(spec):
        yield "cuda_graph.scope=[]: the performance harness cannot express whole layers; use the override"
    if spec.data.kind == "indexed":
        yield "data.path: set the data path in the dataset of Bridge's own recipe"
