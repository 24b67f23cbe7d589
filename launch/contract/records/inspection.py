"""The findings of an inspection: the kernels of a step, and what prevents its capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from launch.common.typed_json import Amount, Count
from launch.contract.records.kernels import Kernels

FindingKind = Literal[
    "synchronisation", "shape", "operators", "generator", "host generator", "default generator", "kernels", "allocation",
]  # fmt: skip
"""What prevents a capture. "synchronisation": the host waits for the device. "shape", "operators", "kernels": a tensor's shape,
the operators or the kernels change from step to step. The generators: random numbers come from a CUDA generator that the
capture does not know, from a host generator, or from the default generator. "allocation": PyTorch's allocator takes memory
from the driver."""
KINDS: tuple[FindingKind, ...] = get_args(FindingKind)
INSPECTED_STEPS = 2
"""The number of steps whose operators are compared. Two are the fewest."""
OF_OPERATORS: tuple[FindingKind, ...] = KINDS[1:6]
"""What the operators of a few steps show, on any device."""
OF_ENGINES: tuple[FindingKind, ...] = KINDS[:6]
"""What an inspection of this project's engines looks for."""
OF_TRACES: tuple[FindingKind, ...] = ("synchronisation", "kernels", "allocation")
"""What the observer of a user's program finds in a trace of its steps, on a GPU."""


@dataclass(frozen=True)
class Finding:
    """A line of code that prevents a capture, and how often per step.

    ``file`` is relative to the checkout, or to the folder from which a user's program imports it. If the line is unknown,
    ``file`` is empty and ``line`` is 0. This happens because autograd runs C++ operators in its own threads, and because the
    profiler knows no lines.
    """

    kind: FindingKind
    file: str
    line: Count
    function: str
    code: str
    count: Amount
    detail: str = ""


@dataclass(frozen=True)
class Inspection:
    """What one rank found in a few steps after the timed ones. On a CPU there are no kernels and no waits.

    ``waits`` is the number of calls per step that ask the driver to wait for the device. ``recompilations`` counts the
    recompiled functions. Of kinds that are not in ``sought``, nothing is known.
    """

    findings: tuple[Finding, ...]
    kernels: Kernels | None = None
    waits: Amount = 0.0
    recompilations: Count = 0
    sought: tuple[FindingKind, ...] = OF_ENGINES
