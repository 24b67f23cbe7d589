"""Trace the operators of a step at dispatch: their shapes, and the generators from which they draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from launch.contract.records.inspection import FindingKind
from launch.train.inspection.source_line import Line

Shapes = tuple[tuple[int, ...], ...]
_READ = "aten._local_scalar_dense"
"""Reads a value on the host. Waits are found apart, and a value that is logged in some steps changes nothing on the device."""


class Operation(NamedTuple):
    """A dispatched operator with the shapes of its input and output tensors."""

    name: str
    took: Shapes
    gave: Shapes
    line: Line


class CaptureBlocker(NamedTuple):
    """Something that a capture cannot contain, or must register."""

    kind: FindingKind
    line: Line
    detail: str = ""


def default_generators(device: torch.device) -> dict[torch.Generator, FindingKind]:
    """Return the default generators of the device and of the host."""
    if device.type == "cpu":
        return {torch.default_generator: "default generator"}
    own = torch.cuda.default_generators[device.index or 0]
    return {own: "default generator", torch.default_generator: "host generator"}


class Operators(TorchDispatchMode):
    """Records every operator on the device, also in the backward pass, and the operators that draw random numbers.

    Args:
        generators: the default generators, the device's first.
        find_line: returns the line of code that runs.
    """

    supports_higher_order_operators = True

    def __init__(self, generators: Mapping[torch.Generator, FindingKind], find_line: Callable[[], Line]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators, self._find_line = generators, find_line
        self._device = next(iter(generators)).device.type
        self.operations: list[Operation] = []
        self.drawn: list[CaptureBlocker] = []
        self._stopped = False

    def stop(self) -> bool:
        """Leave the mode, where no block surrounds the step. Return False if that is not possible here.

        Then the mode stays without effect: the step ended on another thread, or within a mode that began later.
        """
        self._stopped = _get_current_dispatch_mode() is not self
        if not self._stopped:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return not self._stopped

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run unchanged. Otherwise Dynamo refuses to run it under a dispatch mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._stopped:
            return func(*args, **kwargs)
        may_draw = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        generators = self._generators_of(args, kwargs) if may_draw else {}
        before = [generator.get_state() for generator in generators]
        result = func(*args, **kwargs)
        name, line = str(func).removesuffix(".default"), self._find_line()
        if name != _READ and self._is_on_device((args, kwargs, result)):
            self.operations.append(Operation(name, _shapes((args, kwargs)), _shapes(result), line))
        for (generator, kind), state in zip(generators.items(), before, strict=True):
            if not torch.equal(generator.get_state(), state):
                self.drawn.append(CaptureBlocker(kind, line, name))
        return result

    def _is_on_device(self, tree: Any) -> bool:
        return any(leaf.device.type == self._device for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))

    def _generators_of(self, args: Any, kwargs: Any) -> dict[torch.Generator, FindingKind]:
        """Return the generators from which an operator may draw.

        Only a changed state proves a draw. Attention, for example, is marked as drawing but draws only with dropout.
        """
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        others: dict[torch.Generator, FindingKind] = {
            generator: "generator" if generator.device.type == self._device else "host generator" for generator in given
        }
        return {**others, **self._generators}


def _shapes(tree: Any) -> Shapes:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    # A nested tensor has no shape.
    return tuple(() if leaf.is_nested else tuple(leaf.shape) for leaf in leaves)


def first_divergence(first: Sequence[Operation], second: Sequence[Operation]) -> list[CaptureBlocker]:
    """Return the operators at which two steps diverge, up to the first operator of another name.

    An operator with equal input shapes and different output shapes is a cause. If compiled code hides all causes, return the
    first operator with a different output shape.
    """
    changed: list[tuple[Operation, Operation]] = []
    operators: list[CaptureBlocker] = []
    for one, other in zip(first, second, strict=False):
        if one.name != other.name:
            operators.append(
                CaptureBlocker("operators", other.line, f"{one.name} in one step, {other.name} in another")
            )
            break
        if one.gave != other.gave:
            changed.append((one, other))
    if not operators and len(first) != len(second):
        beyond = max(first, second, key=len)[min(len(first), len(second))]
        operators.append(
            CaptureBlocker("operators", beyond.line, f"{len(first)} operators in one step, {len(second)} in another")
        )
    causes = [(one, other) for one, other in changed if one.took == other.took] or changed[:1]
    return [*(CaptureBlocker("shape", other.line, _change(one, other)) for one, other in causes), *operators]


def _change(one: Operation, other: Operation) -> str:
    pairs = [(before, after) for before, after in zip(one.gave, other.gave, strict=False) if before != after]
    before, after = pairs[0] if pairs else (one.gave, other.gave)
    return f"{one.name} gave {before}, then {after}"
