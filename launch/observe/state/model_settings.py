"""Describe the modules that hold the program's parameters: their mode, dropout, and how ranks share gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from launch.common.text import count
from launch.observe.state.modules import modules_of_process

_OF_DDP = (
    "bucket_bytes_cap", "gradient_as_bucket_view", "find_unused_parameters", "static_graph", "broadcast_buffers",
)  # fmt: skip
"""What DistributedDataParallel is made with, and what changes its speed."""


def model_settings(stepped: Sequence[torch.Tensor]) -> dict[str, str]:
    """Return the settings of the modules with ``stepped`` parameters. What is unknown is left out."""
    ids, modules = {*map(id, stepped)}, modules_of_process()
    found = {
        "modules": _modes(modules, ids),
        "data_parallel": "; ".join(
            sorted({_of_ddp(one) for one in modules if isinstance(one, DistributedDataParallel)})
        )
        or "none",
        "trained": _trained(stepped),
    }
    return {name: text for name, text in found.items() if text}


def _modes(modules: Sequence[nn.Module], stepped: Collection[int]) -> str:
    """Return whether modules train, and with which dropout. Those of evaluations and averages hold no stepped parameters."""
    training = [one.training for one in modules if any(_is_of(parameter, stepped) for parameter in _own(one))]
    if not training:
        return ""
    off = training.count(False)
    mode = "training" if not off else f"{off} of {count('module', len(training))} in evaluation mode"
    dropout = sorted({one.p for one in modules if isinstance(one, _DropoutNd) and one.training and one.p > 0})
    return f"{mode}, dropout {', '.join(f'{one:g}' for one in dropout)}" if dropout else mode


def _own(module: nn.Module) -> Collection[torch.Tensor]:
    return [one for one in module._parameters.values() if one is not None]


def _is_of(parameter: torch.Tensor, stepped: Collection[int]) -> bool:
    # Megatron's optimizers step a copy of the parameter.
    return not {id(parameter), id(getattr(parameter, "main_param", None))}.isdisjoint(stepped)


def _of_ddp(module: DistributedDataParallel) -> str:
    made = [f"{name} {getattr(module, name)}" for name in _OF_DDP if hasattr(module, name)]
    hooks = [str(getattr(hook, "__name__", hook)) for hook, *_ in getattr(module, "_comm_hooks", ())]
    return ", ".join([*made, *hooks])


def _trained(stepped: Sequence[torch.Tensor]) -> str:
    """Return how many numbers the optimizers step, how many of them are frozen, and whether images lie channels last."""
    if not stepped:
        return ""
    # Megatron's copies of parameters are plain tensors without gradients of their own.
    fixed = [one for one in stepped if isinstance(one, nn.Parameter) and not one.requires_grad]
    numbers, frozen = (sum(one.numel() for one in some) for some in (stepped, fixed))
    last = any(
        one.dim() == 4 and not one.is_contiguous() and one.is_contiguous(memory_format=torch.channels_last)
        for one in stepped
        if type(one) in (torch.Tensor, nn.Parameter)
    )
    return f"{numbers} numbers" + f", {frozen} of them frozen" * bool(frozen) + ", channels last" * last
