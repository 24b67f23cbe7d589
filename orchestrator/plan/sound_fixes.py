"""Drop fixes that would not help a cell, or that change more than another fix does. Every fix that a user reads goes through here.

A fix lists alternatives ("Set A, or B and C"). Alternatives that spell settings as ``field=value`` are tried on the cell. Those
that change nothing, leave the reason in place, or lead to another refusal or known fault are left out. If one sets all that
another one sets, and more, only the shorter one stays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, get_args

from launch.contract.plan import AdvisedSetting, Reason
from launch.contract.spec import RunSpec
from launch.frameworks.megatron_spec import megatron_spec
from launch.support import known_faults
from orchestrator.recipe.aliases import canonical_values
from orchestrator.recipe.expand import parse_setting
from orchestrator.rules import refusals

_BETWEEN = re.compile(r"(?:, or|\. Or) ")
_PLACE = r"engine|megatron_core|profile|step_checks|(?:cuda_graph|model|parallelism|training|data|resources|fault)\.[a-z0-9_]+"
_SETTING = re.compile(rf"\b(?:{_PLACE})=(?:\[[^\]]*\]|[\w.]*\w)")
"""Other texts with "=" are names of a site, such as features of its nodes."""
ALONE = "None of these is enough alone: the cell would still be rejected or compute wrong results."
_NOT_OF_PROGRAMS = {"engine", "cuda_graph.mend", "step_checks"}
"""Fields that change nothing in a user's own program."""
_FIELD = re.compile(r"[a-z_]+(\.[a-z0-9_]+)*=|[a-z_]+(\.[a-z0-9_]+)+ to ")


def alternatives(fix: str) -> list[tuple[str, list[str]]]:
    """Return each alternative of ``fix`` with its settings."""
    return [(text, _SETTING.findall(text)) for text in _BETWEEN.split(fix.rstrip("."))]


def keep_sound_fixes(spec: RunSpec, reasons: tuple[Reason, ...], of_program: bool = False) -> tuple[Reason, ...]:
    """Return ``reasons``, each without the alternatives that do not help ``spec``, and without longer ones.

    Args:
        of_program: whether the reader has a program of his own, which no setting of this project's engines changes.
    """
    if not any(_SETTING.search(reason.remedy) for reason in reasons):
        return reasons
    judged = (megatron_spec(spec) or spec) if spec.engine == "command" else spec
    before, absent = _judge(judged), _NOT_OF_PROGRAMS if of_program or spec.engine == "command" else set()
    return tuple(replace(reason, remedy=_keep_sound(judged, reason, before, absent)) for reason in reasons)


def refused_settings(spec: RunSpec) -> tuple[AdvisedSetting, ...]:
    """Return the settings that verdicts advise but that do not help ``spec``, which no rule refuses."""
    judged, before, absent = spec, _Rules(Counter(), _count(known_faults(spec))), set[str]()
    if spec.engine == "command":
        judged = megatron_spec(spec) or spec
        before, absent = _judge(judged), _NOT_OF_PROGRAMS
    return tuple(
        setting
        for setting in get_args(AdvisedSetting)
        if _parse(setting)[0] in absent or not _helps(judged, [setting], before)
    )


@dataclass(frozen=True)
class _Rules:
    """How often each rule refuses a spec, and its known faults, by the ids of rules."""

    refusals: Counter[str]
    faults: Counter[str]

    def without(self, rule: str) -> _Rules:
        """Return what may stay after a fix of ``rule``. A cell with a known fault may get evidence of it instead."""
        if rule in self.refusals:
            return _Rules(self.refusals - Counter([rule]), self.faults)
        return _Rules(self.refusals, self.faults - Counter([rule]))


def _judge(spec: RunSpec) -> _Rules:
    return _Rules(_count(refusals(spec)), _count(known_faults(spec)))


def _count(reasons: tuple[Reason, ...]) -> Counter[str]:
    return Counter(reason.rule for reason in reasons)


def _helps(spec: RunSpec, settings: list[str], allowed: _Rules) -> bool:
    if not settings:
        return True
    changed = apply(spec, settings)
    found = _judge(changed)
    return changed != spec and found.refusals <= allowed.refusals and found.faults <= allowed.faults


def _keep_sound(spec: RunSpec, reason: Reason, before: _Rules, absent: Set[str]) -> str:
    every, allowed = alternatives(reason.remedy), before.without(reason.rule)
    there = [
        (text, settings) for text, settings in every if absent.isdisjoint(name for name, _ in map(_parse, settings))
    ]
    helping = [(text, settings) for text, settings in there if _helps(spec, settings, allowed)]
    enough = [set(settings) for text, settings in helping if text.removeprefix("Set ") == " and ".join(settings)]
    smallest = [each for each in helping if not any(fewer < set(each[1]) for fewer in enough)]
    sound = [*dict.fromkeys(_leave_out_present(spec, *each) for each in smallest)]
    if sound == [text for text, _ in every]:
        return reason.remedy
    if not sound:
        return f"{reason.remedy.rstrip('.')}. {ALONE}"
    text = ", or ".join(sound)
    if _FIELD.match(text):
        return f"Set {text}."
    return f"{text[0].upper()}{text[1:]}." if reason.remedy[0].isupper() else text


def _leave_out_present(spec: RunSpec, text: str, settings: list[str]) -> str:
    """Return the ``text`` of an alternative without the settings that ``spec`` already has."""
    for setting in settings:
        if apply(spec, [setting]) == spec:
            text = text.replace(f"{setting} and ", "").replace(f" and {setting}", "")
    return text


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
