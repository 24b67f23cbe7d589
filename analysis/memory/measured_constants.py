"""The parts of a GPU's memory that no formula gives: twelve numbers, each measured once. None belongs to a cell or a model.

They were measured on H200s with driver 580, PyTorch 2.11, Transformer Engine 2.11, NCCL 2.28 and Megatron-Core 0.16.1. The
source is eager and graphed cells of the committed reports (docs/results) that are not held out (benchmarks/memory.py). Other
releases may need other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.contract.spec import RunSpec

MIB = 2**20
ERROR = 0.10
"""The stated error of a forecast, relative to the measured memory. It is above the error of every held-out cell of the committed
reports without an injected fault (docs/results/forecast)."""


@dataclass(frozen=True)
class Constant:
    """``value`` is in bytes, or a factor. ``measured`` names the report, the cells and the phase."""

    name: str
    engine: str
    value: float
    measured: str


@dataclass(frozen=True)
class Constants:
    """All constants, by name. ``plan --calibrate`` replaces those of SITE by a site's own."""

    context: Constant = Constant("CUDA context", "both", 527 * MIB, "all reports of one GPU, phase init")
    native_kernels: Constant = Constant("kernels", "torch_native", 240 * MIB, "launch_bound, eager, phase measure")
    megatron_kernels: Constant = Constant(
        "kernels of Transformer Engine", "megatron", 429 * MIB, "qwen3_8l_megatron, eager, phase teardown"
    )
    eager_kernels: Constant = Constant(
        "kernels loaded at the start", "both", 734 * MIB, "qwen3_8l_parallel, eager, phase init"
    )
    communicator: Constant = Constant(
        "communicators", "both", 480 * MIB, "qwen3_8l_parallel and qwen3_8l_megatron, eager, phase measure"
    )
    peers: Constant = Constant(
        "channels between peers", "both", 1800 * MIB, "qwen3_8l_parallel and qwen3_8l_megatron_parallel, eager"
    )
    workspace: Constant = Constant(
        "workspaces", "both", 32 * MIB, "frozen_scalar and qwen3_8l_megatron, eager, phase teardown"
    )
    graph_executables: Constant = Constant(
        "graph executables", "both", 80 * MIB, "launch_bound and qwen3_8l, phase capture"
    )
    imbalance: Constant = Constant(
        "rows of the fullest rank", "both", 1.3, "qwen3_8l_megatron_parallel, ep=4, eager, phase measure"
    )
    changing_blocks: Constant = Constant(
        "changing blocks", "megatron", 1.0, "qwen3_8l_megatron_parallel, dropless, phase measure"
    )
    native_unused: Constant = Constant(
        "unused blocks", "torch_native", 300 * MIB, "launch_bound and qwen3_8l, eager, phase build"
    )
    megatron_unused: Constant = Constant("unused blocks", "megatron", 0.04, "qwen3_8l_megatron, eager, phase warmup")


MEASURED = Constants()
SITE = (
    "context", "native_kernels", "megatron_kernels", "eager_kernels", "communicator", "peers", "graph_executables",
    "native_unused", "megatron_unused",
)  # fmt: skip
"""The constants that depend on GPUs, drivers and releases, outside of tensors that torch counts as allocated."""


def uncertain_settings(spec: RunSpec) -> tuple[str, ...]:
    """Return the settings of ``spec`` that no run had, or runs of one model alone. A word each."""
    settings = {
        "fp8": spec.training.fp8 != "none",
        "a compiled model": spec.compiles_whole,
        "context parallelism": spec.parallelism.cp > 1,
    }
    return tuple(name for name, is_set in settings.items() if is_set)


def is_certain(spec: RunSpec) -> bool:
    """Return whether reports show the error of forecasts for the settings of ``spec``. They cover both engines and both releases."""
    return spec.engine != "command" and not uncertain_settings(spec)
