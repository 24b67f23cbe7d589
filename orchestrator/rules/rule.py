"""What a rule is: a statement about a RunSpec that can be judged before a GPU is spent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launch.contract.plan import Reason
from launch.contract.spec import EngineName, RunSpec

Condition = Callable[[RunSpec], str | None]
"""What is wrong with a spec, with the values, or None. It never raises: values out of range are the business of the
rules that bound them, and every other condition lets them pass."""

BOTH: tuple[EngineName, ...] = ("torch_native", "megatron")
MEGATRON: tuple[EngineName, ...] = ("megatron",)
TORCH_NATIVE: tuple[EngineName, ...] = ("torch_native",)

ANY = "any"
MCORE_016 = "megatron-core 0.16.*"
MCORE = "megatron-core 0.16.1 "
"""Prefix of sources: file and line are those of the released wheel, below ``megatron/core``."""
CONFIG = f"{MCORE}transformer/transformer_config.py"
ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class Rule:
    """One row of a table. What must hold is said by the condition's docstring, in words."""

    id: str
    engines: tuple[EngineName, ...]
    versions: str
    condition: Condition
    remedy: str
    source: str

    @property
    def statement(self) -> str:
        return " ".join((self.condition.__doc__ or "").split())

    def judge(self, spec: RunSpec) -> Reason | None:
        message = self.condition(spec) if spec.engine in self.engines else None
        return None if message is None else Reason(self.id, message, self.remedy, self.source)


def divides(divisor: int, value: int) -> bool:
    """Whether ``divisor`` divides ``value``; true of a divisor below 1, which a rule of its own reports."""
    return divisor < 1 or value % divisor == 0


def compiled_text(spec: RunSpec) -> str:
    """What has the whole model compiled, as a message names it."""
    return "training.compile=whole" if spec.training.compile == "whole" else f"cuda_graph.impl={spec.cuda_graph.impl}"


def scope_text(spec: RunSpec) -> str:
    """The graph configuration as a message names it: ``cuda_graph {impl: local, scope: [attn]}``."""
    return f"cuda_graph {{impl: {spec.cuda_graph.impl}, scope: [{', '.join(spec.cuda_graph.scope)}]}}"
