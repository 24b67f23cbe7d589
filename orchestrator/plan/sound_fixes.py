"""Drop fixes that would lead to another refusal, or that change more than another fix does.

A fix lists alternatives ("Set A, or B and C"). Alternatives that spell settings as ``field=value`` are tried on the cell, and
those that another rule would refuse are left out. If one sets all that another one sets, and more, only the shorter one stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from launch.contract.plan import Reason
from launch.contract.spec import RunSpec
from orchestrator.recipe.aliases import canonical_values
from orchestrator.recipe.expand import parse_setting
from orchestrator.rules import refusals

_BETWEEN = re.compile(r"(?:, or|\. Or) ")
_SETTING = re.compile(r"\b[a-z_][a-z0-9_]*(?:\.[a-z0-9_]+)*=(?:\[[^\]]*\]|[\w.]*\w)")
_FIELD = re.compile(r"[a-z_]+(\.[a-z0-9_]+)*=|[a-z_]+(\.[a-z0-9_]+)+ to ")


def alternatives(fix: str) -> list[tuple[str, list[str]]]:
    """Return each alternative of ``fix`` with its settings."""
    return [(text, _SETTING.findall(text)) for text in _BETWEEN.split(fix.rstrip("."))]


def keep_sound_fixes(spec: RunSpec, reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
    """Return ``reasons``, each without the alternatives that another rule refuses for ``spec``, and without longer ones."""
    refused = {reason.rule for reason in reasons}
    return tuple(replace(reason, remedy=_keep_sound(spec, reason, refused - {reason.rule})) for reason in reasons)


def _keep_sound(spec: RunSpec, reason: Reason, others: set[str]) -> str:
    every = alternatives(reason.remedy)
    passing = [
        (text, settings)
        for text, settings in every
        if not settings or {reason.rule for reason in refusals(apply(spec, settings))} <= others
    ]
    enough = [set(settings) for text, settings in passing if text.removeprefix("Set ") == " and ".join(settings)]
    sound = [text for text, settings in passing if not any(fewer < set(settings) for fewer in enough)]
    if len(sound) == len(every):
        return reason.remedy
    if not sound:
        return f"{reason.remedy} None of these is enough alone, because another rule then rejects the cell."
    text = ", or ".join(sound)
    return f"Set {text}." if _FIELD.match(text) else f"{text[0].upper()}{text[1:]}."


@lru_cache(maxsize=1024)
def _parse(setting: str) -> tuple[str, Any]:
    """Return the field and the value of a setting. Cache them, because thousands of refused cells have few fixes."""
    return parse_setting(setting.replace("resources.device", "placement.device"))


def apply(spec: RunSpec, settings: list[str]) -> RunSpec:
    """Return ``spec`` with ``settings``. Degrees of parallelism do not change the number of ranks."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in map(_parse, settings):
        section, _, key = name.partition(".")
        sections.setdefault(section if key else "", {})[key or section] = value
    top = sections.pop("", {})
    changed = {name: _change(spec, name, values) for name, values in sections.items()}
    result = replace(spec, **changed, **top)
    layout, ranks = result.parallelism, spec.parallelism.world_size
    dp = max(1, ranks // max(1, layout.tp * layout.cp * layout.pp))
    return result if layout == spec.parallelism else replace(result, parallelism=replace(layout, dp=dp))


def _change(spec: RunSpec, section: str, values: Mapping[str, Any]) -> Any:
    present = getattr(spec, section)
    whole = canonical_values(vars(present) | values) if section == "cuda_graph" else values
    return replace(present, **whole)
