"""The flags that a framework adds to the user's command: graph settings, steps, determinism, and where metrics go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from launch.contract.spec import GraphImpl, RunSpec

Flags = Mapping[str, tuple[str, ...]]
"""The words after each flag, none for a bare flag: {"--max_steps": ("120",)}. A name may contain its value:
{"train.train_iters=120": ()}."""


def no_flags(_: object) -> Flags:
    return {}


@dataclass(frozen=True)
class Framework:
    """One trainer. A plain script has no flags of its own; its recipe has all settings under ``command.graphs``."""

    impls: tuple[GraphImpl, ...] = ("command",)
    """The graph implementations for which there are flags. ``command`` means the recipe's own graphs."""
    graph_flags: Callable[[RunSpec], Flags] = no_flags
    """Return the flags that turn on graphs of these implementations."""
    own_flags: Callable[[RunSpec], Flags] = no_flags
    """Return the flags of every run, eager or not. A flag is left out if the command already has it."""
    deterministic_variables: Mapping[str, str] = field(default_factory=dict)
    """The environment variables that deterministic training needs besides flags. The user's own values override them."""
    untried: str = ""
    """Where this version has never run the framework, in words. Empty if it has run it."""
