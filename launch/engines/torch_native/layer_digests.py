"""Digests of what each layer gives, in both directions, computed where the tensors are
(launch/contract/records/layer_digests.py says of what).

They are ordinary operations of a step on the device. Where a step is captured whole they are captured with it, and every
replay computes them anew; between parts that are graphed by themselves they run as all else there does. Each is written to
a place of its own in memory that stays where it is, so that computing one twice changes nothing, and the host reads none
while a step runs. They only read: a step computes with them what it computes without.
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
"""Elements that are mixed at once: what that takes besides is a few times their size in int64."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
"""SplitMix64's constants (Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195), with a sign."""


def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Of all bits of ``tensors`` in their order: int64 of shape ().

    An element's bits and its place make one integer, which is mixed by a bijection of 64 bits; a digest is the sum of all
    of them modulo 2 ** 64. One element with other bits always changes it, several do but for once in 2 ** 64, and it is the
    same in whatever order a device sums. Places count from 1, so that a single zero is not 0, which is what nobody wrote.
    """
    total, place = None, 1
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for piece in flat.view(_INTEGERS[flat.element_size()]).split(CHUNK_ELEMENTS):
            mixed = _mixed(piece.to(torch.int64), place).sum()
            total, place = mixed if total is None else total + mixed, place + len(piece)
    assert total is not None
    return total


def _mixed(bits: torch.Tensor, first: int) -> torch.Tensor:
    """Of integers that stand at ``first`` and behind it."""
    mixed = bits + torch.arange(first, first + len(bits), device=bits.device) * _SPREAD
    mixed = (mixed ^ _shifted(mixed, 32)) * _MIX
    return mixed ^ _shifted(mixed, 29)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros from the left whatever the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


class LayerDigester:
    """The layers of a rank's ``chunks``, digested as steps of ``microbatches`` run through them."""

    def __init__(self, chunks: Sequence[Decoder], microbatches: int, device: torch.device) -> None:
        self._held = {name: module for chunk in chunks for name, module in _holders(chunk).items()}
        layers = (*self._held, *((LOSS,) if any(chunk.is_last for chunk in chunks) else ()))
        self._rows = {name: row for row, name in enumerate(layers)}
        self._outputs = torch.zeros(len(layers), microbatches, dtype=torch.int64, device=device)
        self._gradients = torch.zeros_like(self._outputs)
        self._parameter_gradients = torch.zeros(len(self._held), dtype=torch.int64, device=device)

    def observer(self, microbatch: int) -> ObserveOutput:
        """What sees the outputs of layers in the forward pass of ``microbatch``, and their gradients in its backward."""

        def observe(layer: str, output: torch.Tensor) -> None:
            row = self._rows[layer]
            self._outputs[row, microbatch].copy_(digest([output]))
            output.register_hook(_into(self._gradients[row, microbatch]))

        return observe

    def digest_gradients(self, main: FlatParameters) -> None:
        """Of the step's parameters, once its last backward pass and the reduction over ranks are done."""
        for row, module in enumerate(self._held.values()):
            self._parameter_gradients[row].copy_(digest(main.gradients_of(module)))

    def take(self) -> LayerDigests:
        """Those of the step that has been enqueued, and of what layers hold now. What the next step does not write reads as
        zeros."""
        static = (self._outputs, self._gradients, self._parameter_gradients)
        outputs, gradients, parameter_gradients = (digests.clone() for digests in static)
        for digests in static:
            digests.zero_()
        parameters = torch.stack([digest((*m.parameters(), *m.buffers())) for m in self._held.values()])
        return LayerDigests(tuple(self._rows), tuple(self._held), outputs, gradients, parameter_gradients, parameters)


def _holders(chunk: Decoder) -> dict[str, nn.Module]:
    """In the order of the forward pass, by the names that the chunk says when it shows what they give."""
    first: dict[str, nn.Module] = {EMBEDDING: chunk.embedding} if chunk.is_first else {}
    last: dict[str, nn.Module] = {FINAL_NORM: chunk.final_norm, HEAD: chunk.head} if chunk.is_last else {}
    return first | {layer_name(number): layer for number, layer in chunk.named_layers().items()} | last


def _into(place: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def write(gradient: torch.Tensor) -> None:
        place.copy_(digest([gradient]))

    return write
