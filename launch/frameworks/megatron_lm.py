"""Megatron-LM's training scripts (``pretrain_gpt.py``), with the flags of its main branch and of releases since 0.17."""

from __future__ import annotations

from launch.contract.spec import CudaGraph, RunSpec
from launch.frameworks.framework import Flags, Framework
from launch.megatron_config.graph_config import graph_settings


def _graph_flags(graph: CudaGraph) -> Flags:
    settings = graph_settings(graph, "0.19")
    flags = {name: value if isinstance(value, list) else [value] for name, value in settings.items() if value != []}
    return {"--" + name.replace("_", "-"): tuple(map(str, words)) for name, words in flags.items()}


def _own_flags(spec: RunSpec) -> Flags:
    flags: dict[str, tuple[str, ...]] = {
        "--train-iters": ("{steps}",),
        "--log-interval": ("1",),
        # Its log has three decimals of the gradient norm. TensorBoard has all.
        "--tensorboard-dir": ("{output}/tensorboard",),
        "--tensorboard-log-interval": ("1",),
    }
    return flags | ({"--deterministic-mode": ()} if spec.training.deterministic else {})


FRAMEWORK = Framework(("command", "transformer_engine", "local", "full_iteration"), _graph_flags, _own_flags)
