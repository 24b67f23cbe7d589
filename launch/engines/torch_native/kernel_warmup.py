"""Kernel warm-up: one forward and backward pass of each chunk, before any transfer between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launch.contract.spec import RunSpec
from launch.engines.torch_native.decoder import Decoder


def warm_up_kernels(spec: RunSpec, chunks: Sequence[Decoder], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Load kernels, and build cuDNN plans and Triton kernels, by one pass of each chunk over random inputs.

    To load a kernel, CUDA waits for an idle device. If a receive is in flight whose sender waits for this rank, both would wait
    forever (CUDA programming guide, lazy loading, "concurrent execution"; observed with two pipeline stages on H200s).
    launch.train.worker preloads the kernels of libraries. This function covers all other kernels.

    Call it before master weights and main gradients exist. The whole gradients of these passes then fit into the memory that
    those take later. Results are discarded. The engine seeds its random numbers afterwards.

    Args:
        shape: shape of activations between stages, (microbatch size, sequence or this rank's shard, hidden_size).
        dtype: type of these activations.
    """
    for chunk in chunks:
        device = next(chunk.parameters()).device
        generator = torch.Generator(device).manual_seed(0)
        size = (spec.training.micro_batch_size, spec.training.sequence_length + 1)
        # Random tokens, because equal tokens would all go to the same experts.
        tokens = torch.randint(spec.model.vocab_size, size, device=device, generator=generator)
        x = None
        if not chunk.is_first:
            x = torch.randn(shape, device=device, dtype=dtype, generator=generator).requires_grad_()
        with chunk.context.products.kernel_warmup(list(chunk.modules())):
            y, routed = chunk.decode(tokens, x)
            output = chunk.losses(y, routed, tokens).objective if chunk.is_last else y.sum()
            torch.autograd.grad(output, list(chunk.parameters()))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
