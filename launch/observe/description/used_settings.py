"""Settings that hold only in parts of the program, such as autocast and those of its data loaders. Hooks see them in the first steps."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import ref

from launch.observe.construction import describe_construction
from launch.observe.description.batches import Batches
from launch.train.inspection.capture_blockers import compiled_functions


class UsedSettings:
    """What the program has used before its timed steps. Later uses cost nothing."""

    def __init__(self) -> None:
        self.scaled = False
        """Whether a gradient scaler skips steps whose gradients are not finite."""
        self._autocasts: set[str] = set()
        self._loaders: set[str] = set()
        self._clippings: set[str] = set()
        self._schedulers: list[ref[object]] = []
        self._recomputes = self._skips_sync = self._sees_compiled_checkpoints = False
        self.batches = Batches()
        self._backward = _BackwardPasses()
        self._first: int | None = None
        """The optimizer whose steps count, by its id."""
        self._unhook: list[Callable[[], None]] = []
        self._unused = "none"
        """What is said of what was not seen."""

    def describe(self) -> dict[str, str]:
        precision = [*(f"autocast {one}" for one in sorted(self._autocasts)), *["gradient scaler"] * self.scaled]
        sees_all = self._sees_compiled_checkpoints or not compiled_functions()
        made = (describe_construction(one) for each in self._schedulers if (one := each()) is not None)
        found = self.batches.describe() | {
            "mixed_precision": ", ".join(precision) or "none",
            "data_loaders": "; ".join(sorted(self._loaders)) or self._unused,
            # A limit that adapts to the gradients differs by their rounding.
            "clipping": next(iter(self._clippings or {"none"})) if len(self._clippings) < 2 else "",
            "recomputation": "checkpoints" if self._recomputes else "none" if sees_all else "",
            "schedulers": "; ".join(dict.fromkeys(made)) or self._unused,
            "gradient_sync": "without some backward passes (no_sync)" if self._skips_sync else "each backward pass",
            # A gradient scaler may skip a step, which then is no end of one.
            "backward_passes": "" if self.scaled else self._backward.describe(),
        }
        return {name: text for name, text in found.items() if text}

    def end_step(self, optimizer: int, captures: int, *, closure: bool) -> None:
        """End a step of ``optimizer``, an id. So far there were ``captures``. A ``closure`` decides itself how often it computes."""
        self._first = self._first or optimizer
        if self._unhook and optimizer == self._first:
            self._backward.end_step(captures, closure=closure)
            if not self.batches.announced:
                self.batches.end_step()

    def announce(self) -> None:
        """Count the steps that the program announces. Those before them may have been many enough to be timed, without hooks."""
        self.batches.announce()
        self._unused = "none" if self._unhook else ""

    def unhook(self) -> None:
        self.batches.missed = True
        for unhook in self._unhook:
            unhook()
        self._unhook.clear()

    def hook_autocast(self, torch: ModuleType) -> None:
        """Observe what enters autocast, in code that torch.compile traces too. Releases before 2.4 have no function for it."""
        if not hasattr(torch, "set_autocast_dtype"):
            return

        def tell(_: None, device_type: str, dtype: object) -> None:
            if torch.is_autocast_enabled(device_type):
                self._autocasts.add(f"{device_type} {str(dtype).removeprefix('torch.')}")

        self._hook(torch, "set_autocast_dtype", tell, after)

    def hook_loaders(self, loaders: ModuleType, take: Callable[..., None]) -> None:
        """Observe the data loaders that the program iterates over. Let ``take``, which Dynamo must not trace, take their batches."""

        def tell(_: Any, one: Any) -> None:
            size = f"batch_size {one.batch_size}, " if one.batch_size is not None else ""
            self._loaders.add(f"{size}num_workers {one.num_workers}, pin_memory {one.pin_memory}")

        self._hook(loaders.DataLoader, "__iter__", tell, after)
        if hasattr(loaders, "_BaseDataLoaderIter"):
            self._hook(loaders._BaseDataLoaderIter, "__next__", take, _untraced)

    def hook_schedulers(self, schedulers: ModuleType) -> None:
        """Observe the learning-rate schedulers that the program makes. Some classes do not call their base's ``__init__``."""

        def tell(_: Any, scheduler: object, *_rest: Any) -> None:
            self._schedulers.append(ref(scheduler))

        for owner in ("LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"):
            if hasattr(schedulers, owner):
                self._hook(getattr(schedulers, owner), "__init__", tell, _untraced)

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
        """Observe activations that the backward pass computes again. Compiled code may call none of these functions."""
        for owner, name in (("_CheckpointFrame", "__init__"), ("CheckpointFunction", "forward")):
            if hasattr(checkpoints, owner):
                self._hook(getattr(checkpoints, owner), name, self._say_recomputation, _untraced)

    def hook_compiled_checkpoints(self, builder: ModuleType) -> None:
        """Observe them in code that Dynamo compiles."""
        if hasattr(builder, "build_checkpoint_variable"):
            self._sees_compiled_checkpoints = True
            self._hook(builder, "build_checkpoint_variable", self._say_recomputation, after)

    def _say_recomputation(self, *_: Any) -> None:
        self._recomputes = True

    def _hook(self, owner: Any, name: str, tell: Callable[..., None], wrap: Callable[..., Any]) -> None:
        """Call ``tell`` after a function of ``owner``, as :func:`after` does, until :meth:`unhook`."""
        function = getattr(owner, name)

        def tell_first(*arguments: Any) -> None:
            if self._unhook:
                tell(*arguments)

        wrapped = wrap(function, tell_first)

        def unhook() -> None:
            # Another library may have wrapped the function again.
            if getattr(owner, name) is wrapped:
                setattr(owner, name, function)

        setattr(owner, name, wrapped)
        self._unhook.append(unhook)


def after(function: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that calls ``tell`` with its result and its arguments. Dynamo traces it."""

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        tell(result, *arguments, *named.values())
        return result

    return wrapped


def _untraced(function: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that Dynamo calls and does not trace, while it traces what this calls as before."""
    wrapped = after(function, tell)
    skipped: Callable[..., Any] = sys.modules["torch._compile"]._disable_dynamo(wrapped, recursive=False)
    return skipped


class _BackwardPasses:
    """Counts the backward passes between two steps of the first optimizer."""

    def __init__(self) -> None:
        self._passes = self._captures = 0
        self._steps: list[tuple[int, bool]] = []
        """The passes of each step, and whether something was captured in it."""
        self._has_closure = False

    def count(self, *_: Any) -> None:
        self._passes += 1

    def end_step(self, captures: int, *, closure: bool) -> None:
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
