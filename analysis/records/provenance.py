"""Compare the environments of runs: differences of a pair, and what all runs of a sweep share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from launch.common.flag_difference import flag_differences

MACHINE = ("hardware.gpus", "hardware.cpu", "hardware.driver", "versions.", "digests.code", "settings.")
"""Keys whose values affect step times."""


def differences(eager: Mapping[str, Any], graphed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences of two environments as "key: value (eager), value (graphed)". Of commands, only the flags that differ
    are named. A run that ended before it described its environment has none to compare."""
    # Nearly always it is the same object, because runs of one host share it.
    if eager is graphed or not (eager and graphed):
        return ()
    before, after = flat(eager), flat(graphed)
    keys = sorted(before.keys() | after.keys())
    return tuple(
        _difference(key, before.get(key, "unset"), after.get(key, "unset"))
        for key in keys
        if before.get(key) != after.get(key)
    )


def _difference(key: str, eager: str, graphed: str) -> str:
    if key == "program.command" and (flags := flag_differences(eager.split(), graphed.split())):
        # A report escapes what it quotes from records, so Markdown would show.
        return f"{key}: {', '.join(flag.text.replace('`', '') for flag in flags)}"
    return f"{key}: {eager} (eager), {graphed} (graphed)"


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested mappings to dotted keys. Join lists with commas. Leave out what is None."""
    values: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            values[f"{prefix}{key}"] = _listed(value) if isinstance(value, list) else str(value)
    return values


def _listed(values: Sequence[object]) -> str:
    """Join items, equal ones once with their number: "8 x NVIDIA H200"."""
    return ", ".join(f"{count} x {item}" if count > 1 else item for item, count in Counter(map(str, values)).items())


def provenance(environments: Sequence[Mapping[str, Any]]) -> dict[str, tuple[tuple[str, int], ...]]:
    """Count the values of each key over ``environments``; a missing value is "unset". Empty environments do not count."""
    environments = [environment for environment in environments if environment]
    runs = Counter(map(id, environments))  # runs of one host share the object
    flattened = {id(environment): flat(environment) for environment in environments}
    counts = {key: Counter[str]() for key in sorted({key for found in flattened.values() for key in found})}
    for environment, found in flattened.items():
        for key, values in counts.items():
            values[found.get(key, "unset")] += runs[environment]
    return {key: tuple(sorted(values.items())) for key, values in counts.items()}


def differing_fields(environments: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the keys in which machine or software of ``environments`` differ, each as "key: value or value"."""
    differing = (item for item in provenance(environments).items() if len(item[1]) > 1 and item[0].startswith(MACHINE))
    return tuple(f"{key}: {' or '.join(value for value, _ in found)}" for key, found in differing)
