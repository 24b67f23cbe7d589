"""Settings that hold only in parts of the program, such as autocast and those of its data loaders. Hooks see them in the first steps."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from launch.train.inspection.capture_blockers import compiled_functions


class UsedSettings:
    """What the program has used before its timed steps. Later uses cost nothing."""

    def __init__(self) -> None:
        self.scaled = False
        """Whether a gradient scaler skips steps whose gradients are not finite."""
        self._autocasts: set[str] = set()
        self._loaders: set[str] = set()
        self._clippings: set[str] = set()
        self._recomputes = self._skips_sync = False
        self._backward = _BackwardPasses()
        self._unhook: list[Callable[[], None]] = []

    def describe(self) -> dict[str, str]:
        precision = [*(f"autocast {one}" for one in sorted(self._autocasts)), *["gradient scaler"] * self.scaled]
        found = {
            "mixed_precision": ", ".join(precision) or "none",
            "data_loaders": "; ".join(sorted(self._loaders)) or "none",
            # A limit that adapts to the gradients differs by their rounding.
            "clipping": next(iter(self._clippings or {"none"})) if len(self._clippings) < 2 else "",
            "recomputation": "checkpoints" if self._recomputes else "" if compiled_functions() else "none",
            "gradient_sync": "without some backward passes (no_sync)" if self._skips_sync else "each backward pass",
            # A gradient scaler may skip a step, which then is no end of one.
            "backward_passes": "" if self.scaled else self._backward.describe(),
        }
        return {name: text for name, text in found.items() if text}

    def end_step(self, optimizer: int, captures: int, *, closure: bool) -> None:
        """End a step of ``optimizer``, an id. So far there were ``captures``. A ``closure`` decides itself how often it computes."""
        if self._unhook:
            self._backward.end_step(optimizer, captures, closure=closure)

    def unhook(self) -> None:
        for unhook in self._unhook:
            unhook()
        self._unhook.clear()

    def hook_autocast(self, torch: ModuleType) -> None:
        """Observe what enters autocast, in code that torch.compile traces too. Releases before 2.4 have no function for it."""
        if not hasattr(torch, "set_autocast_dtype"):
            return

        def tell(device_type: str, dtype: object) -> None:
            if torch.is_autocast_enabled(device_type):
                self._autocasts.add(f"{device_type} {str(dtype).removeprefix('torch.')}")

        self._hook(torch, "set_autocast_dtype", tell, _traced)

    def hook_loaders(self, loader: Any) -> None:
        """Observe the data loaders that the program iterates over."""

        def tell(one: Any) -> None:
            size = f"batch_size {one.batch_size}, " if one.batch_size is not None else ""
            self._loaders.add(f"{size}num_workers {one.num_workers}, pin_memory {one.pin_memory}")

        self._hook(loader, "__iter__", tell, _traced)

    def say_clipping(self, max_norm: Any, norm_type: Any) -> None:
        """Take note of the arguments of ``clip_grad_norm_``. A limit of infinity only asks for the norm."""
        if type(max_norm) not in (int, float):
            # Only the device knows the number of a tensor. An empty text is unknown.
            self._clippings.add("")
        elif math.isfinite(max_norm):
            other = "" if norm_type == 2 else f", norm_type {norm_type}"
            self._clippings.add(f"max_norm {max_norm:.5g}{other}")

    def hook_backward(self, autograd: ModuleType) -> None:
        """Count the calls of ``backward``, as many as a step has micro-batches."""
        self._hook(autograd, "backward", self._backward.count, _untraced)

    def hook_sync(self, distributed: ModuleType) -> None:
        """Observe backward passes after which DistributedDataParallel reduces no gradients."""

        def tell(*_: Any) -> None:
            self._skips_sync = True

        self._hook(distributed.DistributedDataParallel, "no_sync", tell, _untraced)

    def hook_checkpoints(self, checkpoints: ModuleType) -> None:
        """Observe activations that the backward pass computes again. Compiled code calls none of these functions."""

        def tell(*_: Any, **_named: Any) -> None:
            self._recomputes = True

        for owner, name in (("_CheckpointFrame", "__init__"), ("CheckpointFunction", "forward")):
            if hasattr(checkpoints, owner):
                self._hook(getattr(checkpoints, owner), name, tell, _untraced)

    def _hook(self, owner: Any, name: str, tell: Callable[..., None], wrap: Callable[..., Any]) -> None:
        """Call ``tell`` after a function of ``owner``, with the same arguments, until :meth:`unhook`."""
        function = getattr(owner, name)

        def tell_first(*arguments: Any, **named: Any) -> None:
            if self._unhook:
                tell(*arguments, **named)

        wrapped = wrap(function, tell_first)

        def unhook() -> None:
            # Another library may have wrapped the function again.
            if getattr(owner, name) is wrapped:
                setattr(owner, name, function)

        setattr(owner, name, wrapped)
        self._unhook.append(unhook)


def _traced(function: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that Dynamo traces."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        tell(*arguments, **named)
        return result

    return wrapped


def _untraced(function: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that Dynamo calls and does not trace, while it traces what this calls as before."""
    wrapped = _traced(function, tell)
    skipped: Callable[..., Any] = sys.modules["torch._compile"]._disable_dynamo(wrapped, recursive=False)
    return skipped


class _BackwardPasses:
    """Counts the backward passes between two steps of the first optimizer."""

    def __init__(self) -> None:
        self._optimizer: int | None = None
        self._passes = self._captures = 0
        self._steps: list[tuple[int, bool]] = []
        """The passes of each step, and whether something was captured in it."""
        self._has_closure = False

    def count(self, *_: Any, **_named: Any) -> None:
        self._passes += 1

    def end_step(self, optimizer: int, captures: int, *, closure: bool) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer == self._optimizer:
            self._steps.append((self._passes, captures != self._captures))
            self._passes, self._captures = 0, captures
            self._has_closure |= closure

    def describe(self) -> str:
        """Return the passes of a step before the capture, or "" if they are unknown.

        A program may make more of them in its first step, to warm up. Replays make none, but what torch.compile captures makes all.
        """
        first = next((place for place, (_, captured) in enumerate(self._steps) if captured), len(self._steps))
        steps = self._steps[1:first] or self._steps[-1:] * bool(compiled_functions())
        passes = [passes for passes, captured in steps if not captured]
        return str(passes[0]) if passes and passes[0] and not self._has_closure else ""
