"""How often captured work ran."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


class ReplayCounter:
    """Counts the calls of what replays."""

    def __init__(self) -> None:
        self.replays = 0

    def counting(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        """``replay``, each call of which counts; its attributes stay what they are."""

        @wraps(replay)
        def counted(*inputs: Any, **named: Any) -> Any:
            self.replays += 1
            return replay(*inputs, **named)

        return counted
