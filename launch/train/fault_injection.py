"""Failures on purpose: what a recipe's ``fault`` does to a run, so that what is said of failures can be tried out.

Each is the real thing, and none an exception that only looks like it. Engines know nothing of them: what comes with a
step is done before the engine's own, and what comes with a capture is done by a hook on all modules, in the first
forward pass that is captured. A run that captures nothing is spared those, so that the eager twin of such a run is whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import Fault
from launch.engines.protocol import Engine, StepResult

FREED_BYTES = 1 << 26
"""Large enough to be memory of its own, which the driver takes back when it is freed."""
MOST_BYTES, LEAST_BYTES = 1 << 38, 1 << 9
"""What is asked for first where all memory is taken, and PyTorch's smallest block."""


class FaultyEngine:
    """``engine``, whose run meets ``fault``. ``number`` is the step at hand, ``batch`` what the engine is given in it."""

    def __init__(self, engine: Engine, fault: Fault, device: torch.device) -> None:
        self.device = device
        self.number = 0
        self.batch = torch.empty(0)
        self.held: list[torch.Tensor] = []
        self._engine = engine
        self._step = fault.step
        self._in_step: Callable[[], object] = lambda: None
        KINDS[fault.kind](self)

    def in_step(self, act: Callable[[], object]) -> None:
        """Have ``act`` called when the fault's step begins."""
        self._in_step = act

    @property
    def capture_step(self) -> int | None:
        return self._engine.capture_step

    @property
    def choices(self) -> Mapping[str, str]:
        return self._engine.choices

    def step(self, batch: torch.Tensor) -> StepResult:
        self.batch = batch
        if self.number == self._step:
            self._in_step()
        result = self._engine.step(self.batch)
        self.number += 1
        return result

    def graph_stats(self) -> GraphStats:
        return self._engine.graph_stats()

    def close(self) -> None:
        self._engine.close()


def in_capture(act: Callable[[], object]) -> None:
    """Have ``act`` called in the first forward pass that is captured."""

    def hook(module: nn.Module, inputs: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            handle.remove()
            act()

    handle = register_module_forward_pre_hook(hook)


# --- anywhere -------------------------------------------------------------------------------------------------------


def exception(run: FaultyEngine) -> None:
    """A bug: tensors that do not fit each other."""
    run.in_step(lambda: torch.ones(2) + torch.ones(3))


def nan(run: FaultyEngine) -> None:
    """A weight of the module that is called first, the model as a rule, becomes NaN."""
    weights: list[nn.Parameter] = []

    def find(module: nn.Module, inputs: Any) -> None:
        handle.remove()
        weights.extend(module.parameters())

    handle = register_module_forward_pre_hook(find)
    run.in_step(lambda: weights[0].detach().fill_(math.nan))


def hang(run: FaultyEngine) -> None:
    """A wait for what never comes."""
    run.in_step(lambda: threading.Event().wait())


def segfault(run: FaultyEngine) -> None:
    """A read through a null pointer."""
    run.in_step(lambda: ctypes.string_at(0))


def host_kill(run: FaultyEngine) -> None:
    """What an operator's kill -9 does, and the kernel's when memory is short."""
    run.in_step(lambda: os.kill(os.getpid(), signal.SIGKILL))


# --- in a capture ---------------------------------------------------------------------------------------------------


def item_in_capture(run: FaultyEngine) -> None:
    """The host reads a number (900, cudaErrorStreamCaptureUnsupported)."""
    in_capture(lambda: torch.ones((), device=run.device).item())


def background_thread(run: FaultyEngine) -> None:
    """Another thread waits for the stream, for which the next operation in the capture is refused (901,
    cudaErrorStreamCaptureInvalidated)."""

    def wait_for(stream: torch.cuda.Stream) -> None:
        with contextlib.suppress(RuntimeError):  # the thread's own failure: such threads are not listened to
            stream.synchronize()

    def elsewhere() -> None:
        thread = threading.Thread(target=wait_for, args=(torch.cuda.current_stream(),))
        thread.start()
        thread.join()

    in_capture(elsewhere)


def unjoined_stream(run: FaultyEngine) -> None:
    """Work forked off to a side stream that nobody waits for (904, cudaErrorStreamCaptureUnjoined)."""

    def fork() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run.held.append(torch.ones((), device=run.device))

    in_capture(fork)


def legacy_stream(run: FaultyEngine) -> None:
    """The default stream waits for the captured one, as autograd has it do where a gradient is accumulated on the stream
    that its parameter was first used on (906, cudaErrorStreamCaptureImplicit)."""
    in_capture(lambda: torch.cuda.default_stream().wait_stream(torch.cuda.current_stream()))


def unregistered_generator(run: FaultyEngine) -> None:
    """Random numbers of a generator that the graph was not told of."""
    generator = torch.Generator(run.device)
    in_capture(lambda: torch.rand((), device=run.device, generator=generator))


# --- memory ---------------------------------------------------------------------------------------------------------


def oom_eager(run: FaultyEngine) -> None:
    """The device is full when a step begins."""
    run.in_step(lambda: run.held.extend(_all_memory(run.device)))


def oom_capture(run: FaultyEngine) -> None:
    """The device is full in the midst of a capture."""
    in_capture(lambda: run.held.extend(_all_memory(run.device)))


def oom_replay(run: FaultyEngine) -> None:
    """The device is full when a step begins that runs from graphs."""
    if run.capture_step is not None:
        oom_eager(run)


def _all_memory(device: torch.device) -> Iterator[torch.Tensor]:
    size = MOST_BYTES
    while size >= LEAST_BYTES:
        try:
            yield torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            size //= 2


# --- after a capture ------------------------------------------------------------------------------------------------


def input_freed(run: FaultyEngine) -> None:
    """What a graph reads goes back to the driver, and is no memory of the process when the graph runs again."""
    run.held.append(torch.ones(FREED_BYTES, dtype=torch.uint8, device=run.device))

    def free() -> None:
        run.held.clear()
        torch.cuda.empty_cache()

    in_capture(lambda: run.held[0].sum())
    run.in_step(free)


def dynamic_shape(run: FaultyEngine) -> None:
    """A batch whose sequences are a token shorter."""

    def shorten() -> None:
        run.batch = run.batch[..., :-1]

    run.in_step(shorten)


def frozen_scalar(run: FaultyEngine) -> None:
    """A number that Python counts up scales what modules give: eager code has a new one each step, a graph the one of its
    capture. Nothing fails, and the numbers part."""

    def scale(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output * (1 + run.number / 100) if isinstance(output, torch.Tensor) else output

    register_module_forward_hook(scale)


# --- before the first step ------------------------------------------------------------------------------------------


def missing_attention_backend(run: FaultyEngine) -> None:
    """Transformer Engine cannot be imported."""
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]


KINDS: dict[str, Callable[[FaultyEngine], None]] = {
    kind.__name__: kind
    for kind in (
        exception, nan, hang, segfault, host_kill,
        item_in_capture, background_thread, unjoined_stream, legacy_stream, unregistered_generator,
        oom_eager, oom_capture, oom_replay,
        input_freed, dynamic_shape, frozen_scalar, missing_attention_backend,
    )
}  # fmt: skip
"""What provokes each of launch.contract.spec.FaultKind but "none"."""
