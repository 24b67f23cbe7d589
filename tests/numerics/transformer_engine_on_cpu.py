"""Imitate Transformer Engine's modules in 8 bits without a GPU: their scales, casts and global state, by plain PyTorch.

A product casts its operands to float8 and back, and multiplies what remains. All else follows version 2.11: when a scale is
recorded and when it changes, which module is the first of a context, and what captured code reads on the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.numerics.graphed_callables_on_cpu import Graphed

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True)
class DelayedScaling:
    amax_history_len: int
    amax_compute_algo: str
    reduce_amax: bool

    def __post_init__(self) -> None:
        assert (self.amax_history_len, self.amax_compute_algo, self.reduce_amax) == (1, "most_recent", False)


@dataclass(frozen=True)
class Float8CurrentScaling:
    pass


class Delayed:
    """The scales of some tensors, and their largest numbers since the last update."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.scale = torch.ones(count)
        self.amax_history = torch.zeros(1, count)

    def cast(self, x: torch.Tensor, number: int) -> torch.Tensor:
        amax = self.amax_history[0, number]
        amax.copy_(torch.maximum(amax, x.abs().amax()) if x.numel() else amax)
        return round_to(x, self.scale[number], self.dtype)

    def update(self) -> None:
        known = self.amax_history[0] > 0
        self.scale.copy_(torch.where(known, LARGEST[self.dtype] / self.amax_history[0], self.scale))
        self.amax_history.zero_()


class Current:
    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def cast(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return round_to(x, LARGEST[self.dtype] / x.abs().amax(), self.dtype) if x.numel() else x


def round_to(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = LARGEST[dtype]
    return ((x.float() * scale).clamp(-largest, largest).to(dtype).float() / scale).to(x.dtype)


class FP8GlobalStateManager:
    """The global state, with counts of updates and of casts of weights."""

    depth, recipe, capturing, is_first = 0, None, False, False
    skip: torch.Tensor | None = None
    states: dict[bool, list[Any]]
    updates: dict[bool, int]
    weight_casts: int

    @classmethod
    def reset(cls) -> None:
        cls.depth, cls.recipe, cls.capturing, cls.is_first, cls.skip = 0, None, False, False, None
        cls.states, cls.updates, cls.weight_casts = {True: [], False: []}, {True: 0, False: 0}, 0

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        was, cls.is_first = cls.is_first, False
        return was

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return cls.capturing

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> torch.Tensor | None:
        return cls.skip

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        cls.skip = torch.empty(1) if cls.skip is None else cls.skip
        cls.skip.fill_(skip)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        cls.updates[forward] += 1
        for state in cls.states[forward]:
            state.update()


@contextmanager
def autocast(recipe: Any, _graph: bool = False) -> Iterator[None]:
    one = FP8GlobalStateManager
    kept = one.recipe, one.capturing, one.is_first
    one.recipe, one.capturing = recipe, _graph
    if one.depth == 0:
        one.is_first = True
    one.depth += 1
    try:
        yield
    finally:
        one.recipe, one.capturing, one.is_first = kept
        one.depth -= 1
        if one.depth == 0 and not _graph:
            one.reduce_and_update_fp8_tensors(forward=True)


def make_graphed_callables(
    model: nn.Module, sample_args: tuple[torch.Tensor, ...], *, enabled: bool, recipe: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that computes ``model`` as its graphs do: with the scales as they are, whatever the context.

    The context around a replay updates them: at its end, and after the backward pass of its first module.

    Raises:
        RuntimeError: a parameter's gradient accumulator is still that of an eager pass, whose graph is alive. On a GPU it
            belongs to the default stream.
    """
    if any("eager" in gradient_accumulator(parameter).metadata for parameter in model.parameters()):
        raise RuntimeError("operation would make the legacy stream depend on a capturing blocking stream")
    assert enabled and not any(module._forward_hooks for module in model.modules())

    def replay(x: torch.Tensor) -> torch.Tensor:
        first = FP8GlobalStateManager.is_first_fp8_module()
        with autocast(recipe, _graph=True):
            FP8GlobalStateManager.is_first = first
            outputs: torch.Tensor = model(x)
        return outputs

    return replay


def gradient_accumulator(parameter: nn.Parameter) -> Any:
    """Return the node that accumulates the gradient. It lives as long as a graph contains it."""
    view: Any = parameter.view_as(parameter)
    return view.grad_fn.next_functions[0][0]


class Product(torch.autograd.Function):
    """One product of a module, whose scales have the index ``number``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, module: Base, number: int, is_first: bool | None
    ) -> torch.Tensor:
        skip = FP8GlobalStateManager.skip if FP8GlobalStateManager.capturing and module.reads_flag else None
        is_first = is_first if skip is None else False
        x = module.fp8_meta["scaling_fwd"].cast(x, 3 * number)
        cast = module.get_weight_workspace(
            tensor=weight, quantizer=3 * number + 1, cache_name=None if is_first is None else f"weight{number}",
            update_workspace=is_first is None or is_first, skip_update_flag=skip, workspace_dtype=x.dtype,
        )  # fmt: skip
        ctx.save_for_backward(x, cast.clone())
        ctx.module, ctx.number, ctx.is_first = module, number, FP8GlobalStateManager.is_first_fp8_module()
        return x @ cast.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        gradient = ctx.module.fp8_meta["scaling_bwd"].cast(gradients[0], 2 * ctx.number)
        if ctx.is_first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2), None, None, None


class Base(nn.Module):
    reads_flag = False

    def __init__(self, products: int) -> None:
        super().__init__()
        self.products, self.fp8_meta = products, {}
        self.casts: dict[str, torch.Tensor] = {}
        self.captured_with: list[bool | None] = []

    def begin(self, is_first: bool | None) -> bool | None:
        """Return ``is_first``, in replays that of the capture."""
        one = FP8GlobalStateManager
        assert one.recipe is not None, "a product in 8 bits runs outside of a context"
        if not self.fp8_meta:
            make = Delayed if isinstance(one.recipe, DelayedScaling) else Current
            self.fp8_meta["scaling_fwd"] = make(3 * self.products, torch.float8_e4m3fn)
            self.fp8_meta["scaling_bwd"] = make(2 * self.products, torch.float8_e5m2)
        if not one.capturing and isinstance(one.recipe, DelayedScaling):
            for forward, name in ((True, "scaling_fwd"), (False, "scaling_bwd")):
                if not any(state is self.fp8_meta[name] for state in one.states[forward]):
                    one.states[forward].append(self.fp8_meta[name])
        if one.capturing and not self.captured_with:
            self.captured_with.append(is_first)
        return self.captured_with[0] if one.capturing else is_first

    def get_weight_workspace(
        self, *, tensor: torch.Tensor, quantizer: int, cache_name: str | None, update_workspace: bool,
        skip_update_flag: torch.Tensor | None, workspace_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        known = None if cache_name is None else self.casts.get(cache_name)
        update = update_workspace if skip_update_flag is None else not skip_update_flag.item()
        if known is not None and not update:
            return known
        FP8GlobalStateManager.weight_casts += 1
        cast: torch.Tensor = self.fp8_meta["scaling_fwd"].cast(tensor.detach(), quantizer)
        if cache_name is not None:
            self.casts[cache_name] = cast
        return cast


class Linear(Base):
    reads_flag = True

    def __init__(self, inputs: int, outputs: int, bias: bool, device: str, return_bias: bool = False) -> None:
        super().__init__(1)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, device=device)) if bias else None
        self.return_bias = return_bias

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        is_first = self.begin(is_first_microbatch)
        product: torch.Tensor = Product.apply(x, self.weight, self, 0, is_first)  # type: ignore[no-untyped-call]
        if not FP8GlobalStateManager.capturing and self.weight.requires_grad:
            gradient_accumulator(self.weight).metadata["eager"] = True
        if self.return_bias:
            return product, self.bias
        return product if self.bias is None else product + self.bias


