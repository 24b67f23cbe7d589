"""Layers of Megatron-Core whose outputs a step check observes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from launch.contract.records.step_check import LayerResult
from launch.engines.layer_outputs import LayerOutputs


class ObservedLayers:
    """The outputs of layers in checked passes.

    Attributes:
        keeps: whether passes keep the outputs.
    Args:
        captures: whether a graph contains the whole step, and therefore the copies.
    """

    def __init__(self, num_layers: int, captures: bool) -> None:
        self.keeps = False
        self._captures = captures
        self._num_layers = num_layers
        self._made = self._captured = LayerOutputs(num_layers)
        self._calls: Counter[tuple[int, bool]] = Counter()

    @property
    def kept(self) -> Mapping[LayerResult, torch.Tensor]:
        """The outputs of the last passes. If only a graph of the whole step ran, the outputs that it wrote."""
        return self._made.kept or self._captured.kept

    def forget(self) -> None:
        """Forget the last passes. Call this before new passes."""
        self._made = LayerOutputs(self._num_layers)
        self._calls.clear()

    def observe(self, position: int, output: torch.Tensor) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and self._captures:
            self._captured = self._made
        if self._captures if capturing else self.keeps:
            # With recomputation, each micro-batch calls a layer twice: first without gradients, then with them.
            call = position, torch.is_grad_enabled()
            self._made.observe(self._calls[call], position, output)
            self._calls[call] += 1

    def attach(self, chunks: Iterable[Any]) -> None:
        """Observe the embedding, the decoder layers and the final norm of ``chunks``."""
        for chunk in chunks:
            model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
            if model.pre_process:
                self._hook(model.embedding, 0)
            for layer in model.decoder.layers:
                _observe_calls(layer, partial(self.observe, layer.layer_number))
            # A hybrid model's stack has another name for its final norm.
            norm = getattr(model.decoder, "final_norm", None) or getattr(model.decoder, "final_layernorm", None)
            if norm is not None:
                self._hook(norm, self._num_layers + 1)

    def _hook(self, module: nn.Module, position: int) -> None:
        module.register_forward_hook(lambda module, inputs, output: self.observe(position, output))


def _observe_calls(layer: nn.Module, observe: Callable[[torch.Tensor], None]) -> None:
    """Call ``observe`` with each output of ``layer``. Hooks would not do: a graph that replaces the layer runs none of them."""
    kind: Any = type(layer)

    def call(layer: Any, *inputs: Any, **named: Any) -> Any:
        outputs = kind.__call__(layer, *inputs, **named)
        # A Mamba layer returns its output alone.
        observe(outputs[0] if isinstance(outputs, tuple) else outputs)
        return outputs

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})
