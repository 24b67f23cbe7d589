"""Megatron-Core's parameters in terms of torch_native's: a table of names and layouts.

Both engines draw initial weights from (seed, torch_native's name), so they train the same model from the same start. A
parameter that is not in the table raises an error, because its weights would be uninitialized.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from launch.contract.errors import UnsupportedError
from launch.contract.spec import Model
from launch.engines.megatron.init.mamba_weights import MAMBA_PARAMETERS, mamba_weights
from launch.engines.torch_native.decoder import Decoder
from launch.engines.torch_native.init.initial_weights import initial_weights
from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.parallel.process_groups import Group

Layout = Literal["whole", "rows", "columns", "gate_up", "qkv", "expert_gate_up", "expert_down"]
"""The part of a parameter that a tensor-parallel rank of Megatron has.

- whole: the whole parameter.
- rows, columns: the rank's part of the rows or columns.
- gate_up: the rank's part of the rows of each half.
- qkv: the rank's query groups, each with the group's queries, key and value.
- expert_gate_up, expert_down: an expert-tensor-parallel rank's part of one expert's matrix, with outputs first."""

MODEL_PARAMETERS: Mapping[str, tuple[str, Layout]] = {
    "embedding.word_embeddings.weight": ("embedding.weight", "rows"),
    "decoder.final_layernorm.weight": ("final_norm.weight", "whole"),
    "decoder.final_norm.weight": ("final_norm.weight", "whole"),
    "output_layer.weight": ("head.weight", "rows"),
}
LAYER_PARAMETERS: Mapping[str, tuple[str, Layout]] = {
    "input_layernorm.weight": ("attention_norm.weight", "whole"),
    "self_attention.linear_qkv.layer_norm_weight": ("attention_norm.weight", "whole"),
    "self_attention.linear_qkv.weight": ("attention.qkv.weight", "qkv"),
    "self_attention.linear_qkv.bias": ("attention.qkv.bias", "qkv"),
    "self_attention.q_layernorm.weight": ("attention.query_norm.weight", "whole"),
    "self_attention.k_layernorm.weight": ("attention.key_norm.weight", "whole"),
    "self_attention.core_attention.softmax_offset": ("attention.sinks", "rows"),
    "self_attention.linear_proj.weight": ("attention.output.weight", "columns"),
    "self_attention.linear_proj.bias": ("attention.output.bias", "whole"),
    "pre_mlp_layernorm.weight": ("mlp_norm.weight", "whole"),
    "mlp.linear_fc1.layer_norm_weight": ("mlp_norm.weight", "whole"),
    "mlp.linear_fc1.weight": ("mlp.gate_up.weight", "gate_up"),
    "mlp.linear_fc1.bias": ("mlp.gate_up.bias", "gate_up"),
    "mlp.linear_fc2.weight": ("mlp.down.weight", "columns"),
    "mlp.linear_fc2.bias": ("mlp.down.bias", "whole"),
    "mlp.router.weight": ("mlp.router.weight", "whole"),
    "mlp.router.bias": ("mlp.router.bias", "whole"),
    "mlp.shared_experts.linear_fc1.weight": ("mlp.shared.gate_up.weight", "gate_up"),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared.down.weight", "columns"),
    **{name: (parameter, "whole") for name, parameter in MAMBA_PARAMETERS.items()},
}
EXPERT_PARAMETERS: Mapping[str, tuple[str, Layout]] = {
    "linear_fc1.weight": ("mlp.gate_up", "expert_gate_up"),
    "linear_fc1.bias": ("mlp.gate_up_bias", "expert_gate_up"),
    "linear_fc2.weight": ("mlp.down", "expert_down"),
    "linear_fc2.bias": ("mlp.down_bias", "expert_down"),
}
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(?P<one>\d+)\.(?P<of_one>.+)|(?P<grouped>.+?)(?P<number>\d+))")
"""A single expert (``local_experts.3.linear_fc1.weight``), or one grouped by Transformer Engine (``linear_fc1.weight3``)."""


@dataclass(frozen=True)
class Origin:
    """The torch_native parameter that corresponds to one of Megatron's. ``expert`` is its number in the whole model."""

    parameter: str
    layout: Layout
    expert: int | None = None


