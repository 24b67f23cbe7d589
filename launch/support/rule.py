"""A rule: one reason why a cell cannot run, known before a GPU is used. Pure.

The orchestrator applies all rules to a spec before it submits it. A job applies the rules in this folder to its own spec again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, get_args

from launch.contract.errors import OrchestratorError
from launch.contract.plan import Reason
from launch.contract.spec import EngineName, MegatronCore, RunSpec

MCORE = "megatron-core 0.16.1 "
"""The prefix of sources. File and line refer to the released wheel, below ``megatron/core``."""
CONFIG = f"{MCORE}transformer/transformer_config.py"
ARITHMETIC = "arithmetic"

GRAPH = ("cuda_graph.impl", "cuda_graph.scope")
RECOMPUTED = ("training.recompute", "training.recompute_modules", *GRAPH)
DROPOUT = ("model.attention_dropout", "model.hidden_dropout")
NO_DROPOUT = "model.attention_dropout=0 and model.hidden_dropout=0"
UNCOMPILED = (
    "cuda_graph.impl=full_iteration and training.compile=none, or cuda_graph.impl=torch and training.compile=none"
)
UNPACKED = "data.packed_sequences=false and data.max_documents=null"

RELEASES: tuple[MegatronCore, ...] = get_args(MegatronCore)
ALL_ENGINES: tuple[EngineName, ...] = get_args(EngineName)

_PLAIN = re.compile(r"[\w./:-]+")
_RESOURCES = {
    "placement.device": "resources.device",
    "placement.nodes": "resources.nodes",
    "placement.ranks_per_node": "resources.gpus_per_node",
}
"""The fields of RunSpec that a recipe writes under another name."""


@dataclass(frozen=True)
class Rule:
    """One row of a table of rules."""

    id: str
    fields: tuple[str, ...]
    """The names that a message lists with their values: fields and properties of RunSpec, and ``environment.NAME``."""
    statement: str
    """The condition that must hold. A message has the values, then "but", then this text."""
    violated: Callable[[RunSpec], bool | Sequence[str]]
    """Returns whether a spec violates the rule, or the violating fields, which a message then names. It never raises an error,
    and accepts values that another rule rejects."""
    fix: str
    """A change after which no other rule rejects the cell."""
    source: str = ""
    engines: tuple[EngineName, ...] = ("torch_native", "megatron")
    releases: tuple[MegatronCore, ...] = RELEASES
    """The releases of Megatron-Core for which the rule holds."""

    @property
    def versions(self) -> str:
        """The versions of libraries for which the rule holds, in words."""
        others = [release for release in RELEASES if release not in self.releases]
        without = f", not {' and '.join(others)}" if others else ""
        return "any" if self.engines != ("megatron",) else f"megatron-core {' and '.join(self.releases)}{without}"

    def judge(self, spec: RunSpec) -> Reason | None:
        holds = spec.engine in self.engines and (spec.engine != "megatron" or spec.megatron_core in self.releases)
        found = self.violated(spec) if holds else False
        if not found:
            return None
        fields = self.fields if isinstance(found, bool) else found
        values = ", ".join(f"{written(field)}={spell(field_value(spec, field))}" for field in fields)
        versions = "" if self.versions == "any" else f" ({self.versions})"
        return Reason(self.id, f"{values}, but {self.statement}{versions}", self.fix, self.source)


NativeRule = partial(Rule, engines=("torch_native",))
MegatronRule = partial(Rule, engines=("megatron",))
ONE_ENGINE: Mapping[EngineName, Callable[..., Rule]] = {"torch_native": NativeRule, "megatron": MegatronRule}


def judge(rules: Iterable[Rule], spec: RunSpec) -> tuple[Reason, ...]:
    """Return one reason for each rule that ``spec`` violates, in the order of ``rules``."""
    # A plan of thousands of cells calls this with hundreds of rules for each, and few of them are violated.
    engine = spec.engine
    violated = [rule for rule in rules if engine in rule.engines and rule.violated(spec)]
    return tuple(reason for rule in violated if (reason := rule.judge(spec)) is not None)


def refuse(reasons: Sequence[Reason], error: type[OrchestratorError]) -> None:
    """Raise ``error`` with all reasons and their fixes, unless there are none."""
    if reasons:
        raise error(" ".join(reason.text for reason in reasons))


def field_value(spec: RunSpec, field: str) -> Any:
    section, _, name = field.partition(".")
    return spec.environment.get(name) if section == "environment" else attrgetter(field)(spec)


def written(field: str) -> str:
    """Return the name by which a recipe sets ``field``."""
    return _RESOURCES.get(field, field)


def spell(value: object) -> str:
    """Return ``value`` in the spelling of a recipe."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(spell, value))}]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else repr(value)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def divides(divisor: int, value: int) -> bool:
    """Return whether ``divisor`` divides ``value``. Return True for a divisor below 1, which another rule rejects."""
    return divisor < 1 or value % divisor == 0


def fixed(engine: EngineName, field: str, value: object, fix: str = "") -> Rule:
    """Return a rule that rejects every value of ``field`` except ``value``."""
    name, setting, read = field.rpartition(".")[2], f"{written(field)}={spell(value)}", attrgetter(field)
    return ONE_ENGINE[engine](
        f"{engine}.{name}", (field,), f"engine {engine} supports {setting} only",
        lambda spec: bool(read(spec) != value),
        fix=fix or f"Set {setting}.",
    )  # fmt: skip


def padded_capacity(engine: EngineName) -> Rule:
    """Return the rule that an engine supports a capacity factor only with padding to the capacity."""
    factor, pad = "model.moe_expert_capacity_factor", "model.moe_pad_expert_input_to_capacity"
    return ONE_ENGINE[engine](
        f"{engine}.moe_expert_capacity_factor", (factor, pad), f"engine {engine} supports a capacity factor only with padding",
        lambda spec: spec.model.moe_expert_capacity_factor is not None and not spec.model.moe_pad_expert_input_to_capacity,
        fix=f"Set {pad}=true, or {factor}=null (dropless).",
    )  # fmt: skip


def deterministic_sinks(engine: EngineName, backends: Sequence[str], fix: str) -> Rule:
    """Return the rule that no deterministic run may compute sinks by Transformer Engine's fused kernel.

    Args:
        backends: the values of ``training.attention_backend`` by which ``engine`` uses Transformer Engine. In fp32 it has no
            fused kernel.
    """
    return ONE_ENGINE[engine](
        f"{engine}.deterministic",
        ("training.deterministic", "model.attention_sinks", "training.attention_backend", "training.precision"),
        "Transformer Engine's fused attention adds the gradient of sinks in a varying order in deterministic mode too (observed "
        "with 2.11; later releases have not run here)",
        lambda spec: spec.training.deterministic
        and spec.model.attention_sinks
        and spec.training.attention_backend in backends
        and spec.training.precision == "bf16"
        and spec.placement.device == "cuda",
        fix=f"Set training.deterministic=false and step_checks=5, or {fix}.",
        source="transformer_engine 2.11 common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu:854; from 2.12 on deterministic mode "
        "excludes this kernel: pytorch/attention/dot_product_attention/utils.py:1060",
    )  # fmt: skip
