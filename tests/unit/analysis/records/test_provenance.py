"""Test how two environments are told apart."""

from __future__ import annotations

import pytest

from analysis.records.provenance import differences, provenance


@pytest.mark.parametrize(
    ("eager", "graphed", "told"),
    [
        ("train.py --lr 1", "train.py --lr 1 --graph", "--graph only graphed"),
        ("train.py model.impl=none", "train.py model.impl=te", "model.impl: none eager, te graphed"),
        ("train.py --a --b", "train.py --b --a", "train.py --a --b (eager), train.py --b --a (graphed)"),
    ],
)
def test_of_commands_only_the_flags_that_differ_are_named(eager: str, graphed: str, told: str) -> None:
    sides = ({"program": {"command": command, "python": "3.12"}} for command in (eager, graphed))
    assert differences(*sides) == (f"program.command: {told}",)


def test_other_values_are_named_whole() -> None:
    found = differences({"settings": {"NCCL_ALGO": "Ring"}}, {"settings": {}, "gpus": ["H200", "H200"]})
    assert found == ("gpus: unset (eager), 2 x H200 (graphed)", "settings.NCCL_ALGO: Ring (eager), unset (graphed)")


def test_a_run_that_described_no_environment_leaves_nothing_unset() -> None:
    described = {"packages": {"numpy": "2.0"}}
    assert differences(described, {}) == () == differences({}, described)
    assert provenance([described, {}, described]) == {"packages.numpy": (("2.0", 2),)}
