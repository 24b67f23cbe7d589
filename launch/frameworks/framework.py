"""What a framework adds to the user's command: graph settings, steps, determinism and where metrics go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from launch.contract.spec import GraphImpl, RunSpec

Flags = Mapping[str, tuple[str, ...]]
"""The words of each flag, none for a bare one: {"--max_steps": ("120",)}. A name may hold its value: {"train.train_iters=120": ()}."""


def no_flags(_: object) -> Flags:
    return {}


@dataclass(frozen=True)
class Framework:
    """One trainer. A plain script has none of this: its recipe says all, under ``command.graphs``."""

    impls: tuple[GraphImpl, ...] = ("command",)
    """The graph implementations that flags can name; ``command`` are the recipe's own."""
    graph_flags: Callable[[RunSpec], Flags] = no_flags
    """Turn graphs of these implementations on."""
    own_flags: Callable[[RunSpec], Flags] = no_flags
    """What every run gets, eager or not, unless the command says it itself."""
    untried: str = ""
    """Where this version never ran it."""
