"""Megatron Bridge, in a program that takes overrides of a ConfigContainer (``scripts/training/run_recipe.py``).

Names are those of 0.6.2.
"""

from __future__ import annotations

from typing import Any

from launch.contract.spec import RunSpec
from launch.frameworks.framework import Flags, Framework
from launch.megatron_config.determinism import PROGRAM_VARIABLES
from launch.megatron_config.graph_config import graph_settings

_EVERY_RUN = {
    "train.train_iters": "{steps}",
    "logger.log_interval": 1,
    "logger.tensorboard_log_interval": 1,
    "logger.tensorboard_dir": "{output}/tensorboard",
    # Recipes save into a folder from which the next run would continue.
    "checkpoint.save": "null",
    "checkpoint.load": "null",
    # Graphs need these. Eager runs have them too, so that graphs are the only difference.
    "rng.te_rng_tracker": "true",
    "rerun_state_machine.check_for_nan_in_loss": "false",
    "ddp.check_for_nan_in_grad": "false",
}


def _graph_flags(spec: RunSpec) -> Flags:
    settings = graph_settings(spec.cuda_graph, spec.megatron_core)
    # Bridge's recipes set the older name, and Megatron-Core 0.19 rejects both names together.
    settings |= {} if "cuda_graph_scope" in settings else {"cuda_graph_scope": "null"}
    return {_override(f"model.{name}", value): () for name, value in settings.items()}


def _own_flags(spec: RunSpec) -> Flags:
    settings: dict[str, Any] = {**_EVERY_RUN}
    settings |= {"model.deterministic_mode": "true"} if spec.training.deterministic else {}
    # Some recipes turn graphs on, so turn them off explicitly.
    settings |= {} if spec.graphed else {"model.cuda_graph_impl": "none"}
    return {_override(name, value): () for name, value in settings.items()}


def _override(name: str, value: Any) -> str:
    return f"{name}=[{','.join(value)}]" if isinstance(value, list) else f"{name}={value}"


FRAMEWORK = Framework(
    ("command", "transformer_engine", "local", "full_iteration"),
    _graph_flags,
    _own_flags,
    PROGRAM_VARIABLES,
)
