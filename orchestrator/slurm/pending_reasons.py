"""Explain why a job will not start until somebody acts, with the fix. Pure.

The sources are job_state_reason.c of Slurm 20.11 to 25.05, the descriptions that slurmctld shows instead of a reason, and
resource_limits.html for the limits. Reasons that pass with time (Priority, Resources, Dependency, BeginTime, ...) have no row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launch.slurm.job_states import stage_of
from orchestrator.slurm.job_listing import Job

OF_THIS_SWEEP = ("Dependency", "JobArrayTaskLimit")
"""The reasons for which a job waits for earlier jobs of its own sweep: those of its name, or of its array."""


@dataclass(frozen=True)
class PendingReason:
    """What keeps a job from starting until somebody acts. ``fix`` contains {job}."""

    meaning: str
    fix: str
    pattern: str = ""


_CORRECT = "scancel {job}, correct that in the cluster's profile, then resume the sweep"
_SMALLER = (
    "scancel {job}, ask for less (resources and repeats of the recipe, or the cluster's profile), then sweep again"
)
_WAIT = (
    "ask an administrator how long; or scancel {job}, name other nodes in the cluster's profile, then resume the sweep"
)

# The first row that matches counts.
PENDING_REASONS: tuple[PendingReason, ...] = (
    PendingReason("its user holds it", "scontrol release {job}", r"^JobHeldUser"),
    PendingReason("an administrator holds it", "ask them to release it; or scancel {job}", r"^JobHeldAdmin"),
    PendingReason("it failed to launch, and Slurm holds it", "scontrol release {job}; or scancel {job}, then resume the sweep",
             r"requeued.held|^JobHoldMaxRequeue|^JobLaunchFailure|^SystemFailure"),
    PendingReason("no node of the partition satisfies its constraints", _CORRECT, r"^BadConstraints|^Constraints$"),
    PendingReason("its dependency can never be satisfied", "scancel {job}, then resume the sweep", r"^DependencyNeverSatisfied"),
    PendingReason("it requests more nodes than the partition allows, or nodes that it needs are down", _SMALLER, r"^PartitionNodeLimit|^PartitionConfig"),
    PendingReason("it requests more time than the partition allows", _SMALLER, r"^PartitionTimeLimit"),
    PendingReason("its partition is down", _WAIT, r"^PartitionDown"),
    PendingReason("its partition starts no jobs now", _WAIT, r"^PartitionInactive"),
    PendingReason("its account may not use this partition, or does not exist", _CORRECT, r"^AccountNotAllowed|^InvalidAccount|[Aa]ccount not (permitted|known)"),
    PendingReason("its QOS may not use this partition, or does not exist", _CORRECT, r"^QOSNotAllowed|^InvalidQOS|QOS not (permitted|known)"),
    PendingReason("its reservation has ended or was deleted", _CORRECT, r"^Reservation(Deleted|Invalid)"),
    PendingReason("its deadline cannot be met", _CORRECT, r"^DeadLine"),
    PendingReason("it requests more than its account or QOS allows per job", _SMALLER,
             r"^(Assoc|QOS)Max\w*Per(Job|Node)(Limit)?$|^QOSMin|^MaxMemPerLimit|^AssocMax(Cpu|Mem|GRES|BB|Billing|Energy|Unknown)Per|^QOS(Resource|Time)Limit|^Association(Resource|Time)Limit"),
    PendingReason("its account or QOS has used up its hours", "ask for more, or name another account or qos: scancel {job}, correct the profile, then resume the sweep",
             r"^(Assoc|QOS)Grp(?!\w*RunMinutes)\w*(Minutes|WallLimit)|^QOSUsageThreshold|group (wall limit|max TRES.* minutes)"),
    PendingReason("nodes that it needs are down, drained or reserved", _WAIT, r"^ReqNodeNotAvail|^NodeDown|^FrontEndDown"),
)  # fmt: skip


def blocking_reason(job: Job) -> PendingReason | None:
    """Return what keeps ``job`` from starting, or None if it does not wait or only waits for its turn."""
    if stage_of(job.state) != "waits":
        return None
    return next((row for row in PENDING_REASONS if re.search(row.pattern, job.reason)), None)
