"""What an inspection finds of a step: how its kernels are, and what would keep it from being captured. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

FindingKind = Literal[
    "synchronisation", "shape", "operators", "generator", "host generator", "default generator",
]  # fmt: skip
"""The host waits for the device; a tensor's shape changes from step to step; the operators do; numbers are drawn from a
generator of CUDA that a capture does not know, from one of the host, or from the default one."""
KINDS: tuple[FindingKind, ...] = get_args(FindingKind)

BOUNDS_US = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
"""Where lengths of kernels are parted, in microseconds."""


@dataclass(frozen=True)
class Finding:
    """A line of code and what it does in a step. ``file`` is told from the checkout; it is empty, and the line 0, where the
    line is unknown: autograd runs operators of C++ in threads of its own. ``count`` is how often a step."""

    kind: FindingKind
    file: str
    line: int
    function: str
    code: str
    count: float
    detail: str = ""


@dataclass(frozen=True)
class KernelTime:
    """All kernels of one name: how many a step, and their milliseconds a step, added up."""

    name: str
    count: float
    milliseconds: float


@dataclass(frozen=True)
class Kernels:
    """The kernels of a step by length: ``counts[i]`` of them a step take less than ``BOUNDS_US[i]`` and no less than the
    bound before it; the last count is of the rest. ``longest`` are those that take the most time together."""

    counts: tuple[float, ...]
    median_us: float
    longest: tuple[KernelTime, ...]

    @property
    def number(self) -> float:
        return sum(self.counts)

    def share_below(self, bound_us: float) -> float:
        """The share of kernels that take less than one of ``BOUNDS_US``; 0 where there is none."""
        return sum(self.counts[: BOUNDS_US.index(bound_us) + 1]) / self.number if self.number else 0.0


@dataclass(frozen=True)
class Inspection:
    """What one rank found in some steps after the timed ones. On a CPU there are neither kernels nor waits.

    ``waits`` is how often a step the driver was asked to wait for the device, whoever asked; ``recompilations`` is how many
    functions were compiled anew meanwhile.
    """

    findings: tuple[Finding, ...]
    kernels: Kernels | None = None
    waits: float = 0.0
    recompilations: int = 0


def inspection_from_json(content: Mapping[str, Any]) -> Inspection:
    """Raises KeyError, TypeError or ValueError where a field is missing, unknown or of another kind."""
    kernels = content["kernels"]
    return Inspection(
        tuple(_finding(one) for one in content["findings"]),
        None if kernels is None else _kernels(kernels),
        _amount(content["waits"]),
        int(_amount(content["recompilations"])),
    )


def _finding(content: Mapping[str, Any]) -> Finding:
    found = Finding(**content)
    if found.kind not in KINDS:
        raise ValueError(f"{found.kind!r} is no kind of finding")
    _amount(found.line), _amount(found.count)
    return found


def _kernels(content: Mapping[str, Any]) -> Kernels:
    counts = tuple(map(_amount, content["counts"]))
    if len(counts) != len(BOUNDS_US) + 1:
        raise ValueError(f"kernels are counted in {len(counts)} lengths, not in {len(BOUNDS_US) + 1}")
    longest = tuple(KernelTime(**one) for one in content["longest"])
    for one in longest:
        _amount(one.count), _amount(one.milliseconds)
    return Kernels(counts, _amount(content["median_us"]), longest)


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value!r} is not a number from 0 on")
    return float(value)
