"""Megatron-LM's training scripts (``pretrain_gpt.py``), of the release that the recipe names."""

from __future__ import annotations

from launch.contract.spec import RunSpec
from launch.frameworks.framework import Flags, Framework
from launch.megatron_config.determinism import PROGRAM_VARIABLES
from launch.megatron_config.graph_config import graph_settings


def _graph_flags(spec: RunSpec) -> Flags:
    settings = graph_settings(spec.cuda_graph, spec.megatron_core)
    flags = {name: value if isinstance(value, list) else [value] for name, value in settings.items() if value != []}
    return {"--" + name.replace("_", "-"): tuple(map(str, words)) for name, words in flags.items()}


def _own_flags(spec: RunSpec) -> Flags:
    flags: dict[str, tuple[str, ...]] = {
        "--train-iters": ("{steps}",),
        "--log-interval": ("1",),
        # The log has only three decimals of the gradient norm. TensorBoard has all digits.
        "--tensorboard-dir": ("{output}/tensorboard",),
        "--tensorboard-log-interval": ("1",),
    }
    # Graphs need both of these. Eager runs have them too, so that graphs are the only difference.
    flags |= {"--te-rng-tracker": (), "--no-check-for-nan-in-loss-and-grad": ()}
    return flags | ({"--deterministic-mode": ()} if spec.training.deterministic else {})


FRAMEWORK = Framework(
    ("command", "transformer_engine", "local", "full_iteration"), _graph_flags, _own_flags, PROGRAM_VARIABLES
)
