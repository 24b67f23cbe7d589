"""Describe a cell's model, layout and machine in a few words, for people."""

from __future__ import annotations

from pathlib import Path

from analysis.records.run import attempts_of
from analysis.sweep.cell_results import CellResult
from launch.common.text import count
from launch.contract.spec import Command, Parallelism, RunSpec

DEGREES = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")


def model_words(spec: RunSpec) -> str:
    """Return the name of the preset, or the main sizes of the model. For a user's program, return the program's name."""
    model = spec.model
    if spec.engine == "command":
        return program_name(spec.command)
    if model.preset:
        return model.preset
    experts = f", {model.num_moe_experts} experts" if model.is_moe else ""
    return f"{model.num_layers} layers of {model.hidden_size}{experts}"


def layout_words(layout: Parallelism) -> str:
    """Return the parallel degrees above 1, such as "TP2 PP2 EP4"; empty on one rank."""
    degrees = ((name, getattr(layout, name)) for name in DEGREES)
    return " ".join(f"{name.upper()}{degree}" for name, degree in degrees if degree > 1)


def program_name(command: Command) -> str:
    """Return the Python file that ``command`` names, else its first word."""
    words = command.run.split()
    return Path(next((word for word in words if word.endswith(".py")), words[0])).name


def precision_words(spec: RunSpec) -> str:
    """Return the precision, with the FP8 recipe of matrix products if any: "bf16, fp8 (delayed)". "" for a user's program."""
    training = spec.training
    if spec.engine == "command":
        return ""
    return training.precision if training.fp8 == "none" else f"{training.precision}, fp8 ({training.fp8})"


def task_words(spec: RunSpec) -> str:
    """Return the model, batch and precision of a task, in words. The task's digest covers more settings."""
    training = spec.training
    batch = f"GBS={training.global_batch_size}, sequence length {training.sequence_length}, {precision_words(spec)}"
    return model_words(spec) if spec.engine == "command" else f"{model_words(spec)}, {batch}"


def machine_words(result: CellResult) -> str:
    """Return the number of ranks, the GPU and the number of nodes: "16 x NVIDIA H100, 2 nodes"."""
    spec = result.spec
    ranks, nodes = spec.parallelism.world_size, spec.placement.nodes
    where = f", {nodes} nodes" if nodes > 1 else ""
    if spec.placement.device == "cpu":
        return f"{count('CPU rank', ranks)}{where}"
    return f"{ranks} x {_gpu(result)}{where}"


def _gpu(result: CellResult) -> str:
    names = {str(gpu) for attempt in attempts_of(result.runs) for gpu in attempt.hardware("gpus")}
    return " or ".join(sorted(names)) or "GPU"
