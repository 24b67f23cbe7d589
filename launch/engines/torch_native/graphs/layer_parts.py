"""The parts of a layer that a scope names, each from tensors to tensors, and a layer put together from them.

Scopes mean what they mean in Megatron-Core (transformer/transformer_layer.py): ``attn`` is all up to the feed-forward,
``mlp`` a dense one, ``moe`` a mixture of experts whole, ``moe_router`` its router and shared expert, ``moe_preprocess``
what can be said of the dispatch beforehand; no scope is the whole layer. The norm before the feed-forward is computed
with the sum before it, and so belongs to ``attn`` here; rows are moved behind ``moe_preprocess``, where Megatron-Core's
all-to-all dispatcher permuter a rank's own in it.
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
    """A computation as graphed callables want it: a module that holds its parameters, whose inputs and outputs are
    tensors. What else an output holds (sizes, None) is the same in every call, and is put back by :meth:`rebuild`."""

    def __init__(self, compute: Callable[..., Any], modules: Sequence[nn.Module], inputs: int) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)
        self.inputs = inputs
        """How many tensors it takes, each shaped like the residual stream."""
        self._compute = compute
        self._structure: TreeSpec | None = None
        self._constants: list[Any] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves, self._structure = tree_flatten(self._compute(*tensors))
        self._constants = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        assert self._structure is not None
        given = iter(tensors)
        leaves = [next(given) if constant is None else constant[0] for constant in self._constants]
        return tree_unflatten(leaves, self._structure)


def layer_parts(layer: Layer, scope: Sequence[str], positions: Positions) -> dict[str, Part]:
    """The parts of ``layer`` that ``scope`` names, in the order in which they run."""
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
    """``layer`` with ``calls`` in the place of the parts that they are named after."""

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
        change, said = experts.run_experts(normed, prepared)
        return x + change, said

    return run
