"""Compare the settings of two runs of a user's program. They may differ in graph settings and in names the recipe allows."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.records.provenance import differences
from analysis.records.run import Attempt
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins

_DECIDED_ELSEWHERE = ("program.command:", "choices.", "digests.")
"""Other modules decide on these. The command contains the graph settings, analysis.pairing.printed_metrics judges sources, and
a digest differs only if something else differs."""


def check_settings(eager: Attempt, graphed: Attempt, margins: Margins) -> Verdict | None:
    """Return INCOMPARABLE if the runs of a program differ in more than graph settings and ``allow_differences``."""
    found = (text for text in differences(eager.environment, graphed.environment) if not is_allowed(text, margins))
    if not (differing := [text for text in found if not text.startswith(_DECIDED_ELSEWHERE)]):
        return None
    return refuse(differing)


def refuse(differing: Sequence[str]) -> Verdict:
    """Return INCOMPARABLE for settings that differ: "name: value (eager), value (graphed)"."""
    name = differing[0].partition(":")[0]
    fix = f"make both sides equal, or allow it by name: wrap --allow-difference {name}, equivalence.allow_differences in a recipe"
    return Verdict("INCOMPARABLE", f"the runs differ in more than their graph settings: {'; '.join(differing)}", fix)


def is_allowed(difference: str, margins: Margins) -> bool:
    """Return whether the name of a difference or its section is allowed: ``settings.NCCL_ALGO`` or ``settings``."""
    name = difference.partition(":")[0]
    return any(name == allowed or name.startswith(f"{allowed}.") for allowed in margins.allow_differences)
