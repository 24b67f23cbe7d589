"""Observe the user's own program from inside, for engine command.

It does not change any numbers, and imports torch only after the program does. A script may report its steps with two lines:

    from launch.observe import step
    step(loss=loss, grad_norm=norm)  # at the end of each optimizer step

Outside a run of engine command they do nothing.
"""

from __future__ import annotations

from typing import Any

from launch.observe.start import running


def step(*, loss: Any, grad_norm: Any = None) -> None:
    """End an optimizer step. ``loss`` and ``grad_norm`` are numbers or tensors of one element, whole on this rank."""
    if (one := running()) is not None:
        one.say_step(loss, grad_norm)