class GroupedLinear(Base):
    def __init__(self, count: int, inputs: int, outputs: int, bias: bool, device: str) -> None:
        super().__init__(count)
        for number in range(count):
            setattr(self, f"weight{number}", nn.Parameter(torch.empty(outputs, inputs, device=device)))

    def forward(self, rows: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> torch.Tensor:
        is_first = self.begin(is_first_microbatch)
        assert sum(m_splits) == len(rows) and not any(count % 16 for count in m_splits), m_splits
        weights = self._get_weight_tensors()
        pieces = zip(rows.split(m_splits), weights, strict=True)
        apply: Any = Product.apply
        return torch.cat([apply(piece, weight, self, i, is_first) for i, (piece, weight) in enumerate(pieces)])

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        return [getattr(self, f"weight{number}") for number in range(self.products)]


class Fp8Padding(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()

    def forward(self, rows: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        pads = [-count % 16 for count in m_splits]
        padded = [
            nn.functional.pad(piece, (0, 0, 0, pad)) for piece, pad in zip(rows.split(m_splits), pads, strict=True)
        ]
        return torch.cat(padded), [len(piece) for piece in padded]


class Fp8Unpadding(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()

    def forward(self, rows: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        pieces = rows.split([count + -count % 16 for count in m_splits])
        return torch.cat([piece[:count] for piece, count in zip(pieces, m_splits, strict=True)])


def module(name: str, **content: Any) -> dict[str, ModuleType]:
    made = ModuleType(name)
    made.__path__ = []
    vars(made).update(content)
    return {name: made}


MODULES = {
    **module("transformer_engine"),
    **module("transformer_engine.common"),
    **module(
        "transformer_engine.common.recipe", DelayedScaling=DelayedScaling, Float8CurrentScaling=Float8CurrentScaling
    ),
    **module(
        "transformer_engine.pytorch", Linear=Linear, GroupedLinear=GroupedLinear, Fp8Padding=Fp8Padding,
        Fp8Unpadding=Fp8Unpadding, autocast=autocast, make_graphed_callables=make_graphed_callables,
    ),
    **module("transformer_engine.pytorch.quantization", FP8GlobalStateManager=FP8GlobalStateManager),
}  # fmt: skip
IMPORTS_IT = "launch.engines.torch_native.products.fp8_products"


@contextmanager
def transformer_engine_on_cpu() -> Iterator[None]:
    """Import products in 8 bits anew, with these modules. Replays of layers read on the device what captured code reads there."""
    replay = Graphed.forward

    def as_captured(graphed: Graphed, inputs: Any) -> Any:
        with mock.patch.object(FP8GlobalStateManager, "capturing", True):
            return replay(graphed, inputs)

    with mock.patch.dict(sys.modules, MODULES), mock.patch.object(Graphed, "forward", as_captured):
        sys.modules.pop(IMPORTS_IT, None)
        yield
