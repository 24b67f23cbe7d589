"""The matrix products of linear layers and experts, in the precision of their operands. fp8_products.py has those in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from launch.contract.spec import Training
from launch.engines.packages import import_package
from launch.engines.torch_native.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallel
from launch.engines.torch_native.products.grouped_mm import grouped_mm

ExpertProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]
"""Multiplies each row by the matrix of its expert: (rows, weight, ends, capacity) -> (R, outputs).

Rows are (R, inputs), sorted by expert. The weight is (experts, inputs, outputs), or (experts, outputs, inputs) if
``Products.outputs_first``. Ends are int32 (experts,): the end of each expert's rows. The capacity is the number of rows of each
expert if all have the same, otherwise None.
"""


class Products:
    """Builds the linear layers of a decoder. Passes run in its contexts, which only products in 8 bits need."""

    outputs_first = False
    """Whether matrices of experts are (outputs, inputs)."""

    def column_parallel(self, inputs: int, sections: tuple[int, ...], bias: bool, tp: TensorParallel) -> nn.Module:
        return ColumnParallelLinear(inputs, sections, bias, tp)

    def row_parallel(self, inputs: int, outputs: int, bias: bool, tp: TensorParallel) -> nn.Module:
        return RowParallelLinear(inputs, outputs, bias, tp)

    def of_experts(self, experts: int, inputs: int, outputs: int) -> ExpertProduct:
        """Return the product for ``experts`` of this rank."""
        return multiply_experts

    def forward_pass(self, is_first_microbatch: bool) -> AbstractContextManager[None]:
        """Return the context of a forward pass, uncaptured, captured with its step, or by replays of its layers.

        Args:
            is_first_microbatch: whether no earlier pass of the step used these weights.
        """
        return nullcontext()

    def end_backward_pass(self) -> None:
        """Call this after the backward pass of each microbatch."""

    def capture_of_layers(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Return the context in which layers of ``modules`` are captured, apart from a step."""
        return nullcontext()

    @property
    def callable_settings(self) -> Mapping[str, Any]:
        """Arguments for Transformer Engine's ``make_graphed_callables``."""
        return {}

    def kernel_warmup(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Return the context of passes through ``modules`` before the first step."""
        return nullcontext()

    def state(self, modules: Iterable[nn.Module]) -> list[torch.Tensor]:
        """Return what passes through ``modules`` leave for later passes."""
        return []


def multiply_experts(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, capacity: int | None
) -> torch.Tensor:
    """Compute an :data:`ExpertProduct` in the precision of its operands."""
    if capacity is None:
        return grouped_mm(rows, weight, ends)
    return torch.bmm(rows.view(len(weight), capacity, -1), weight).flatten(0, 1)


def make_products(training: Training) -> Products:
    """Return the products of ``training``.

    Raises:
        EnvironmentFault: they are in 8 bits, and Transformer Engine cannot be imported.
    """
    if training.fp8 == "none":
        return Products()
    fix = "install it, or set training.fp8=none"
    import_package("transformer_engine.pytorch", "transformer-engine", f"training.fp8={training.fp8!r}", fix)
    # Import it only here, because it imports Transformer Engine.
    from launch.engines.torch_native.products.fp8_products import Fp8Products

    return Fp8Products(training)
