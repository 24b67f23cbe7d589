"""One forward and backward pass of each chunk before any transfer between ranks is under way, on made-up inputs.

A kernel that is launched for the first time is loaded, and cuDNN plans and Triton kernels are made, for all of which CUDA
waits until the device is idle. If a receive is under way then, whose sender waits for this rank, both wait for ever
(CUDA programming guide, lazy loading, "concurrent execution"; seen on H200s with a pipeline of two).
launch.train.worker has CUDA load the kernels of libraries when it starts; what is made on the way is made here. Nothing
is kept: no gradient is added up, and nothing random is drawn from the run's own generators. It comes before masters and
main gradients are there, so that gradients held whole take no more memory than these will.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launch.contract.spec import RunSpec
from launch.engines.torch_native.decoder import Decoder


def warm_up_kernels(spec: RunSpec, chunks: Sequence[Decoder], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """
    Args:
        shape: of the activations between stages.
    """
    for chunk in chunks:
        device = next(chunk.parameters()).device
        generator = torch.Generator(device).manual_seed(0)
        size = (spec.training.micro_batch_size, spec.training.sequence_length + 1)
        # Random ones: equal tokens would all go to the same experts.
        tokens = torch.randint(spec.model.vocab_size, size, device=device, generator=generator)
        x = None
        if not chunk.is_first:
            x = torch.randn(shape, device=device, dtype=dtype, generator=generator).requires_grad_()
        y, routed = chunk.decode(tokens, x)
        output = chunk.losses(y, routed, tokens).objective if chunk.is_last else y.sum()
        torch.autograd.grad(output, list(chunk.parameters()))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
