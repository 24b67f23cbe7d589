"""Megatron-Core's data parallelism: the hooks by which ranks reduce gradients and gather parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from launch.contract.spec import RunSpec
from launch.engines.megatron.model import Configuration
from launch.megatron_config.transformer_config import data_parallel_settings


def wrap_with_ddp(spec: RunSpec, config: Configuration, chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Wrap each of ``chunks`` with its gradient buffers, and set the functions with which the schedule reduces and gathers.

    These functions are the same as in Megatron-LM's training loop (megatron/training/training.py, ``train``). Pipeline stages
    begin gradient reductions together. Interleaved stages also begin parameter gathers together.
    """
    settings = DistributedDataParallelConfig(**data_parallel_settings(spec))
    wrapped = [
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    if settings.overlap_grad_reduce:
        config.no_sync_func = _unwrap_single([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _unwrap_single([chunk.start_grad_sync for chunk in wrapped])
    if settings.align_param_gather:
        config.param_sync_func = _unwrap_single([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def _unwrap_single(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


@contextmanager
def disable_forward_hooks(chunks: Sequence[Any]) -> Iterator[None]:
    """Disable the hooks by which forward passes wait for gathered parameters, inside the context.

    Transformer Engine does not capture modules with hooks. The values of weights do not matter in a capture.
    """
    gathering = [chunk for chunk in chunks if chunk.use_forward_hook]
    for chunk in gathering:
        chunk.disable_forward_pre_hook(param_sync=False)
    yield
    for chunk in gathering:
        chunk.enable_forward_pre_hook()
