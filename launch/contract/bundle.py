"""What launch.supervise.supervisor is told of a bundle: bundle.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.contract.plan import Limits


@dataclass(frozen=True)
class Step:
    """How ranks are started in an allocation of Slurm's: each run is one step, by one srun.

    ``arguments`` are srun's: the kind of MPI, container flags, what the site needs. ``python`` is the interpreter of
    ranks, as it is called inside the container where there is one.
    """

    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    python: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class BundleOrder:
    """What launch.supervise.supervisor is told: make attempt k of run R, in this order, each within its limits.

    An attempt whose folder exists is never made again, so that a bundle started twice does its work once.
    """

    bundle_id: str
    workload_id: str
    schedule: tuple[tuple[str, int], ...]
    """(run_id, attempt) pairs."""
    limits: Limits
    slots: int
    """CPU or GPU slots of the host that the bundle takes; 0 in an allocation of Slurm's, which is the bundle's alone."""
    slot_names: tuple[str, ...]
    """All slots of the host: the identifiers of its visible GPUs, or cpu0, cpu1, ..."""
    tracking: Mapping[str, Any] | None = None
    """What launch.supervise.wandb_tracker needs to follow a run; None is no tracking."""
    step: Step | None = None
    """How ranks are started under Slurm; None starts them on this host, under torchrun's agent."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the cluster's profile, for every rank; what a run's own spec says goes before it."""


def order_to_json(order: BundleOrder) -> dict[str, Any]:
    return dataclasses.asdict(order)


def order_from_json(content: Mapping[str, Any]) -> BundleOrder:
    schedule = tuple((str(run_id), int(attempt)) for run_id, attempt in content["schedule"])
    step = content["step"] and Step(**content["step"] | {"arguments": tuple(content["step"]["arguments"])})
    return BundleOrder(**dict(content) | {
        "schedule": schedule,
        "limits": Limits(**content["limits"]),
        "slot_names": tuple(content["slot_names"]),
        "step": step,
    })  # fmt: skip
