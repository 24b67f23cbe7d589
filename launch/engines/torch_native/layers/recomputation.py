"""Keep fewer activations for a backward pass, which recomputes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Function = TypeVar("Function", bound=Callable[..., Any])


def recompute_if(recomputed: bool, function: Function, draws: bool = False) -> Function:
    """Return ``function``. If ``recomputed``, it keeps only its inputs for its backward pass.

    Args:
        draws: whether ``function`` draws random numbers. The backward pass then draws the same ones again.
    """

    def run(*inputs: Any) -> Any:
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=draws)

    return cast(Function, run) if recomputed else function


@contextmanager
def dropping(output: torch.Tensor, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Iterator[None]:
    """Let autograd keep ``inputs`` instead of ``output`` within this context. ``output`` is ``function(*inputs)``."""
    held = [given.detach().requires_grad_(given.requires_grad) for given in inputs]
    storage = output.untyped_storage().data_ptr()

    def pack(saved: torch.Tensor) -> Any:
        if saved.untyped_storage().data_ptr() != storage:
            return saved
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        # Enable gradients, because without them a compiled function rounds differently.
        with torch.enable_grad():
            again = function(*held)
        return again.detach().as_strided(*packed)

    with saved_tensors_hooks(pack, unpack):
        yield
