"""Core attention: compute the attention output from queries, keys and values, by one of several backends.

On a GPU, no backend materializes a sequence-by-sequence matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from launch.contract.spec import Model
from launch.engines.packages import import_package
from launch.engines.torch_native.layers.rotary import Rotary

Backend = Literal["sdpa", "flex", "transformer_engine", "plain"]
"""``plain`` materializes the matrix of scores, for masks and sinks that SDPA does not support on a CPU."""

FUSED_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""The kernels of SDPA on a GPU, fastest first. The math kernel is left out because it materializes the matrix of scores."""


class Positions(NamedTuple):
    """Rotary tables and masks of a microbatch, shared by all layers."""

    rotary: Rotary
    documents: torch.Tensor | None
    """int64 (batch, sequence): the index of each token's document in packed sequences; None: one document per sequence."""
    block_masks: Mapping[int, BlockMask]
    """Masks for flex_attention, by window size."""


def block_masks(
    windows: set[int], length: int, documents: torch.Tensor | None, device: torch.device
) -> Mapping[int, BlockMask]:
    """Return the mask of flex_attention for each window size.

    Args:
        documents: int64 (batch, sequence) for packed sequences.
    """
    make = _cached_block_mask if documents is None else _make_block_mask
    return {window: make(window, length, documents, device) for window in windows}


class CoreAttention:
    """Causal attention of one layer, by the backend that supports it."""

    def __init__(self, model: Model, number: int, choice: str, packed: bool, tp: int = 1) -> None:
        self.window = model.window_of_layer(number)
        self._model = model
        self._choice = choice
        self._packed = packed
        self._tp = tp

    def backend(self, device: torch.device) -> Backend:
        """Return the backend on ``device``. launch.support has checked that an explicit choice supports the layer."""
        if self._choice != "auto":
            return cast(Backend, self._choice)
        if not (self.window or self._model.attention_sinks or self._packed):
            return "sdpa"
        return "plain" if device.type == "cpu" else "flex"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        positions: Positions,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: (batch, sequence, heads, kv_channels).
            key: (batch, sequence, query groups, kv_channels), as ``value``.
            sinks: (heads,).

        Returns:
            (batch, sequence, heads, kv_channels)
        """
        backend = self.backend(query.device)
        if backend == "transformer_engine":
            return _transformer_engine_attention(self._transformer_engine, query, key, value, sinks)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if backend == "sdpa":
            mixed = _sdpa_attention(query, key, value, self._model.attention_dropout)
        elif backend == "flex":
            mixed = _compiled_flex()(query, key, value, sinks, positions.block_masks[self.window])
        else:
            mixed = plain_attention(query, key, value, sinks, self.window, positions.documents)
        return mixed.transpose(1, 2)

    @cached_property
    def _transformer_engine(self) -> Any:
        model, window, tp = self._model, self.window, self._tp
        setting = "training.attention_backend='transformer_engine'"
        fix = "install it, or set training.attention_backend=auto"
        module = import_package("transformer_engine.pytorch", "transformer-engine", setting, fix)
        attention = module.DotProductAttention(
            num_attention_heads=model.num_attention_heads // tp,
            kv_channels=model.kv_channels,
            num_gqa_groups=model.num_query_groups // tp,
            qkv_format="bshd",
            attn_mask_type="causal",
            # How many positions before and after its own a query attends to; -1 means all.
            window_size=(window - 1, 0) if window else (-1, 0),
            softmax_type="learnable" if model.attention_sinks else "vanilla",
        )
        if model.attention_sinks:
            # This is Transformer Engine's own parameter. Each call sets this layer's sinks instead.
            del attention.softmax_offset
        return attention


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention by its formula, in at least float32. The result has the shape and dtype of ``query``.

    Args:
        query: (batch, heads, sequence, kv_channels).
        key: (batch, groups, sequence, kv_channels), as ``value``.
        sinks: (heads,). A sink is one more logit in each softmax, with a value of zero.
        window: how many positions a query attends to, including its own; 0 means all up to its own.
        documents: int64 (batch, sequence). A query attends to its own document only.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (tensor.to(dtype).repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query.to(dtype) @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~_attention_mask(length, window, documents, query.device), -math.inf)
    if sinks is not None:
        column = sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    return (scores.softmax(-1)[..., :length] @ value).to(query.dtype)


def _attention_mask(length: int, window: int, documents: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return whether a query attends to a key: bool (1 or batch, 1, sequence, sequence)."""
    positions = torch.arange(length, device=device)
    past = positions.unsqueeze(-1) - positions
    visible = (past >= 0) & (past < window) if window else past >= 0
    if documents is None:
        return visible.view(1, 1, length, length)
    return (visible & (documents.unsqueeze(-1) == documents.unsqueeze(-2))).unsqueeze(1)


def _sdpa_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
    """Attend: query (batch, heads, sequence, kv_channels), key and value (batch, groups, sequence, kv_channels)."""
    grouped = query.shape[1] != key.shape[1]
    attend = partial(nn.functional.scaled_dot_product_attention, dropout_p=dropout, is_causal=True)
    if query.device.type == "cpu":
        return attend(query, key, value, enable_gqa=grouped)
    # The only fused kernel for float32 needs as many key heads as query heads.
    if grouped and query.dtype == torch.float32:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
        grouped = False
    with sdpa_kernel(FUSED_KERNELS, set_priority=True):
        return attend(query, key, value, enable_gqa=grouped)


def _flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, mask: BlockMask
) -> torch.Tensor:
    """Attend: query (batch, heads, sequence, kv_channels), key and value (batch, groups, sequence, kv_channels)."""
    grouped = query.shape[1] != key.shape[1]
    if sinks is None:
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=grouped)
    aux: Any
    mixed, aux = flex_attention(
        query, key, value, block_mask=mask, enable_gqa=grouped, return_aux=AuxRequest(lse=True)
    )  # fmt: skip
    # With l the log-sum-exp of a row's other logits, a sink scales the row by sigmoid(l - sink).
    scale = torch.sigmoid(aux.lse - sinks.view(1, -1, 1))
    return (mixed * scale.unsqueeze(-1)).to(query.dtype)


def _transformer_engine_attention(
    attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend: query (batch, sequence, heads, kv_channels), key and value (batch, sequence, groups, kv_channels)."""
    if sinks is not None:
        attention.softmax_offset = sinks
    mixed: torch.Tensor = attention(query, key, value).unflatten(-1, query.shape[2:])
    return mixed


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    # Compiled with the attention, the sinks' scale takes one pass over its results, and one backward.
    return torch.compile(_flex_attention, fullgraph=True, dynamic=False)


@lru_cache(maxsize=1)
def _compiled_block_mask() -> Any:
    # Eager create_block_mask materializes a sequence-by-sequence matrix.
    return torch.compile(create_block_mask, dynamic=False)


def _make_block_mask(window: int, length: int, documents: torch.Tensor | None, device: torch.device) -> BlockMask:
    def visible(batch: torch.Tensor, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        past = (query >= key) & (query - key < window) if window else query >= key
        return past if documents is None else past & (documents[batch, query] == documents[batch, key])

    size = None if documents is None else len(documents)
    return cast(BlockMask, _compiled_block_mask()(visible, size, None, length, length, device=str(device)))


_cached_block_mask = lru_cache(maxsize=8)(_make_block_mask)
"""For masks without documents, which do not depend on the tokens."""
