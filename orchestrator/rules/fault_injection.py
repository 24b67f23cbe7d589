"""Rules on injected faults. They reject faults that would never occur: a run that is meant to fail would pass."""

from __future__ import annotations

from collections.abc import Set

from launch.contract.spec import RunSpec
from launch.support.rule import UNCOMPILED, Rule

ON_ANY_DEVICE: Set[str] = {"exception", "nan", "hang", "segfault", "host_kill"}
IN_FORWARD_PASSES: Set[str] = {
    "item_in_capture", "background_thread", "unjoined_stream", "legacy_stream", "unregistered_generator", "oom_capture",
    "input_freed", "frozen_scalar", "frozen_draw",
}  # fmt: skip
"""Faults that hooks on modules inject."""
IN_REPLAYS: Set[str] = {"oom_replay", "input_freed", "dynamic_shape"}


def _step_out_of_range(spec: RunSpec) -> bool:
    first = max(1, spec.cuda_graph.warmup_steps + 1) if spec.fault.kind in IN_REPLAYS else 1
    return spec.fault.is_set and not first <= spec.fault.step < spec.training.steps


RULES: tuple[Rule, ...] = (
    Rule(
        "fault.step", ("fault.kind", "fault.step", "training.steps", "cuda_graph.warmup_steps"),
        "fault.step must be 1 or more and below training.steps, and faults of replays (input_freed, dynamic_shape, oom_replay) "
        "must come after the capture",
        _step_out_of_range,
        fix="Set fault.step from 1 (after the capture: from cuda_graph.warmup_steps + 1) to training.steps - 1.",
        source="launch/train/fault_injection.py",
    ),
    Rule(
        "fault.device", ("fault.kind", "placement.device"),
        "on a CPU only exception, nan, hang, segfault and host_kill can occur",
        lambda spec: spec.fault.is_set and spec.fault.kind not in ON_ANY_DEVICE and spec.placement.device != "cuda",
        fix="Set resources.device=cuda, or fault.kind to one that a CPU has.",
        source="launch/train/fault_injection.py",
    ),
    Rule(
        "fault.hooks", ("fault.kind", "training.compile", "cuda_graph.impl"),
        "a hook injects this fault, but a compiled model calls hooks only once, during tracing",
        lambda spec: spec.fault.kind in IN_FORWARD_PASSES and spec.compiles_whole,
        fix=f"Set {UNCOMPILED}.",
        source="launch/train/fault_injection.py; Dynamo adds guards on the numbers that a hook reads",
    ),
)  # fmt: skip
