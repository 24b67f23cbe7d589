"""Matrix products in 8 bits, by the modules of Transformer Engine 2.11 (``training.fp8``).

Only products of layers are in 8 bits: e4m3 forward, e5m2 for gradients. Weights, attention, routers, embedding and head stay in
bfloat16. This file imports Transformer Engine, so only runs in 8 bits import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from launch.contract.spec import Training
from launch.engines.fp8_scales import delayed_scaling, fp8_scales
from launch.engines.torch_native.parallel.sharding import Sharding
from launch.engines.torch_native.parallel.tensor_parallel import TensorParallel
from launch.engines.torch_native.products.products import ExpertProduct, Products


@dataclass(eq=False)
class _WeightCasts:
    """Whether the next products cast their weights to 8 bits, or use the casts of the step's first microbatch."""

    is_first_microbatch: bool | None = None
    """What Transformer Engine's modules take by this name. None: each product casts its weight and keeps no cast."""


class Fp8Products(Products):
    """Builds Transformer Engine's modules, and updates the scales of delayed scaling at the same places in every run.

    Forward scales change at the end of a forward pass, and backward scales at the end of a backward pass. On its own,
    Transformer Engine would change the latter in the backward pass of the first module. That does not happen in PyTorch's
    callables, and in callables that begin with a GroupedLinear it happens once for each.

    Each rank has its own scales, so ranks need not communicate.
    """

    outputs_first = True

    def __init__(self, training: Training) -> None:
        # Forget the scales of an engine that ran before in this process.
        FP8GlobalStateManager.reset()
        # As Megatron-Core's defaults, but without a reduction over ranks.
        delayed = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent", reduce_amax=False)
        self._recipe = delayed if training.fp8 == "delayed" else Float8CurrentScaling()
        self._caches_weights = training.fp8_weight_caching
        self._casts = _WeightCasts()

    def column_parallel(self, inputs: int, sections: tuple[int, ...], bias: bool, tp: TensorParallel) -> nn.Module:
        layer: nn.Module = Fp8ColumnParallelLinear(inputs, sections, bias, tp, self._casts)
        return layer

    def row_parallel(self, inputs: int, outputs: int, bias: bool, tp: TensorParallel) -> nn.Module:
        layer: nn.Module = Fp8RowParallelLinear(inputs, outputs, bias, tp, self._casts)
        return layer

    def of_experts(self, experts: int, inputs: int, outputs: int) -> ExpertProduct:
        product: ExpertProduct = Fp8ExpertProduct(experts, inputs, outputs, self._casts)
        return product

    @contextmanager
    def forward_pass(self, is_first_microbatch: bool) -> Iterator[None]:
        if self._caches_weights:
            self._casts.is_first_microbatch = is_first_microbatch
            if FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() is not None:
                FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(not is_first_microbatch)
        with te.autocast(recipe=self._recipe):
            _take_first_module()
            yield

    def end_backward_pass(self) -> None:
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)

    @contextmanager
    def capture_of_layers(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """See the base class. The graphs of a layer are the same for all microbatches, so they read on the device whether to cast
        weights (``skip_fp8_weight_update_tensor``). Scales stay as they were."""
        if self._caches_weights:
            FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
        scales = fp8_scales(modules)
        kept = [scale.clone() for scale in scales]
        with self._without_updates():
            yield
        for scale, value in zip(scales, kept, strict=True):
            scale.copy_(value)

    @property
    def callable_settings(self) -> Mapping[str, Any]:
        return {"enabled": True, "recipe": self._recipe}

    @contextmanager
    def kernel_warmup(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        with self._without_updates():
            yield
        for state in delayed_scaling(modules):
            state.scale.fill_(1.0)
            state.amax_history.zero_()

    def state(self, modules: Iterable[nn.Module]) -> list[torch.Tensor]:
        return fp8_scales(modules)

    @contextmanager
    def _without_updates(self) -> Iterator[None]:
        """Run passes in 8 bits that change no scale."""
        with te.autocast(recipe=self._recipe, _graph=True):
            _take_first_module()
            yield


def _take_first_module() -> None:
    """Keep the first module of the current context from changing backward scales."""
    FP8GlobalStateManager.is_first_fp8_module()


class Fp8ColumnParallelLinear(te.Linear):  # type: ignore[misc]
    """A ColumnParallelLinear (parallel/tensor_parallel.py) in 8 bits."""

    def __init__(
        self, inputs: int, sections: tuple[int, ...], bias: bool, tp: TensorParallel, casts: _WeightCasts
    ) -> None:
        super().__init__(inputs, sum(sections) // tp.size, bias=bias, device="meta")
        self.tp, self._casts = tp, casts
        self.shardings = dict.fromkeys(("weight", "bias") if bias else ("weight",), Sharding("tp", 0, sections))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = super().forward(self.tp.enter(x), self._casts.is_first_microbatch)
        return product


class Fp8RowParallelLinear(te.Linear):  # type: ignore[misc]
    """A RowParallelLinear (parallel/tensor_parallel.py) in 8 bits."""

    def __init__(self, inputs: int, outputs: int, bias: bool, tp: TensorParallel, casts: _WeightCasts) -> None:
        # With ``return_bias`` the product leaves out the bias, which is added once, to the sum over ranks.
        super().__init__(inputs // tp.size, outputs, bias=bias, return_bias=True, device="meta")
        self.tp, self._casts = tp, casts
        self.shardings = {"weight": Sharding("tp", 1)} | ({"bias": tp.outside_sharding} if bias else {})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product, bias = super().forward(x, self._casts.is_first_microbatch)
        total = self.tp.leave(product)
        return total if bias is None else total + bias


class Fp8ExpertProduct(te.GroupedLinear):  # type: ignore[misc]
    """An ExpertProduct in 8 bits. The host reads the rows of each expert, unless experts have a capacity.

    The weights are one parameter of the caller, not one for each expert as in the base class.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, casts: _WeightCasts) -> None:
        super().__init__(experts, inputs, outputs, bias=False, device="meta")
        for number in range(experts):
            delattr(self, f"weight{number}")
        self._casts = casts
        self._weights: tuple[torch.Tensor, ...] = ()
        # Kernels need multiples of 16 rows.
        self._pad, self._unpad = te.Fp8Padding(experts), te.Fp8Unpadding(experts)

    def forward(
        self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, capacity: int | None
    ) -> torch.Tensor:
        counts = _rows_by_expert(ends) if capacity is None else [capacity] * len(weight)
        padded, padded_counts = self._pad(rows, counts)
        self._weights = weight.unbind(0)
        product = super().forward(padded, padded_counts, self._casts.is_first_microbatch)
        self._weights = ()
        result: torch.Tensor = self._unpad(product, counts)
        return result

    def get_weight_workspace(self, **settings: Any) -> Any:
        """Cast a weight. If a graph of a layer keeps casts, let it read on the device whether to cast, as te.Linear does."""
        skips = FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()
        if skips is not None and FP8GlobalStateManager.fp8_graph_capturing():
            settings["skip_update_flag"] = skips
        return super().get_weight_workspace(**settings)

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        return list(self._weights)


def _rows_by_expert(ends: torch.Tensor) -> list[int]:
    """Return the number of rows of each expert. The host waits for the device here."""
    last: list[int] = ends.tolist()
    return [end - start for start, end in zip([0, *last[:-1]], last, strict=True)]
