"""Inject a recipe's ``fault`` into a run, to test how failures are reported.

Each fault is the real failure, not an exception that imitates it. Engines do not know about faults. A fault of a step happens
before the engine's step. A fault of a capture happens in a hook on all modules, in the first captured forward pass. Without a
capture it does not happen, so the eager baseline completes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from launch.engines.protocol import Engine, StepResult

FREED_BYTES = 1 << 26
"""Large enough for its own segment, which returns to the driver when freed."""
MOST_BYTES, LEAST_BYTES = 1 << 38, 1 << 9
"""The size of the first allocation of a fault that takes all memory, and PyTorch's smallest block."""


Inject = Callable[["FaultyStep"], None]


class FaultyStep:
    """A fault in the steps of ``engine``. ``number`` is the current step, and ``batch`` the engine's input in it.

    Args:
        inject: prepares the fault, which happens in ``step``.
    """

    def __init__(self, engine: Engine, inject: Inject, step: int, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self.number = 0
        self.batch = torch.empty(0)
        self.held: list[torch.Tensor] = []
        self._run = engine.step
        self._step = step
        self._in_step: Callable[[], object] = lambda: None
        self._after_step: Callable[[], object] = lambda: None
        inject(self)
        # This step calls the engine's own step.
        engine.step = self.run  # type: ignore[method-assign]

    def in_step(self, act: Callable[[], object]) -> None:
        """Call ``act`` when the fault's step begins."""
        self._in_step = act

    def after_step(self, act: Callable[[], object]) -> None:
        """Call ``act`` when the fault's step has ended."""
        self._after_step = act

    @property
    def is_due(self) -> bool:
        """Whether this is the fault's step."""
        return self.number == self._step

    def run(self, batch: torch.Tensor) -> StepResult:
        self.batch = batch
        if self.is_due:
            self._in_step()
        result = self._run(self.batch)
        if self.is_due:
            self._after_step()
        self.number += 1
        return result


def in_capture(act: Callable[[], object]) -> None:
    """Call ``act`` in the first forward pass that is captured."""

    def hook(module: nn.Module, inputs: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            handle.remove()
            act()

    handle = register_module_forward_pre_hook(hook)


# --- anywhere -------------------------------------------------------------------------------------------------------


def exception(run: FaultyStep) -> None:
    """Add tensors whose shapes do not match: an ordinary bug."""
    run.in_step(lambda: torch.ones(2) + torch.ones(3))


def nan(run: FaultyStep) -> None:
    """Set a weight of the module that is called first, usually the model, to NaN."""
    weights: list[nn.Parameter] = []

    def find(module: nn.Module, inputs: Any) -> None:
        handle.remove()
        weights.extend(module.parameters())

    handle = register_module_forward_pre_hook(find)
    run.in_step(lambda: weights[0].detach().fill_(math.nan))


def hang(run: FaultyStep) -> None:
    """Wait forever."""
    run.in_step(lambda: threading.Event().wait())


def segfault(run: FaultyStep) -> None:
    """Read through a null pointer."""
    run.in_step(lambda: ctypes.string_at(0))


def host_kill(run: FaultyStep) -> None:
    """Send SIGKILL to this process, as an operator may do, or the kernel when memory runs out."""
    run.in_step(lambda: os.kill(os.getpid(), signal.SIGKILL))


# --- in a capture ---------------------------------------------------------------------------------------------------


def item_in_capture(run: FaultyStep) -> None:
    """Read a number on the host (900, cudaErrorStreamCaptureUnsupported)."""
    in_capture(lambda: torch.ones((), device=run.device).item())


def background_thread(run: FaultyStep) -> None:
    """Synchronize the stream from another thread, which invalidates the capture (901, cudaErrorStreamCaptureInvalidated)."""

    def wait_for(stream: torch.cuda.Stream) -> None:
        # Suppress the error, because programs usually ignore the failure of such a thread.
        with contextlib.suppress(RuntimeError):
            stream.synchronize()

    def elsewhere() -> None:
        thread = threading.Thread(target=wait_for, args=(torch.cuda.current_stream(),))
        thread.start()
        thread.join()

    in_capture(elsewhere)


def unjoined_stream(run: FaultyStep) -> None:
    """Fork work to a side stream and never join it (904, cudaErrorStreamCaptureUnjoined)."""

    def fork() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run.held.append(torch.ones((), device=run.device))

    in_capture(fork)


def legacy_stream(run: FaultyStep) -> None:
    """Let the default stream wait for the captured one (906, cudaErrorStreamCaptureImplicit).

    Autograd does this if it accumulates a gradient on the stream on which the parameter was first used.
    """
    in_capture(lambda: torch.cuda.default_stream().wait_stream(torch.cuda.current_stream()))


def unregistered_generator(run: FaultyStep) -> None:
    """Draw random numbers from a generator that is not registered with the graph."""
    generator = torch.Generator(run.device)
    in_capture(lambda: torch.rand((), device=run.device, generator=generator))


# --- memory ---------------------------------------------------------------------------------------------------------


def oom_eager(run: FaultyStep) -> None:
    """Fill the device before a step."""
    run.in_step(lambda: run.held.extend(_all_memory(run.device)))


def oom_capture(run: FaultyStep) -> None:
    """Fill the device during a capture."""
    in_capture(lambda: run.held.extend(_all_memory(run.device)))


def oom_replay(run: FaultyStep) -> None:
    """Fill the device before a step that replays graphs."""
    if run.engine.capture_step is not None:
        oom_eager(run)


def _all_memory(device: torch.device) -> Iterator[torch.Tensor]:
    size = MOST_BYTES
    while size >= LEAST_BYTES:
        try:
            yield torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            size //= 2


# --- after a capture ------------------------------------------------------------------------------------------------


def input_freed(run: FaultyStep) -> None:
    """Free memory that a graph reads, so that the next replay accesses an unmapped address."""
    run.held.append(torch.ones(FREED_BYTES, dtype=torch.uint8, device=run.device))

    def free() -> None:
        run.held.clear()
        torch.cuda.empty_cache()

    in_capture(lambda: run.held[0].sum())
    run.in_step(free)


def dynamic_shape(run: FaultyStep) -> None:
    """Shorten the sequences of a batch by one token."""

    def shorten() -> None:
        run.batch = run.batch[..., :-1]

    run.in_step(shorten)


def frozen_scalar(run: FaultyStep) -> None:
    """Scale module outputs by a Python number that grows every step.

    Eager code uses the new value, but a graph uses the value from its capture. Nothing fails, but the numbers diverge.
    """

    def scale(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output * (1 + run.number / 100) if isinstance(output, torch.Tensor) else output

    register_module_forward_hook(scale)


def frozen_draw(run: FaultyStep) -> None:
    """Drop a tenth of each module's channels, which Python draws anew in each step.

    Eager code drops other channels in each step, but a graph drops those of its capture. It draws on only from generators of the
    device that are registered with it.
    """

    def drop(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.ndim < 2:
            return output
        drawn = random.Random(run.number).randrange(10)
        return output * (torch.arange(output.shape[-1], device=output.device) % 10 != drawn)

    register_module_forward_hook(drop)


# --- before the first step ------------------------------------------------------------------------------------------


def missing_attention_backend(run: FaultyStep) -> None:
    """Make Transformer Engine impossible to import."""
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]


KINDS: dict[str, Inject] = {
    kind.__name__: kind
    for kind in (
        exception, nan, hang, segfault, host_kill,
        item_in_capture, background_thread, unjoined_stream, legacy_stream, unregistered_generator,
        oom_eager, oom_capture, oom_replay,
        input_freed, dynamic_shape, frozen_scalar, frozen_draw, missing_attention_backend,
    )
}  # fmt: skip
"""The function for each launch.contract.spec.FaultKind except "none"."""
