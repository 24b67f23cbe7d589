"""The findings of an inspection: the kernels of a step, and what prevents its capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from launch.common.atomic_files import amount

FindingKind = Literal[
    "synchronisation", "shape", "operators", "generator", "host generator", "default generator",
]  # fmt: skip
"""The host waits for the device; a tensor's shape, or the operators, change from step to step; random numbers come from a
CUDA generator unknown to a capture, from one of the host, or from the default one."""
KINDS: tuple[FindingKind, ...] = get_args(FindingKind)

BOUNDS_US = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
"""Upper bounds of the classes of kernel durations, in microseconds."""


@dataclass(frozen=True)
class Finding:
    """A line of code that prevents a capture, and how often per step.

    ``file`` is relative to the checkout. If the line is unknown, ``file`` is empty and ``line`` 0: autograd runs C++ operators in
    its own threads.
    """

    kind: FindingKind
    file: str
    line: int
    function: str
    code: str
    count: float
    detail: str = ""


@dataclass(frozen=True)
class KernelTime:
    """All kernels of one name: their number and their total milliseconds per step."""

    name: str
    count: float
    milliseconds: float


@dataclass(frozen=True)
class Kernels:
    """The kernels of a step by duration.

    ``counts[i]`` kernels take less than ``BOUNDS_US[i]`` and at least the bound before it; the last count is the rest. ``longest``
    are the kernel names with the largest total time.
    """

    counts: tuple[float, ...]
    median_us: float
    longest: tuple[KernelTime, ...]

    @property
    def number(self) -> float:
        return sum(self.counts)

    def share_below(self, bound_us: float) -> float:
        """Return the share of kernels below ``bound_us``, one of ``BOUNDS_US``; 0 without kernels."""
        return sum(self.counts[: BOUNDS_US.index(bound_us) + 1]) / self.number if self.number else 0.0


@dataclass(frozen=True)
class Inspection:
    """What one rank found in a few steps after the timed ones. A CPU has neither kernels nor waits.

    ``waits`` counts per step how often the driver was asked to wait for the device. ``recompilations`` counts functions that were
    recompiled.
    """

    findings: tuple[Finding, ...]
    kernels: Kernels | None = None
    waits: float = 0.0
    recompilations: int = 0


def inspection_from_json(content: Mapping[str, Any]) -> Inspection:
    """Read an inspection from an event.

    Raises:
        KeyError, TypeError, ValueError: a field is missing, unknown or of another type.
    """
    kernels = content["kernels"]
    return Inspection(
        tuple(_finding(one) for one in content["findings"]),
        None if kernels is None else _kernels(kernels),
        amount(content["waits"]),
        int(amount(content["recompilations"])),
    )


def _finding(content: Mapping[str, Any]) -> Finding:
    found = Finding(**content)
    if found.kind not in KINDS:
        raise ValueError(f"{found.kind!r} is not a kind of finding")
    amount(found.line), amount(found.count)
    return found


def _kernels(content: Mapping[str, Any]) -> Kernels:
    counts = tuple(map(amount, content["counts"]))
    if len(counts) != len(BOUNDS_US) + 1:
        raise ValueError(f"kernels are counted in {len(counts)} lengths, not in {len(BOUNDS_US) + 1}")
    longest = tuple(KernelTime(**one) for one in content["longest"])
    for one in longest:
        amount(one.count), amount(one.milliseconds)
    return Kernels(counts, amount(content["median_us"]), longest)
