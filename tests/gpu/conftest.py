import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def compiled_afresh() -> Iterator[None]:
    """One process compiles the same functions for all tests, and Dynamo ends one that it has compiled too often."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports Inductor, which warns of PyTorch's own deprecations
        torch.compiler.reset()
