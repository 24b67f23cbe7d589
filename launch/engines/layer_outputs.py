"""The outputs of layers in the passes of a step, and their gradients."""

from __future__ import annotations

from functools import partial

import torch

from launch.contract.records.step_check import LayerResult, layer_names


class LayerOutputs:
    """Copies the outputs of a model's layers, and their gradients, as micro-batches run through them.

    The copies may be captured; each replay then overwrites them. They take twice the bytes of the outputs of all micro-batches.

    Attributes:
        kept: the copies of this rank's layers, each in the shape of the layer's output.
    """

    def __init__(self, num_layers: int) -> None:
        self._names = layer_names(num_layers)
        self.kept: dict[LayerResult, torch.Tensor] = {}

    def observe(self, micro_batch: int, position: int, output: torch.Tensor) -> None:
        """Keep ``output``, and its gradient once a backward pass reaches it. Recomputed outputs are kept only once."""
        self._keep(LayerResult(self._names[position], position, micro_batch, False), output)
        if output.grad_fn is not None:
            gradient = LayerResult(self._names[position], position, micro_batch, True)
            output.grad_fn.register_prehook(partial(self._keep_gradient, gradient, output.output_nr))

    def _keep_gradient(self, result: LayerResult, number: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Keep the gradient of output ``number`` of an autograd node, unless only other outputs of it have one.

        A hook of the tensor would not do: a local graph of Megatron-Core returns the same tensor in each replay, and PyTorch runs
        hooks only for the node that made the tensor when it got its first hook (torch 2.11 _tensor.py, ``register_hook``).
        """
        gradient = gradients[number]
        if gradient is not None:
            self._keep(result, gradient)

    def _keep(self, result: LayerResult, tensor: torch.Tensor) -> None:
        if result not in self.kept:
            # Graphs and later layers may overwrite the tensor itself.
            self.kept[result] = tensor.detach().clone()
