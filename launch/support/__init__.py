"""The rules that a job checks again before it builds its engine: supported settings, and whether the layout divides.

There is one table for each engine. The orchestrator applies the same tables before it submits.
"""

from __future__ import annotations

from collections.abc import Mapping

from launch.contract.plan import Reason
from launch.contract.spec import EngineName, RunSpec
from launch.frameworks.megatron_spec import megatron_spec
from launch.support import command, megatron, torch_native
from launch.support.rule import Rule, judge

SUPPORT: Mapping[EngineName, tuple[Rule, ...]] = {
    "torch_native": torch_native.RULES,
    "megatron": megatron.RULES,
    "command": command.RULES,
}


def unsupported(spec: RunSpec) -> tuple[Reason, ...]:
    """Return the reasons why the engine of ``spec`` does not support it; empty if it does."""
    return judge(SUPPORT[spec.engine], spec)


def known_faults(spec: RunSpec) -> tuple[Reason, ...]:
    """Return the known wrong computations of the library of ``spec``. Such a run has a note and is never advised.

    A user's program is judged by the settings that its command names. No rule refuses it, so it may have any silent fault.
    """
    if spec.engine != "command":
        return judge(megatron.KNOWN_FAULTS, spec)
    implied = megatron_spec(spec)
    return judge((*megatron.FAULTS, *megatron.SILENT_REFUSALS, *megatron.CORRECTED), implied) if implied else ()


def is_known_fault(reason: Reason) -> bool:
    """Return whether ``reason`` is a known wrong computation, or the rule that such a run needs evidence."""
    return any(reason.rule == fault.id for fault in megatron.KNOWN_FAULTS)
