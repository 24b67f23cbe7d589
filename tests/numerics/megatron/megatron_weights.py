"""Convert Megatron-Core's parameters to torch_native's layouts."""

from __future__ import annotations

import torch
from torch import nn

from launch.contract.spec import Model
from launch.engines.megatron.init.weight_map import Layout, _whole_shapes, named_origins
from launch.engines.torch_native.parallel.process_groups import Group


def from_megatron(part: torch.Tensor, layout: Layout, model: Model) -> torch.Tensor:
    """Invert ``to_megatron`` for a rank that holds the whole model."""
    if layout.startswith("expert"):
        return part.T if part.dim() == 2 else part
    if layout != "qkv":
        return part
    queries = model.num_attention_heads // model.num_query_groups
    groups = part.unflatten(0, (model.num_query_groups, (queries + 2) * model.kv_channels))
    widths = [queries * model.kv_channels, model.kv_channels, model.kv_channels]
    return torch.cat([rows.flatten(0, 1) for rows in groups.split(widths, dim=1)])


@torch.no_grad()
def whole_weights(chunk: nn.Module, model: Model) -> dict[str, torch.Tensor]:
    """Return the weights of a GPTModel that one rank holds whole, by torch_native's names and in its layouts."""
    whole = {name: torch.empty(shape) for name, shape in _whole_shapes(model).items()}
    for parameter, origin in named_origins(chunk, model, Group()):
        into = whole[origin.parameter] if origin.expert is None else whole[origin.parameter][origin.expert]
        into.copy_(from_megatron(parameter, origin.layout, model).view_as(into))
    return whole
