"""The operators of a step, as they are dispatched: the shapes that they give, and the generators that they draw from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launch.contract.records.inspection import FindingKind
from launch.train.inspection.source_line import Line, current_user_line

Shapes = tuple[tuple[int, ...], ...]


class Operation(NamedTuple):
    """An operator as it was dispatched, and the shapes of the tensors that it took and gave."""

    name: str
    took: Shapes
    gave: Shapes
    line: Line


class CaptureBlocker(NamedTuple):
    """One thing that a capture cannot hold, or has to know of."""

    kind: FindingKind
    line: Line
    detail: str = ""


def default_generators(device: torch.device) -> dict[torch.Generator, FindingKind]:
    """The device's own, and the host's where that is another."""
    if device.type == "cpu":
        return {torch.default_generator: "default generator"}
    own = torch.cuda.default_generators[device.index or 0]
    return {own: "default generator", torch.default_generator: "host generator"}


class Operators(TorchDispatchMode):
    """Notes every operator that is dispatched, in the backward pass too, and those that draw random numbers.

    Args:
        generators: the default ones, the device's own first.
    """

    supports_higher_order_operators = True

    def __init__(self, generators: Mapping[torch.Generator, FindingKind]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = generators
        self._device = next(iter(generators)).device.type
        self.operations: list[Operation] = []
        self.drawn: list[CaptureBlocker] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What has been compiled runs as it is: else Dynamo would refuse to run it under a mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        may_draw = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        generators = self._generators_of(args, kwargs) if may_draw else {}
        before = [generator.get_state() for generator in generators]
        result = func(*args, **kwargs)
        name, line = str(func).removesuffix(".default"), current_user_line()
        self.operations.append(Operation(name, _shapes((args, kwargs)), _shapes(result), line))
        for (generator, kind), state in zip(generators.items(), before, strict=True):
            if not torch.equal(generator.get_state(), state):
                self.drawn.append(CaptureBlocker(kind, line, name))
        return result

    def _generators_of(self, args: Any, kwargs: Any) -> dict[torch.Generator, FindingKind]:
        """Those that an operator may draw from. Whether it does its state tells: attention is marked as drawing, and only
        does so with a dropout."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        others: dict[torch.Generator, FindingKind] = {
            generator: "generator" if generator.device.type == self._device else "host generator" for generator in given
        }
        return {**others, **self._generators}


def _shapes(tree: Any) -> Shapes:
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def first_divergence(first: Sequence[Operation], second: Sequence[Operation]) -> list[CaptureBlocker]:
    """Where two steps part: operators that took the same shapes and gave others, up to the first that is another one. Where
    compiled code hides these, the first that gave others."""
    changed: list[tuple[Operation, Operation]] = []
    parted: list[CaptureBlocker] = []
    for one, other in zip(first, second, strict=False):
        if one.name != other.name:
            parted.append(CaptureBlocker("operators", other.line, f"{one.name} in one step, {other.name} in another"))
            break
        if one.gave != other.gave:
            changed.append((one, other))
    if not parted and len(first) != len(second):
        beyond = max(first, second, key=len)[min(len(first), len(second))]
        parted.append(
            CaptureBlocker("operators", beyond.line, f"{len(first)} operators in one step, {len(second)} in another")
        )
    causes = [(one, other) for one, other in changed if one.took == other.took] or changed[:1]
    return [*(CaptureBlocker("shape", other.line, _change(one, other)) for one, other in causes), *parted]


def _change(one: Operation, other: Operation) -> str:
    pairs = [(before, after) for before, after in zip(one.gave, other.gave, strict=False) if before != after]
    before, after = pairs[0] if pairs else (one.gave, other.gave)
    return f"{one.name} gave {before}, then {after}"
