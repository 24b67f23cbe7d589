"""The fields of a recipe: which there are, what each takes, and what was probably meant by one that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from launch.contract.outcomes import Expectation
from launch.contract.plan import Margins
from launch.contract.spec import CudaGraph, Data, Fault, Model, Parallelism, Training
from orchestrator.errors import suggestion
from orchestrator.recipe.aliases import canonical_place
from orchestrator.recipe.section_schema import Schema
from orchestrator.rules.bounds import ABOVE_ZERO, COUNT, POSITIVE, Interval


@dataclass(frozen=True)
class Resources:
    """What a run is given. ``gpus_per_node`` 0 asks for one device a rank, on one node."""

    nodes: int = 1
    gpus_per_node: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: int = 1
    minutes_per_run: float = 30.0
    hang_minutes: float = 10.0


@dataclass(frozen=True)
class Tracking:
    """Weights & Biases. ``auto`` is online where there is a key and a network, else offline."""

    project: str = "cuda-graphs"
    entity: str | None = None
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class TopLevel:
    """The fields that stand alone at a recipe's top."""

    name: str = ""
    engine: Literal["torch_native", "megatron"] = "torch_native"
    repeats: int = 2
    cluster: str = ""


SECTIONS: Mapping[str, type] = {
    "model": Model,
    "parallelism": Parallelism,
    "training": Training,
    "data": Data,
    "cuda_graph": CudaGraph,
    "fault": Fault,
    "expect": Expectation,
    "equivalence": Margins,
    "resources": Resources,
    "wandb": Tracking,
}
NOT_SWEPT = ("name", "repeats", "cluster", "equivalence", "wandb", "sweep")
"""What is one for the whole sweep, and so cannot be an axis."""
_BOUNDS: Mapping[str, Mapping[str, Interval]] = {
    "equivalence": {"loss": COUNT, "grad_norm": COUNT},
    "resources": {
        "nodes": POSITIVE,
        "gpus_per_node": COUNT,
        "threads_per_rank": POSITIVE,
        "minutes_per_run": ABOVE_ZERO,
        "hang_minutes": ABOVE_ZERO,
    },
}
"""Of fields that no rule of legality judges, since no cell holds them."""

HEAD = Schema(TopLevel, {"repeats": POSITIVE})
SCHEMAS: Mapping[str, Schema] = {name: Schema(cls, _BOUNDS.get(name, {})) for name, cls in SECTIONS.items()}
FIELDS = (*HEAD.fields, *(f"{section}.{field}" for section, schema in SCHEMAS.items() for field in schema.fields))
TOP = (*HEAD.fields, *SECTIONS, "environment", "sweep")


def is_field(key: str) -> bool:
    """Whether ``key`` is a field, or a section that holds fields."""
    return key in FIELDS or key in SECTIONS or key.partition(".")[0] == "environment"


def meant(place: str, known: Iterable[str]) -> str:
    """The way out for an unknown field: one of ``known`` but for a letter, else a field of this name elsewhere, else
    one of ``known`` that is close."""
    name, known = canonical_place(place).rpartition(".")[2], list(known)
    elsewhere = [field for field in FIELDS if field.rpartition(".")[2] == name]
    slip = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    return f"did you mean {elsewhere[0]!r}?" if elsewhere and not slip else suggestion(name, known)


def way_out(schema: Schema, key: str, value: Any) -> str:
    if schema.choices(key):
        return suggestion(value, schema.choices(key), otherwise="write one of them")
    if isinstance(value, (bool, int, float)) and "text" in schema.describe_type(key):
        return f"write it in quotes: '{value}'"
    return f"write {schema.describe_type(key)}, or leave it out for the default"
