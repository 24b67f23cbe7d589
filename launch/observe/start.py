"""Start the observer of this process if it belongs to an observed attempt. This module imports nothing heavy."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from launch.contract.paths import OBSERVED
from launch.observe.import_hook import after_import

if TYPE_CHECKING:
    from launch.observe.observer import Observer

_WAITING: list[Path] = []
"""The attempt's folder, once this process waits for torch."""
_STARTED: list[Observer] = []


def start() -> None:
    """Observe this process as soon as it has imported torch. Do nothing outside an attempt.

    It is called twice if both PYTHONPATH and ``python -m launch.observe`` load the observer.
    """
    if OBSERVED not in os.environ or _WAITING:
        return
    _WAITING.append(Path(os.environ[OBSERVED]))
    # The supervisor requests stacks with this signal before it ends ranks that hang.
    faulthandler.register(signal.SIGUSR1)
    after_import("torch", _watch)


def running() -> Observer | None:
    return _STARTED[0] if _STARTED else None


def _watch(torch: ModuleType) -> None:
    from launch.observe.observer import Observer
    from launch.observe.torch_hooks import install

    try:
        one = Observer(_WAITING[0])
        install(torch, one)
    except Exception as error:
        # Another release of PyTorch may lack the hooked functions. The program runs on, and its log says that it is not
        # observed.
        sys.stderr.write(f"launch.observe: this process is not observed: {type(error).__name__}: {error}\n")
        return
    _STARTED.append(one)
    sys.excepthook = one.excepthook(sys.excepthook)
