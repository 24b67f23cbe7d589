"""Collect the settings that a log states: seed, ranks, batch sizes, sequence length and learning rate.

Logs of one workload may omit settings, but those that they state must agree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from launch.contract.metric_names import column_of, letters

NAMES: Mapping[str, tuple[str, ...]] = {
    "seed": ("seed", "randomseed"),
    "batch_size": ("globalbatchsize", "totalbatchsize", "totaltrainbatchsize", "batchsize"),
    "micro_batch_size": ("microbatchsize", "perdevicetrainbatchsize"),
    "gradient_accumulation_steps": ("gradientaccumulationsteps", "gradaccumulationsteps"),
    "world_size": ("worldsize",),
    "sequence_length": ("sequencelength", "seqlength", "seqlen", "maxseqlength", "maxsequencelength"),
    "learning_rate": ("learningrate", "lr"),
}
"""The usual names of each setting, as :func:`letters` spells them."""
_SETTINGS = {name: setting for setting, names in NAMES.items() for name in names}
_WORDS = (
    r"random[_ -]?seed|seed|(?:(?:global|total|total[_ -]train|train|micro|per[_ -]device[_ -]train)[_ -])?batch[_ -]size"
    r"|grad(?:ient)?[_ -]accumulation[_ -]steps|world[_ -]size|(?:max[_ -])?seq(?:uence)?[_ -]?len(?:gth)?|learning[_ -]rate|lr"
)
_SAID = re.compile(
    rf"(?<![\w/.])({_WORDS})\b(?:\s*\([^()]{{0,80}}\))?['\"]?(?:\s*[:=]\s*|\s*\.{{2,}}\s*|\s+)['\"]?"
    r"([-+]?\d{1,30}(?:\.\d{0,30})?(?:e[-+]?\d{1,3})?)(?![\w%]|[.,]\d)",
    re.IGNORECASE,
)
_MOST_LISTED = 4


def may_name_setting(lowered: str) -> bool:
    """Return False if a line in lower case has no part of a setting's name. This takes a small part of the expression's time."""
    return (
        "lr" in lowered
        or "batch" in lowered
        or "seq" in lowered
        or "seed" in lowered
        or "rate" in lowered
        or "accum" in lowered
        or "world" in lowered
    )


def settings_in_line(line: str) -> dict[str, str]:
    """Return the settings that a line of a log names, with their numbers: {"seed": "1234"}."""
    return {_SETTINGS[letters(name)]: number for name, number in _SAID.findall(line) if letters(name) in _SETTINGS}


def collect_settings(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """Return the settings that ``rows`` state, separately for the run (``seed``) and for its steps (``seed.steps``)."""
    said: dict[str, list[float]] = {}
    for _, row in rows:
        step = ".steps" if any(column_of(str(name)) == "loss" for name in row) else ""
        for name, value in row.items():
            setting = _SETTINGS.get(letters(str(name)))
            if setting and (number := _number(value)) is not None:
                said.setdefault(setting + step, []).append(number)
    # Every rank may state a setting of the run, in any order.
    ordered = {
        name: dict.fromkeys(found) if name.endswith(".steps") else sorted({*found}) for name, found in said.items()
    }
    return {name: _describe([*numbers]) for name, numbers in ordered.items()}


def _number(value: Any) -> float | None:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _describe(numbers: Sequence[float]) -> str:
    """Describe different numbers in their order. Use a digest if there are many, as in a schedule."""
    listed = ", ".join(f"{number:.12g}" for number in numbers)
    if len(numbers) <= _MOST_LISTED:
        return listed
    return f"{numbers[0]:.12g} to {numbers[-1]:.12g} ({len(numbers)} values, {sha256(listed.encode()).hexdigest()[:8]})"
