"""Capture fused weight gradients so that a graph adds them in every micro-batch.

Transformer Engine 2.11 marks all modules as in the first micro-batch before it captures (pytorch/graph.py:484). Their products
then overwrite gradients, although one graph replays all micro-batches. Here a captured layer is in a later micro-batch. Its
products add, and the gradients are zero before the first one. Transformer Engine pull request 2715 removed the mark (2.14).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer

from launch.engines.graph_protocol import replaced


@contextmanager
def gradients_added() -> Iterator[None]:
    capture = TransformerLayer._te_cuda_graph_capture

    def with_gradients_added(layer: Any, *arguments: Any, **named: Any) -> Any:
        for module in layer.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = False
        return capture(layer, *arguments, **named)

    with replaced(TransformerLayer, "_te_cuda_graph_capture", with_gradients_added):
        yield
