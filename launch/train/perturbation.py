"""Perturb an eager run by the smallest error that another kernel could make, to measure how far the error grows.

Deterministic eager runs equal each other, so they do not show how far harmless differences grow, such as another rounding in a
compiled kernel. A perturbed run shows this.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from launch.contract.errors import EnvironmentFault
from launch.engines.perturbation import next_after, next_output
from launch.train.fault_injection import FaultyStep


def perturb_weight(run: FaultyStep, *, lean: bool = False) -> None:
    """Move the first weight by one unit in the last place for the perturbed step.

    This is for a model that is compiled whole, which calls no hooks. The weight belongs to the first layer's first norm. Masters
    replace it after the step. A ``lean`` optimizer has no masters beside the weights, so the weight is moved back.
    """

    def move() -> None:
        weight = next(run.engine.named_parameters())[1].detach()
        before = weight.clone()
        weight.copy_(next_after(weight))
        if lean:
            bits = weight.view(torch.int16)
            units = bits - before.view(torch.int16)
            run.after_step(lambda: bits.sub_(units))

    run.in_step(move)


def perturb(run: FaultyStep) -> None:
    """Move each element of the first layer's output by one unit in the last place, in the perturbed step.

    Rank 0 has the first layer; later stages of a pipeline do not.

    Raises, in the first step:
        EnvironmentFault: rank 0 finds no first layer, so nothing would be perturbed.
    """

    def find(model: nn.Module, inputs: Any) -> None:
        handle.remove()
        # Megatron-Core counts the layers of a stage from 0, but their ``layer_number`` from 1 in the whole model.
        first = [
            module
            for name, module in model.named_modules()
            if name.endswith("layers.0") and getattr(module, "layer_number", 1) == 1
        ]
        if not first and int(os.environ.get("RANK", "0")) == 0:
            raise EnvironmentFault(
                f"{type(model).__name__} has no module layers.0, so the perturbed run would equal the eager baseline"
            )
        for module in first:
            module.register_forward_hook(move)

    def move(layer: nn.Module, inputs: Any, outputs: Any) -> Any:
        return next_output(outputs) if run.is_due else outputs

    handle = register_module_forward_pre_hook(find)
