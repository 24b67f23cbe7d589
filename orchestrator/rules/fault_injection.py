"""Faults on purpose that would not come about, so that a run would end well that is to fail."""

from __future__ import annotations

from collections.abc import Set

from launch.contract.spec import RunSpec
from orchestrator.rules.rule import ANY, BOTH, Rule, compiled_text

ANYWHERE: Set[str] = {"exception", "nan", "hang", "segfault", "host_kill"}
OF_FORWARD_PASSES: Set[str] = {
    "item_in_capture", "background_thread", "unjoined_stream", "legacy_stream", "unregistered_generator", "oom_capture",
    "input_freed", "frozen_scalar",
}  # fmt: skip
"""What comes by way of hooks on modules."""
OF_REPLAYS: Set[str] = {"oom_replay", "input_freed", "dynamic_shape"}


def step_out_of_range(spec: RunSpec) -> str | None:
    """A fault comes in a step of the run after the first, and one of replays (input_freed, dynamic_shape, oom_replay)
    after the capture."""
    fault, warmup_steps = spec.fault, spec.cuda_graph.warmup_steps
    first = max(1, warmup_steps + 1) if fault.kind in OF_REPLAYS else 1
    if not fault.is_set or first <= fault.step < spec.training.steps:
        return None
    return (
        f"fault.kind={fault.kind}, fault.step={fault.step} with training.steps={spec.training.steps} and "
        f"cuda_graph.warmup_steps={warmup_steps}"
    )


def needs_a_gpu(spec: RunSpec) -> str | None:
    """On a CPU only exception, nan, hang, segfault and host_kill come about."""
    kind = spec.fault.kind
    if not spec.fault.is_set or kind in ANYWHERE or spec.placement.device == "cuda":
        return None
    return f"fault.kind={kind} with device={spec.placement.device}"


def traces_hooks(spec: RunSpec) -> str | None:
    """What comes in a forward pass or in its capture does not go with torch_compile or training.compile=whole: hooks are
    traced once and not called again."""
    kind = spec.fault.kind
    if kind not in OF_FORWARD_PASSES or not spec.compiles_whole:
        return None
    return f"fault.kind={kind} with {compiled_text(spec)}"


RULES: tuple[Rule, ...] = (
    Rule(
        "fault.step", BOTH, ANY, step_out_of_range,
        remedy="Set fault.step from 1 (after the capture: from cuda_graph.warmup_steps + 1) to training.steps - 1.",
        source="launch/train/fault_injection.py",
    ),
    Rule(
        "fault.device", BOTH, ANY, needs_a_gpu,
        remedy="Set resources.device to cuda, or fault.kind to one that a CPU has.",
        source="launch/train/fault_injection.py",
    ),
    Rule(
        "fault.hooks", BOTH, ANY, traces_hooks,
        remedy="Set cuda_graph.impl to full_iteration, torch or transformer_engine, and training.compile to none or "
        "elementwise.",
        source="launch/train/fault_injection.py; Dynamo guards the numbers that a hook reads",
    ),
)  # fmt: skip
