"""From queries, keys and values to what each position mixes: which kernel does it, and what each can express.

On a GPU none of them holds a sequence-by-sequence matrix. A learned sink is one more logit in each softmax whose value
is nothing; with l the log-sum-exp of a row's other logits it scales the row by sigmoid(l - sink).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from launch.contract.spec import Model
from launch.engines.packages import import_package
from launch.engines.torch_native.layers.rotary import Rotary

Backend = Literal["sdpa", "flex", "transformer_engine", "plain"]
"""``plain`` is the formula with its matrix of scores, for what SDPA cannot express on a CPU."""

FUSED_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
"""What SDPA may choose from on a GPU, the fastest first; its math kernel would hold the matrix of scores."""


class Positions(NamedTuple):
    """What a micro-batch's layers share."""

    rotary: Rotary
    documents: torch.Tensor | None
    """Packed documents: the number of each token's document, int64 of shape (batch, sequence); None: one a sequence."""
    block_masks: Mapping[int, BlockMask]
    """Of flex_attention, by window size."""


def backend_of(choice: str, device: str, windowed_or_sinks: bool, packed: bool) -> Backend:
    """The backend of a layer. ``choice`` is ``training.attention_backend``; that the layer is within what it can
    express was judged before (launch.support)."""
    if choice != "auto":
        return cast(Backend, choice)
    if not (windowed_or_sinks or packed):
        return "sdpa"
    return "plain" if device == "cpu" else "flex"


def block_masks(
    windows: set[int], length: int, documents: torch.Tensor | None, device: torch.device
) -> Mapping[int, BlockMask]:
    if documents is None:
        return {window: _causal_block_mask(window, length, device) for window in windows}
    return {window: _document_block_mask(window, documents) for window in windows}


class CoreAttention:
    """Causal attention of one layer, by the backend that expresses it."""

    def __init__(self, model: Model, number: int, choice: str, packed: bool, tp: int = 1) -> None:
        self.window = model.window_of_layer(number)
        self._model = model
        self._choice = choice
        self._packed = packed
        self._tp = tp

    def backend(self, device: torch.device) -> Backend:
        extras = bool(self.window) or self._model.attention_sinks
        return backend_of(self._choice, device.type, extras, self._packed)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        positions: Positions,
    ) -> torch.Tensor:
        """(batch, sequence, heads, kv_channels) each -> (batch, sequence, query heads, kv_channels).

        Keys and values have one head a query group; ``sinks`` is of shape (query heads,).
        """
        backend = self.backend(query.device)
        if backend == "transformer_engine":
            return _by_transformer_engine(self._transformer_engine, query, key, value, sinks)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if backend == "sdpa":
            mixed = _by_sdpa(query, key, value)
        elif backend == "flex":
            mixed = _by_flex(query, key, value, sinks, positions.block_masks[self.window])
        else:
            mixed = plain_attention(query, key, value, sinks, self.window, positions.documents)
        return mixed.transpose(1, 2)

    @cached_property
    def _transformer_engine(self) -> Any:
        return _dot_product_attention(self._model, self.window, self._tp)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """The formula itself, in at least float32.

    Args:
        query: (batch, heads, sequence, kv_channels).
        key: (batch, groups, sequence, kv_channels), as is ``value``.
        sinks: (heads,)
        window: how many positions a position sees, itself included; 0 is all before it.
        documents: int64 of shape (batch, sequence); a position sees its own document only.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (tensor.to(dtype).repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query.to(dtype) @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~_visible(length, window, documents, query.device), -math.inf)
    if sinks is not None:
        column = sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    return (scores.softmax(-1)[..., :length] @ value).to(query.dtype)


def _visible(length: int, window: int, documents: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Whether a query sees a key: bool of shape (1 or batch, 1, sequence, sequence)."""
    place = torch.arange(length, device=device)
    past = place.unsqueeze(-1) - place
    visible = (past >= 0) & (past < window) if window else past >= 0
    if documents is None:
        return visible.view(1, 1, length, length)
    return (visible & (documents.unsqueeze(-1) == documents.unsqueeze(-2))).unsqueeze(1)


def _by_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    if query.device.type == "cpu":
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    if grouped and query.dtype == torch.float32:  # the one fused kernel of float32 takes as many keys as queries
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
        grouped = False
    with sdpa_kernel(FUSED_KERNELS, set_priority=True):
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def _by_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, mask: BlockMask
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    attend = _compiled_flex()
    if sinks is None:
        return cast(torch.Tensor, attend(query, key, value, block_mask=mask, enable_gqa=grouped))
    mixed, aux = attend(query, key, value, block_mask=mask, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
    scale = torch.sigmoid(aux.lse - sinks.view(1, -1, 1))
    return cast(torch.Tensor, (mixed * scale.unsqueeze(-1)).to(query.dtype))


def _by_transformer_engine(
    attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    if sinks is not None:
        attention.softmax_offset = sinks
    mixed: torch.Tensor = attention(query, key, value).unflatten(-1, query.shape[2:])
    return mixed


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


@lru_cache(maxsize=1)
def _compiled_block_mask() -> Any:
    # Uncompiled it builds the matrix that blocks are to spare.
    return torch.compile(create_block_mask, dynamic=False)


@lru_cache(maxsize=8)
def _causal_block_mask(window: int, length: int, device: torch.device) -> BlockMask:
    def visible(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (query - key < window) if window else query >= key

    return cast(BlockMask, _compiled_block_mask()(visible, None, None, length, length, device=str(device)))


def _document_block_mask(window: int, documents: torch.Tensor) -> BlockMask:
    def visible(batch: torch.Tensor, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        past = (query >= key) & (query - key < window) if window else query >= key
        return past & (documents[batch, query] == documents[batch, key])

    size, length = documents.shape
    make = _compiled_block_mask()
    return cast(BlockMask, make(visible, size, None, length, length, device=str(documents.device)))


def _dot_product_attention(model: Model, window: int, tp: int) -> Any:
    setting = "training.attention_backend='transformer_engine'"
    fix = "install it, or set training.attention_backend=auto"
    module = import_package("transformer_engine.pytorch", "transformer-engine", setting, fix)
    attention = module.DotProductAttention(
        num_attention_heads=model.num_attention_heads // tp,
        kv_channels=model.kv_channels,
        num_gqa_groups=model.num_query_groups // tp,
        qkv_format="bshd",
        attn_mask_type="causal",
        # Positions seen before its own, and after.
        window_size=(window - 1, 0) if window else (-1, 0),
        softmax_type="learnable" if model.attention_sinks else "vanilla",
    )
    if model.attention_sinks:
        del attention.softmax_offset  # its own sinks; ours are handed in with each call
    return attention
