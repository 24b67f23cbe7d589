"""Inspect a few steps: the durations of their kernels, and the lines of code that prevent a capture.

The inspection has two passes. The first one, only on CUDA, runs under the profiler with PyTorch's synchronization warnings
(``torch.cuda.set_sync_debug_mode``). The second one records every dispatched operator and compares the steps. Inspected steps
are not timed, and the inspection does not change what a step computes.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

import torch

from launch.contract.records.inspection import Finding, Inspection
from launch.train.inspection.dispatch_trace import CaptureBlocker
from launch.train.inspection.source_line import Line, current_user_line
from launch.train.inspection.step_operators import StepOperators, findings_of
from launch.train.telemetry.kernel_times import kernels_of
from launch.train.telemetry.profiler import calls_of, host_syncs, is_kernel, trace

_WARNING = "called a synchronizing CUDA operation"
"""The text of PyTorch's warning (c10/cuda/CUDAFunctions.cpp, warn_or_error_on_sync)."""
_LONGEST_REASON = 300

Step = Callable[[torch.Tensor], object]


def inspect(step: Step, batches: Sequence[torch.Tensor]) -> Inspection:
    """Inspect ``step`` on at least two different ``batches``. Run each batch once, or twice on CUDA.

    All ranks must call this together.
    """
    if batches[0].device.type == "cpu":
        return Inspection(tuple(_dispatched(step, batches)))
    waited: list[CaptureBlocker] = []
    compiled = compiled_functions()

    def work() -> None:
        with collect_waits(waited, current_user_line):
            for batch in batches:
                step(batch)

    events = trace(work)
    compiled = compiled_functions() - compiled
    return Inspection(
        (*findings_of(waited, len(batches)), *_dispatched(step, batches)),
        kernels_of([(event.name(), event.duration_ns()) for event in events if is_kernel(event)], len(batches)),
        host_syncs(calls_of(events)) / len(batches),
        compiled,
    )


# --- the host waits for the device ----------------------------------------------------------------------------------


@contextlib.contextmanager
def collect_waits(waited: list[CaptureBlocker], find_line: Callable[[], Line]) -> Iterator[None]:
    """Collect PyTorch's warnings about waits of the host. ``find_line`` returns the line that causes the current one."""
    mode, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning

    def note(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if _WARNING in str(message):
            waited.append(CaptureBlocker("synchronisation", find_line()))
        else:
            show(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=_WARNING)
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def compiled_functions() -> int:
    """Return the number of functions that Dynamo has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def compile_obstacle() -> str:
    """Describe what kept Dynamo or Inductor from a compiled function or its CUDA graphs in this process; return "" if unknown."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if not dynamo:
        return ""
    skips = dynamo.counters["inductor"]["cudagraph_skips"]
    if skips:
        return f"Inductor skipped CUDA graphs {skips} times (its log has the reason: skipping cudagraphs due to)"
    reasons = (line.strip() for text in dynamo.counters["graph_break"] for line in text.splitlines()[:2])
    found = " ".join(dict.fromkeys(reasons)).replace("Explanation: ", "")
    return f"Dynamo did not compile a part: {found[:_LONGEST_REASON]}" if found else ""


def _dispatched(step: Step, batches: Sequence[torch.Tensor]) -> list[Finding]:
    """Find differences between steps, and generators that steps draw from."""
    operators = StepOperators(batches[0].device, current_user_line)
    for batch in batches:
        with operators.begin():
            step(batch)
    return operators.findings()
