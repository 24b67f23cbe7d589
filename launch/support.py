"""What each engine can do in this version; all else is refused by name, before a run is submitted and again in the job.

One table an engine: a row is a field, the values that the engine takes, and the way out for all others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.record import Reason
from launch.spec import RunSpec


@dataclass(frozen=True)
class Limit:
    """One field of a spec, and when the engine takes it as it is."""

    field: str
    """Section and name, as a recipe spells it: ``parallelism.tp``."""
    accepts: Callable[[Any, RunSpec], bool]
    """Of the field's value and the whole spec."""
    remedy: str

    @property
    def name(self) -> str:
        return self.field.partition(".")[2]

    def value(self, spec: RunSpec) -> Any:
        section, _, name = self.field.partition(".")
        return getattr(getattr(spec, section), name)


def unsupported(spec: RunSpec) -> tuple[Reason, ...]:
    """Why the engine that ``spec`` names cannot run it, one reason a field; empty where it can."""
    if spec.engine not in LIMITS:
        message = f"engine {spec.engine} is not part of this version"
        return (Reason(f"{spec.engine}.engine", message, f"use one of: {', '.join(LIMITS)}"),)
    return tuple(
        Reason(f"{spec.engine}.{limit.name}", _message(limit, spec), limit.remedy)
        for limit in LIMITS[spec.engine]
        if not limit.accepts(limit.value(spec), spec)
    )


def _message(limit: Limit, spec: RunSpec) -> str:
    value = limit.value(spec)
    shown = list(value) if isinstance(value, tuple) else value
    return (
        f"{limit.field}={shown!r} with device {spec.placement.device!r} is beyond engine {spec.engine} in this version"
    )


def _only(field: str, allowed: Any, remedy: str = "") -> Limit:
    spelt = json.dumps(allowed).strip('"')
    return Limit(field, lambda value, spec: value == allowed, remedy or f"set {field}={spelt}")


def _grouped_mm_width(width: int, spec: RunSpec) -> bool:
    """CUDA's grouped_mm wants rows of whole 16 bytes: 8 elements of bfloat16. float32 is multiplied expert by expert."""
    in_groups = spec.model.is_moe and spec.training.precision == "bf16" and spec.placement.device == "cuda"
    return not in_groups or width % 8 == 0


def _expresses(backend: str, spec: RunSpec) -> bool:
    """Whether an attention backend expresses the model's layers on this device; auto chooses one that does."""
    plain = spec.model.window_size == 0 and not spec.model.attention_sinks and not spec.data.packed_sequences
    on_cuda = spec.placement.device == "cuda"
    if backend == "transformer_engine":
        return on_cuda and spec.training.precision == "bf16" and not spec.data.packed_sequences
    return backend == "auto" or (plain if backend == "sdpa" else on_cuda)


def _compiles_alone(impl: str, spec: RunSpec) -> bool:
    """Whether what torch_compile compiles is a model that lies whole on its rank."""
    layout = spec.parallelism
    return impl != "torch_compile" or (layout.tp, layout.pp, layout.ep) == (1, 1, 1)


TORCH_NATIVE: tuple[Limit, ...] = (
    Limit("model.kv_channels", lambda channels, spec: channels % 2 == 0, "set an even one: RoPE rotates pairs"),
    Limit(
        "model.moe_expert_capacity_factor",
        lambda factor, spec: factor is None or spec.model.moe_pad_expert_input_to_capacity,
        "set model.moe_pad_expert_input_to_capacity=true, or model.moe_expert_capacity_factor=null (dropless)",
    ),
    Limit("model.hidden_size", _grouped_mm_width, "set a multiple of 8, or resources.device=cpu"),
    Limit("model.moe_ffn_hidden_size", _grouped_mm_width, "set a multiple of 8, or resources.device=cpu"),
    _only("parallelism.etp", 1),
    _only("parallelism.cp", 1, remedy="set parallelism.cp=1, or engine=megatron"),
    Limit(
        "training.attention_backend",
        _expresses,
        "set training.attention_backend=auto: sdpa has neither windows, sinks nor packed documents, flex and "
        "transformer_engine run on CUDA, and transformer_engine takes bf16 without packed documents",
    ),
    _only("training.cpu_offloading", False),
    _only("training.variable_sequence_lengths", False),
    Limit(
        "cuda_graph.impl",
        lambda impl, spec: impl in ("none", "torch_compile") or spec.placement.device == "cuda",
        "set cuda_graph.impl=none or torch_compile, or resources.device=cuda",
    ),
    Limit(
        "cuda_graph.impl",
        _compiles_alone,
        "set cuda_graph.impl=none, or tp, pp and ep to 1: collectives break the graph",
    ),
)

LIMITS: dict[str, tuple[Limit, ...]] = {"torch_native": TORCH_NATIVE}
