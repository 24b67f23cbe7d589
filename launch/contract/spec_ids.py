"""The digests that identify a RunSpec.

* ``run_id``: everything that determines the run, including its repeat.
* ``workload_id``: what an eager and a graphed run must share to be compared: everything but ``cuda_graph`` and ``repeat``.
* ``task_id``: what makes cells rankable against each other: model mathematics, data, batch, precision, optimizer.

An injected fault, a user's command and layer checks are part of all three.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launch.contract.spec import RunSpec

LAYOUT_ONLY = (
    "micro_batch_size", "recompute", "recompute_modules", "compile", "attention_backend", "gradient_accumulation_fusion", "moe_router_fusion",
    "capturable_optimizer", "cpu_offloading", "deterministic", "fp8_weight_caching",
)  # fmt: skip
"""Training fields that change how a task runs, but not the task. The first one belongs to the task if a loss depends on the
micro-batch (see :func:`task_id`)."""

PADDING = ("max_documents",)
"""Data fields that only pad what a task trains on."""

BEFORE_FIELDS = (
    ("attention_dropout", 0.0), ("hidden_dropout", 0.0), ("optimizer_precision", "fp32"), ("pattern", ""), ("capturable_optimizer", False),
    ("max_documents", None), ("hybrid_override_pattern", ""), ("fp8_weight_caching", True),
)  # fmt: skip
"""What runs did before these fields existed. At this value a digest omits the field, so those runs keep their ids."""


def run_id(cell_id: str, repeat: int, *, perturbed: bool = False) -> str:
    """Return the id of a cell's repeat, readable in squeue and in a tracker: ``torch_compile-1a2b3c4d5e-r0``.

    Its perturbed run has the id ``eager-1a2b3c4d5e-perturbed``.
    """
    return f"{cell_id}-perturbed" if perturbed else f"{cell_id}-r{repeat}"


def cell_digest(spec: RunSpec) -> str:
    """Return the digest of a cell. It contains step checks, so a sweep with step checks repeats runs made without them."""
    checks = {"step_checks": canonical(spec.step_checks)} if spec.checked_steps else {}
    return _digest_of({**spec.identity, **checks})


def workload_id(spec: RunSpec) -> str:
    parts = {**spec.identity}
    del parts["cuda_graph"]
    # A graphed run and its eager baseline are compared over the same window, so they must share the warm-up.
    parts["warmup_steps"] = canonical(spec.cuda_graph.warmup_steps)
    return _digest_of(parts)


def task_id(spec: RunSpec) -> str:
    model, layout = spec.model, spec.parallelism
    # Drop-and-pad experts and the load-balancing loss depend on the micro-batch, so the task then contains its size.
    # Expert capacity depends on the tokens that one rank of tp and cp routes.
    drops = model.moe_expert_capacity_factor is not None
    training = _section_text(spec.training, LAYOUT_ONLY[drops or model.moe_aux_loss_coeff != 0 :])
    parts = {"model": _section_text(model), "training": training, "data": _section_text(spec.data, PADDING)}
    if drops:
        parts["tp"] = canonical(layout.tp)
        parts["cp"] = canonical(layout.cp)
    return _digest_of(parts | _purpose(spec))


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def canonical(content: object) -> str:
    return _CANONICAL.encode(content)


def digest(content: object) -> str:
    """Return ten hexadecimal digits of the SHA-256 of ``content`` as canonical JSON."""
    return _sha(canonical(content))


def identity(spec: RunSpec) -> dict[str, str]:
    """Return what determines a cell, as canonical JSON by section: everything but the repeat and the preset's name."""
    sections = ("model", "parallelism", "training", "data", "placement")
    parts = {name: _section_text(getattr(spec, name)) for name in sections} | _purpose(spec)
    unset = () if spec.cuda_graph.name or spec.cuda_graph.arguments else ("name", "arguments")
    parts["cuda_graph"] = _section_text(spec.cuda_graph, unset if spec.cuda_graph.mend else (*unset, "mend"))
    release = {"megatron_core": canonical(spec.megatron_core)} if spec.engine == "megatron" else {}
    return parts | release | {"engine": canonical(spec.engine), "environment": canonical(dict(spec.environment))}


def _purpose(spec: RunSpec) -> dict[str, str]:
    # The step of a fault that is not set changes nothing.
    fault = {"fault": _section_text(spec.fault)} if spec.fault.is_set else {}
    command = {"command": _section_text(spec.command)} if spec.command != type(spec.command)() else {}
    layers = {"layer_check_steps": canonical(spec.layer_check_steps)} if spec.layer_check_steps else {}
    profile = {"profile": canonical(spec.profile)} if spec.profile != "none" else {}
    return fault | command | layers | profile


@lru_cache(maxsize=4096)
def _section_text(section: object, without: tuple[str, ...] = ("preset",)) -> str:
    """Return a section as canonical JSON. Cached, because thousands of cells share few sections and need three digests each."""
    fields = vars(section).items()
    return canonical(
        {name: value for name, value in fields if name not in without and (name, value) not in BEFORE_FIELDS}
    )


def _digest_of(parts: Mapping[str, str]) -> str:
    """Return the digest of an object whose members are canonical JSON already."""
    return _sha("{" + ",".join(f'"{name}":{parts[name]}' for name in sorted(parts)) + "}")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
