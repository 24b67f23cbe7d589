"""One field of a spec that an engine takes with some values alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from launch.contract.plan import Reason
from launch.contract.spec import Model, RunSpec


@dataclass(frozen=True)
class SupportRule:
    """One field of a spec, and when the engine takes it as it is."""

    field: str
    """Section and name, as a recipe spells it: ``parallelism.tp``; or the name alone of what has no section."""
    accepts: Callable[[Any, RunSpec], bool]
    """Of the field's value and the whole spec."""
    remedy: str

    @property
    def name(self) -> str:
        return self.field.rpartition(".")[2]

    def value(self, spec: RunSpec) -> Any:
        return attrgetter(self.field)(spec)

    def judge(self, spec: RunSpec) -> Reason | None:
        """Why ``spec`` is beyond its engine; none where it is not."""
        value = self.value(spec)
        if self.accepts(value, spec):
            return None
        shown = list(value) if isinstance(value, tuple) else value
        return Reason(
            f"{spec.engine}.{self.name}",
            f"{self.field}={shown!r} with device {spec.placement.device!r} is beyond engine {spec.engine} in this version",
            self.remedy,
        )


def fixed(field: str, allowed: Any, remedy: str = "") -> SupportRule:
    """A field that has one value; setting it is the way out where no other is named."""
    spelt = json.dumps(allowed).strip('"')
    return SupportRule(field, lambda value, spec: value == allowed, remedy or f"set {field}={spelt}")


def is_plain(model: Model) -> bool:
    """Whether every token attends to all before it, and to nothing else."""
    return model.window_size == 0 and not model.attention_sinks
