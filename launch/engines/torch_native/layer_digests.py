"""Digests of layer outputs and gradients, computed on the device (see launch/contract/records/layer_digests.py).

They are ordinary operations of a step: a captured step computes them in each replay. They do not change what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from launch.contract.records.layer_digests import EMBEDDING, FINAL_NORM, HEAD, LOSS, layer_name
from launch.engines.protocol import LayerDigests
from launch.engines.torch_native.decoder import Decoder, ObserveOutput
from launch.engines.torch_native.optim.flat_parameters import FlatParameters

CHUNK_ELEMENTS = 2**22
"""Elements to hash at once, which bounds the temporary memory to a few times their size in int64."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
"""SplitMix64's constants (Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195), as signed integers."""


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a digest of all bits of ``tensors`` in their order, int64 (). Shapes do not matter.

    A 64-bit bijection hashes each element's bits and position. The digest is the sum modulo 2 ** 64, so that the order of
    summation does not matter. One differing element always changes it; several fail to with probability 2 ** -64. Positions
    count from 1, so that a single zero differs from 0, the value of a digest that nobody wrote.
    """
    total, position = None, 1
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for piece in flat.view(_INTEGERS[flat.element_size()]).split(CHUNK_ELEMENTS):
            mixed = _mixed(piece.to(torch.int64), position).sum()
            total, position = mixed if total is None else total + mixed, position + len(piece)
    assert total is not None
    return total


def _mixed(bits: torch.Tensor, first: int) -> torch.Tensor:
    """Hash int64 (elements,) at positions from ``first`` on."""
    mixed = bits + torch.arange(first, first + len(bits), device=bits.device) * _SPREAD
    mixed = (mixed ^ _shifted(mixed, 32)) * _MIX
    return mixed ^ _shifted(mixed, 29)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right, filling with zeros for either sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


class LayerDigester:
    """Digests the layers of a rank's ``chunks`` as microbatches run through them.

    Each digest has a fixed place in static memory, so that computing it twice changes nothing, and the host reads none
    during a step.
    """

    def __init__(self, chunks: Sequence[Decoder], microbatches: int, device: torch.device) -> None:
        self._modules = {name: module for chunk in chunks for name, module in _holders(chunk).items()}
        layers = (*self._modules, *((LOSS,) if any(chunk.is_last for chunk in chunks) else ()))
        self._rows = {name: row for row, name in enumerate(layers)}
        self._outputs = torch.zeros(len(layers), microbatches, dtype=torch.int64, device=device)
        self._gradients = torch.zeros_like(self._outputs)
        self._parameter_gradients = torch.zeros(len(self._modules), dtype=torch.int64, device=device)

    def observer(self, microbatch: int) -> ObserveOutput:
        """Return what observes the outputs of layers in ``microbatch``, and their gradients in its backward pass."""

        def observe(layer: str, output: torch.Tensor) -> None:
            row = self._rows[layer]
            self._outputs[row, microbatch].copy_(digest([output]))
            output.register_hook(_write_to(self._gradients[row, microbatch]))

        return observe

    def digest_gradients(self, main: FlatParameters) -> None:
        """Digest the gradients of parameters, after the reduction over ranks."""
        for row, module in enumerate(self._modules.values()):
            self._parameter_gradients[row].copy_(digest(main.gradients_of(module)))

    def collect(self) -> LayerDigests:
        """Return copies of the digests of the enqueued step, and digests of the current parameters. Reset the former to zero."""
        static = (self._outputs, self._gradients, self._parameter_gradients)
        outputs, gradients, parameter_gradients = (digests.clone() for digests in static)
        for digests in static:
            digests.zero_()
        parameters = torch.stack([digest((*m.parameters(), *m.buffers())) for m in self._modules.values()])
        return LayerDigests(
            tuple(self._rows), tuple(self._modules), outputs, gradients, parameter_gradients, parameters
        )


def _holders(chunk: Decoder) -> dict[str, nn.Module]:
    """Return the modules with parameters in order of the forward pass, by the names that observers get."""
    first: dict[str, nn.Module] = {EMBEDDING: chunk.embedding} if chunk.is_first else {}
    last: dict[str, nn.Module] = {FINAL_NORM: chunk.final_norm, HEAD: chunk.head} if chunk.is_last else {}
    return first | {layer_name(number): layer for number, layer in chunk.named_layers().items()} | last


def _write_to(place: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a gradient hook that writes its digest to ``place``, int64 ()."""

    def write(gradient: torch.Tensor) -> None:
        place.copy_(digest([gradient]))

    return write
