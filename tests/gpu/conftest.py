import os
import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def compiled_afresh() -> Iterator[None]:
    """Reset Dynamo. One process compiles the same functions for all tests, and Dynamo rejects a function that it has
    compiled too often."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # This imports Inductor, which warns about PyTorch's own deprecations.
        torch.compiler.reset()


@pytest.fixture(autouse=True)
def usable_device() -> Iterator[None]:
    """End a process in which a capture failed, because it would block all later work. Another worker of xdist replaces
    it."""
    yield
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except torch.AcceleratorError:
        os._exit(1)
