"""Keep the input of a local graph until its backward pass has read it.

Megatron-Core 0.16.1 returns the buffer to a pool too early (transformer/cuda_graphs.py:995). This repair never returns it, so
graphs take more memory. Megatron-LM pull request 4433 removed the pool.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from megatron.core.transformer import cuda_graphs

from launch.engines.graph_protocol import replaced


def inputs_kept() -> AbstractContextManager[None]:
    return replaced(cuda_graphs.TensorReusePool, "insert", lambda self, buffer: None)
