"""What layers give in the passes of a step, and the gradients of it."""

from __future__ import annotations

from functools import partial

import torch

from launch.contract.records.step_check import LayerResult, layer_names


class LayerOutputs:
    """Copies outputs of a model's layers, and the gradients of these, as micro-batches run through them.

    The copies may be captured: each replay then writes them again. In bytes they are twice the outputs of all micro-batches.

    Attributes:
        kept: of the layers on this rank, each in the shape of the layer's output.
    """

    def __init__(self, num_layers: int) -> None:
        self._names = layer_names(num_layers)
        self.kept: dict[LayerResult, torch.Tensor] = {}

    def observe(self, micro_batch: int, position: int, output: torch.Tensor) -> None:
        """Keep ``output``, and its gradient once a backward pass reaches it. What is computed again counts once."""
        self._keep(LayerResult(self._names[position], position, micro_batch, False), output)
        if output.requires_grad:
            gradient = LayerResult(self._names[position], position, micro_batch, True)
            output.register_hook(partial(self._keep, gradient))

    def _keep(self, result: LayerResult, tensor: torch.Tensor) -> None:
        if result not in self.kept:
            # Graphs and later layers may overwrite the tensor itself.
            self.kept[result] = tensor.detach().clone()