def find_origin(name: str, first_expert: int = 0) -> Origin:
    """Return the origin of GPTModel's parameter ``name``. The layer number in ``name`` is that of the whole model.

    Args:
        first_expert: the number of the first expert on this rank.

    Raises:
        UnsupportedError: the table does not have the name.
    """
    if name in MODEL_PARAMETERS:
        return Origin(*MODEL_PARAMETERS[name])
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    number, part = layer.groups() if layer else ("", name)
    if part in LAYER_PARAMETERS:
        parameter, layout = LAYER_PARAMETERS[part]
        return Origin(f"layers.{number}.{parameter}", layout)
    expert = EXPERT.fullmatch(part)
    of_expert = EXPERT_PARAMETERS.get(expert["of_one"] or expert["grouped"]) if expert else None
    if expert is None or of_expert is None:
        raise UnsupportedError(f"Megatron-Core's parameter {name} has no counterpart in torch_native")
    parameter, layout = of_expert
    return Origin(f"layers.{number}.{parameter}", layout, first_expert + int(expert["one"] or expert["number"]))


def to_megatron(whole: torch.Tensor, layout: Layout, model: Model, tp: Group) -> torch.Tensor:
    """Convert a whole parameter of torch_native, or one expert of it, to a rank's part in Megatron's layout.

    Args:
        whole: (outputs, inputs) or (outputs,); of an expert (inputs, outputs) or (outputs,).
        tp: the tensor-parallel group; for experts the expert-tensor-parallel group.
    """
    if layout == "whole" or (layout == "expert_down" and whole.dim() == 1):
        return whole
    if layout.startswith("expert"):
        whole = whole.T if whole.dim() == 2 else whole
    if layout.endswith("gate_up"):
        return torch.cat([half.chunk(tp.size)[tp.rank] for half in whole.chunk(2)])
    if layout == "qkv":
        whole = torch.cat(_split_qkv_by_group(whole, model), dim=1).flatten(0, 1)
    return whole.chunk(tp.size, dim=1 if layout in ("columns", "expert_down") else 0)[tp.rank]


@torch.no_grad()
def draw_weights(chunk: nn.Module, model: Model, seed: int, tp: Group, ep: Group, etp: Group) -> None:
    """Fill every parameter of this rank's ``chunk`` with torch_native's initial weights, and mark sharded parameters."""
    shapes = _whole_shapes(model)
    for parameter, origin in named_origins(chunk, model, ep):
        # torch_native has no Mamba layers. Those of Megatron are whole on each rank.
        shape, ranks = (shapes.get(origin.parameter, parameter.shape), tp)
        if origin.expert is not None:
            shape, ranks = shape[1:], etp
        whole = mamba_weights(origin.parameter, shape, seed, parameter.device)
        if whole is None:
            whole = initial_weights(origin.parameter, shape, model, seed, parameter.device, origin.expert)
        parameter.copy_(to_megatron(whole, origin.layout, model, ranks).view_as(parameter))
        _set_parallel_attributes(parameter, origin)


def _set_parallel_attributes(parameter: Any, origin: Origin) -> None:
    """Set the attributes that megatron-core 0.16.1 omits or sets wrongly."""
    # Megatron-Core omits it if it does not initialize the parameter itself, and for sinks and some expert biases. The
    # gradient norm would then miss this parameter on all tensor-parallel ranks but the first.
    parameter.tensor_model_parallel = origin.layout != "whole"
    if origin.expert is not None:
        # Megatron-Core sets it for second biases of its own experts. It would then sum their gradients over ranks with
        # different experts.
        parameter.sequence_parallel = False


def named_origins(chunk: nn.Module, model: Model, ep: Group) -> Iterator[tuple[nn.Parameter, Origin]]:
    """Yield each parameter of a GPTModel and its origin in torch_native's whole model."""
    layers: Any = chunk.get_submodule("decoder.layers")
    numbers = [layer.layer_number - 1 for layer in layers]
    first_expert = ep.rank * (model.num_moe_experts // ep.size)
    tied = {"head.weight": "embedding.weight"} if model.tie_embeddings else {}
    for name, parameter in chunk.named_parameters():
        whole_name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda found: str(numbers[int(found[0])]), name)
        origin = find_origin(whole_name, first_expert)
        yield parameter, Origin(tied.get(origin.parameter, origin.parameter), origin.layout, origin.expert)


def _split_qkv_by_group(qkv: torch.Tensor, model: Model) -> tuple[torch.Tensor, ...]:
    """Split (rows, ...) into queries, keys and values, each (query groups, rows per group, ...)."""
    queries = model.num_attention_heads * model.kv_channels
    keys = model.num_query_groups * model.kv_channels
    return tuple(rows.unflatten(0, (model.num_query_groups, -1)) for rows in qkv.split([queries, keys, keys]))


def _whole_shapes(model: Model) -> dict[str, torch.Size]:
    """Return the shapes of torch_native's parameters in the whole model."""
    with torch.device("meta"):
        decoder = Decoder(BuildContext(model))
    return {name: parameter.shape for name, parameter in decoder.named_parameters()}
