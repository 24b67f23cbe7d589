"""Add the bias of a router in the precision of its output.

Megatron-Core passes a bf16 bias to a product of Transformer Engine with fp32 output (transformer/moe/moe_utils.py, 0.16.1 :1193,
0.19.2 :1327). cuBLASLt reads the bias as fp32 then: two experts' biases as one number, and beyond the end of the tensor for the
second half of the experts (Transformer Engine issue 3562). Losses then depend on what other tensors left in memory. Megatron-LM
converts the bias on its main branch; no release up to 0.19.2 does. With Transformer Engine 2.10 or newer, Megatron-Core 0.16 does
not find that product, and computes with torch.addmm, which is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils

from launch.engines.graph_protocol import replaced


def uses_product() -> bool:
    """Return whether routers compute with the product of Transformer Engine."""
    return getattr(moe_utils, "te_general_gemm", None) is not None


@contextmanager
def router_bias_converted() -> Iterator[None]:
    product = moe_utils.te_general_gemm

    def with_bias_of_output(
        weight: torch.Tensor, rows: torch.Tensor, output: torch.dtype, *, bias: torch.Tensor | None = None, **named: Any
    ) -> Any:
        return product(weight, rows, output, bias=None if bias is None else bias.to(output), **named)

    with replaced(moe_utils, "te_general_gemm", with_bias_of_output):
        yield
