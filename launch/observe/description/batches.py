"""The batches that data loaders give to the program in its first steps. Graphs change none of them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from itertools import islice
from threading import get_ident
from typing import Any

import torch

from launch.observe.construction import describe_construction
from launch.train.telemetry.parameter_digest import digest_parameters

_STEPS = 2
"""The steps to describe. As many end before steps are timed."""
_MOST_TENSORS, _LEAST_NUMBERS = 16, 1024
"""How many tensors of a batch are digested, and how many numbers of each, or up to twice as many."""


class Batches:
    """The last batch of each loader before the end of each step. A program or a trainer may fetch a batch ahead of its step."""

    def __init__(self) -> None:
        self.announced = False
        """Whether the program announces its steps, so that those of optimizers do not count."""
        self.missed = False
        """Whether some batch was not taken, because steps were timed."""
        self._samplers: dict[int, tuple[object, str]] = {}
        """The sampler of each loader, which all its iterators share, and its settings at the first batch; by its id."""
        self._given: dict[int, str] = {}
        """The last batch of each loader in this step."""
        self._steps: list[dict[int, str]] = []
        self._threads: set[int] = set()

    def take(self, batch: Any, iterator: Any) -> None:
        """Take a batch that ``iterator`` of a loader returns."""
        if found := _digest(batch):
            sampler = getattr(iterator, "_index_sampler", iterator)
            if id(sampler) not in self._samplers:
                self._samplers[id(sampler)] = sampler, describe_construction(getattr(sampler, "sampler", sampler))
            self._given[id(sampler)] = found
            self._threads.add(get_ident())

    def end_step(self) -> None:
        self._threads.add(get_ident())
        self._steps.append(self._given)
        self._given = {}

    def announce(self) -> None:
        """Begin again with the first step that the program announces, whose batch is the last one so far.

        What came before it may have warmed up a graph.
        """
        self._given = {} if self.missed else (self._steps[-1] if self._steps else {}) | self._given
        self._steps.clear()
        self.announced = True

    def describe(self) -> dict[str, str]:
        """Return the batches of each step and the samplers of their loaders; nothing if a thread fetches them at any time."""
        first = self._steps[:_STEPS]
        keys = [key for key in self._samplers if any(key in step for step in first)]
        # Loaders of evaluations are done within a step.
        keys = [key for key in keys if sum(key in step for step in first) > 1] or keys
        if not keys or len(self._threads) > 1:
            return {}
        steps = ["/".join(step[key] for key in keys if key in step) or "none" for step in first]
        return {"batches": " ".join(steps), "samplers": "; ".join(sorted({self._samplers[key][1] for key in keys}))}


def _digest(batch: Any) -> str:
    """Return a digest of some numbers of a batch; "" if none are in the host's memory."""
    try:
        return digest_parameters(map(_sample, islice(_tensors(batch), _MOST_TENSORS)))[:8]
    except RuntimeError:
        # Some types have no digest.
        return ""


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return some of its numbers. A tensor that lies in another order, as images channels last do, is not copied for it."""
    numbers = tensor.numel()
    return tensor.take(torch.arange(0, numbers, max(1, numbers // _LEAST_NUMBERS), device="cpu"))


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a batch. Numbers and texts may be names of files, which differ in each run."""
    if type(batch) is torch.Tensor and batch.device.type == "cpu" and batch.layout is torch.strided:
        yield batch
    elif isinstance(batch, dict | UserDict | list | tuple):
        for part in batch.values() if isinstance(batch, dict | UserDict) else batch:
            yield from _tensors(part)
