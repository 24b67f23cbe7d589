"""Packed sequences in Megatron-Core's format ``thd``: one row of tokens, and the borders of the documents in it."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams


def document_borders(tokens: torch.Tensor, eod_token: int, most: int) -> torch.Tensor:
    """Return where documents begin, and where the last one ends: int32 (..., most + 1).

    Every sequence gets ``most`` documents, the last of which may be empty. So a graph reads the same number of borders in each
    step, as with ``pad_cu_seqlens`` of Megatron Bridge 0.6.2. The host waits for nothing. A job refuses sequences with more
    documents before its first step (launch/train/data_loader.py).

    Args:
        tokens: int64 (..., sequence). A document ends after each ``eod_token``.
    """
    length = tokens.shape[-1]
    ends = torch.arange(1, length + 1, device=tokens.device)
    inner = torch.where(tokens[..., :-1] == eod_token, ends[:-1], length).sort(-1).values[..., : most - 1]
    borders = torch.nn.functional.pad(inner, (1, 0))
    return torch.nn.functional.pad(borders, (0, most + 1 - borders.shape[-1]), value=length).to(torch.int32)


def packed_parameters(borders: torch.Tensor, length: int) -> PackedSeqParams:
    """Return what Transformer Engine's attention and rotary embeddings need.

    Args:
        borders: int32 (documents + 1,).
        length: the length of the longest possible document. The host would read a length of its own from the device.
    """
    return PackedSeqParams("thd", borders, borders, max_seqlen_q=length, max_seqlen_kv=length)
