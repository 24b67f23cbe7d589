"""What each engine can do in this version; all else is refused by name, before a run is submitted and again in the job.

One table an engine: a row is a field, the values that the engine takes, and the way out for all others.
"""

from __future__ import annotations

from collections.abc import Mapping

from launch.contract.plan import Reason
from launch.contract.spec import EngineName, RunSpec
from launch.support.megatron import MEGATRON, known_faults
from launch.support.support_rule import SupportRule
from launch.support.torch_native import TORCH_NATIVE

__all__ = ["LIMITS", "known_faults", "unsupported"]

LIMITS: Mapping[EngineName, tuple[SupportRule, ...]] = {"torch_native": TORCH_NATIVE, "megatron": MEGATRON}


def unsupported(spec: RunSpec) -> tuple[Reason, ...]:
    """Why the engine that ``spec`` names cannot run it, one reason a field; empty where it can."""
    return tuple(reason for limit in LIMITS[spec.engine] if (reason := limit.judge(spec)) is not None)
