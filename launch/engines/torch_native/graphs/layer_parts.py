"""The parts of a layer that a scope names, and a layer assembled from graphed parts.

Scopes are those of Megatron-Core (transformer/transformer_layer.py), with two differences. The norm before the MLP is fused
with the residual sum and belongs to ``attn``. Rows move only after ``moe_preprocess``, while Megatron-Core's all-to-all
dispatcher permutes a rank's own rows within it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from launch.engines.torch_native.decoder import Layer, RunLayer
from launch.engines.torch_native.layers.attention_backends import Positions
from launch.engines.torch_native.moe.layer import MixtureOfExperts, Preprocessed, RoutingStats


class Part(nn.Module):
    """A part of a layer in the form that graphed callables need: a module with its parameters that maps tensors to tensors.

    Other values in its output (sizes, None) are the same in every call, and :meth:`rebuild` restores them.
    """

    def __init__(self, compute: Callable[..., Any], modules: Sequence[nn.Module], inputs: int) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)
        self.inputs = inputs
        """The number of input tensors, each (microbatch size, sequence or this rank's shard, hidden_size)."""
        self._compute = compute
        self._structure: TreeSpec | None = None
        self._constants: list[Any] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves, self._structure = tree_flatten(self._compute(*tensors))
        self._constants = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output of ``compute`` from the flat tensors of :meth:`forward`."""
        assert self._structure is not None
        given = iter(tensors)
        leaves = [next(given) if constant is None else constant[0] for constant in self._constants]
        return tree_unflatten(leaves, self._structure)


def layer_parts(layer: Layer, scope: Sequence[str], positions: Positions) -> dict[str, Part]:
    """Return the parts of ``layer`` that ``scope`` names, in the order in which they run."""
    if not scope:
        return {"layer": Part(lambda x: layer(x, positions), [layer], 1)}
    parts: dict[str, Part] = {}
    if "attn" in scope:
        held = [layer.attention_norm, layer.attention, layer.mlp_norm]
        parts["attn"] = Part(lambda x: layer.forward_attention(x, positions), held, 1)
    experts = layer.mlp
    if not isinstance(experts, MixtureOfExperts):
        if "mlp" in scope:
            parts["mlp"] = Part(layer.forward_mlp, [experts], 2)
    elif "moe" in scope:
        parts["mlp"] = Part(layer.forward_mlp, [experts], 2)
    elif "moe_router" in scope:
        held = [experts.router] if experts.shared is None else [experts.router, experts.shared]
        prepared = "moe_preprocess" in scope
        parts["router"] = Part(lambda x: _route(experts, x, prepared), held, 1)
    return parts


def _route(experts: MixtureOfExperts, normed: torch.Tensor, prepared: bool) -> Any:
    routing, shared = experts.route(normed)
    return experts.preprocess(routing, shared) if prepared else (routing, shared)


def assemble_layer(layer: Layer, calls: Mapping[str, Callable[..., Any]]) -> RunLayer:
    """Return ``layer`` with each named part replaced by the callable of that name."""

    def run(x: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, RoutingStats | None]:
        if "layer" in calls:
            return cast(tuple[torch.Tensor, RoutingStats | None], calls["layer"](x))
        x, normed = calls["attn"](x) if "attn" in calls else layer.forward_attention(x, positions)
        if "mlp" in calls:
            return cast(tuple[torch.Tensor, RoutingStats | None], calls["mlp"](x, normed))
        if "router" not in calls:
            return layer.forward_mlp(x, normed)
        experts = cast(MixtureOfExperts, layer.mlp)
        routed = calls["router"](normed)
        prepared = routed if isinstance(routed, Preprocessed) else experts.preprocess(*routed)
        change, stats = experts.run_experts(normed, prepared)
        return layer.add(x, change), stats

    return run
