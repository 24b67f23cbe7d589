"""Hugging Face's Trainer, in a program that reads TrainingArguments with HfArgumentParser."""

from __future__ import annotations

from launch.contract.spec import RunSpec
from launch.frameworks.framework import Flags, Framework


def _graph_flags(spec: RunSpec) -> Flags:
    compiled = {"--torch_compile": ("True",), "--torch_compile_mode": ("reduce-overhead",)}
    return compiled if spec.cuda_graph.impl == "torch_compile" else {}


def _own_flags(spec: RunSpec) -> Flags:
    # Graphs need a single shape. Without this flag, the last batch of an epoch is smaller.
    flags = {"--max_steps": ("{steps}",), "--output_dir": ("{output}",), "--dataloader_drop_last": ("True",)}
    if spec.placement.device == "cuda":
        # The Trainer turns TF32 on if it compiles (read), so TF32 would count as a gain of graphs.
        flags["--tf32"] = ("True",)
    return flags | ({"--full_determinism": ("True",)} if spec.training.deterministic else {})


FRAMEWORK = Framework(("command", "torch_compile"), _graph_flags, _own_flags)
