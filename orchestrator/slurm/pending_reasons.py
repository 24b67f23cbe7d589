"""Why a job will not start by itself, in words, with the way out. Pure.

Sources: job_state_reason.c and the descriptions that slurmctld puts in a reason's place, of Slurm 20.11 to 25.05;
resource_limits.html for the limits. Reasons that pass with time (Priority, Resources, Dependency, BeginTime, ...) are
in no row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launch.slurm.job_states import stage_of
from orchestrator.slurm.job_listing import Job

OF_THIS_SWEEP = ("Dependency", "JobArrayTaskLimit")
"""Reasons of a job that waits for others of its own sweep: those before it in its lane, or in its array."""


@dataclass(frozen=True)
class PendingReason:
    """What keeps a job from starting until somebody does something. ``way_out`` speaks of {job}."""

    meaning: str
    way_out: str
    pattern: str = ""


_ANEW = "scancel {job}, mend that in the cluster's profile, then resume the sweep"
_SMALLER = (
    "scancel {job}, ask for less (resources and repeats of the recipe, or the cluster's profile), then sweep again"
)
_WAIT = "ask an administrator when; or scancel {job}, name other nodes in the cluster's profile, then resume the sweep"

# The first row that matches speaks.
OBSTACLES: tuple[PendingReason, ...] = (
    PendingReason("its user holds it", "scontrol release {job}", r"^JobHeldUser"),
    PendingReason("an administrator holds it", "ask them to release it; or scancel {job}", r"^JobHeldAdmin"),
    PendingReason("it failed to launch, and Slurm holds it", "scontrol release {job}; or scancel {job}, then resume the sweep",
             r"requeued.held|^JobHoldMaxRequeue|^JobLaunchFailure|^SystemFailure"),
    PendingReason("no node of the partition satisfies its constraints", _ANEW, r"^BadConstraints|^Constraints$"),
    PendingReason("what it depends on cannot happen any more", "scancel {job}, then resume the sweep", r"^DependencyNeverSatisfied"),
    PendingReason("it asks for more nodes than the partition gives, or those that it needs are down", _SMALLER, r"^PartitionNodeLimit|^PartitionConfig"),
    PendingReason("it asks for more time than the partition gives", _SMALLER, r"^PartitionTimeLimit"),
    PendingReason("its partition is down", _WAIT, r"^PartitionDown"),
    PendingReason("its partition starts no jobs now", _WAIT, r"^PartitionInactive"),
    PendingReason("its account may not use this partition, or does not exist", _ANEW, r"^AccountNotAllowed|^InvalidAccount|[Aa]ccount not (permitted|known)"),
    PendingReason("its QOS may not use this partition, or does not exist", _ANEW, r"^QOSNotAllowed|^InvalidQOS|QOS not (permitted|known)"),
    PendingReason("its reservation is no more", _ANEW, r"^Reservation(Deleted|Invalid)"),
    PendingReason("its deadline cannot be met", _ANEW, r"^DeadLine"),
    PendingReason("it asks for more than a job of its account or QOS may have", _SMALLER,
             r"^(Assoc|QOS)Max\w*Per(Job|Node)(Limit)?$|^QOSMin|^MaxMemPerLimit|^AssocMax(Cpu|Mem|GRES|BB|Billing|Energy|Unknown)Per|^QOS(Resource|Time)Limit|^Association(Resource|Time)Limit"),
    PendingReason("the hours that its account or QOS may use are spent", "ask for more, or name another account or qos: scancel {job}, mend the profile, then resume the sweep",
             r"^(Assoc|QOS)Grp(?!\w*RunMinutes)\w*(Minutes|WallLimit)|^QOSUsageThreshold|group (wall limit|max TRES.* minutes)"),
    PendingReason("nodes that it needs are down, drained or reserved", _WAIT, r"^ReqNodeNotAvail|^NodeDown|^FrontEndDown"),
)  # fmt: skip


def blocking_reason(job: Job) -> PendingReason | None:
    """What keeps ``job`` waiting for good; None where it does not wait, or only for its turn."""
    if stage_of(job.state) != "waits":
        return None
    return next((row for row in OBSTACLES if re.search(row.pattern, job.reason)), None)
