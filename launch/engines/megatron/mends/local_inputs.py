"""Keep the input of a local graph until its backward pass has read it.

Megatron-Core 0.16.1 returns the buffer to a pool too early (transformer/cuda_graphs.py:995). This repair never returns it, so
graphs take more memory. Megatron-LM pull request 4433 removed the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.transformer import cuda_graphs


@contextmanager
def inputs_kept() -> Iterator[None]:
    pool: Any = cuda_graphs.TensorReusePool
    insert = pool.insert
    pool.insert = lambda self, buffer: None
    yield
    pool.insert = insert
