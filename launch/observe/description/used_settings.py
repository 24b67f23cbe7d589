"""Settings that hold only in parts of the program: autocast, and those of its data loaders. Hooks see them in the first steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


class UsedSettings:
    """What the program has used before its timed steps. Later uses cost nothing."""

    def __init__(self) -> None:
        self.scaled = False
        """Whether a gradient scaler skips steps whose gradients are not finite."""
        self._autocasts: set[str] = set()
        self._loaders: set[str] = set()
        self._unhook: list[Callable[[], None]] = []

    def describe(self) -> dict[str, str]:
        precision = [*(f"autocast {one}" for one in sorted(self._autocasts)), *["gradient scaler"] * self.scaled]
        return {
            "mixed_precision": ", ".join(precision) or "none",
            "data_loaders": "; ".join(sorted(self._loaders)) or "none",
        }

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

        self._hook(torch, "set_autocast_dtype", tell)

    def hook_loaders(self, loader: Any) -> None:
        """Observe the data loaders that the program iterates over."""

        def tell(one: Any) -> None:
            size = f"batch_size {one.batch_size}, " if one.batch_size is not None else ""
            self._loaders.add(f"{size}num_workers {one.num_workers}, pin_memory {one.pin_memory}")

        self._hook(loader, "__iter__", tell)

    def _hook(self, owner: Any, name: str, tell: Callable[..., None]) -> None:
        """Call ``tell`` after a function of ``owner``, with the same arguments, until :meth:`unhook`."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            if self._unhook:
                tell(*arguments, **named)
            return result

        def unhook() -> None:
            # Another library may have wrapped the function again.
            if getattr(owner, name) is wrapped:
                setattr(owner, name, function)

        setattr(owner, name, wrapped)
        self._unhook.append(unhook)
