"""Test that a record is read as it was written, and that a different type, field or length is rejected by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch.common.atomic_files import dumps
from launch.common.typed_json import from_json
from launch.contract.bundle import BundleOrder, Step
from launch.contract.plan import Limits

ORDER = BundleOrder(
    "b0", "w", (("r0", 0), ("r1", 2)), Limits(60.0), 1, ("cpu0",), {"tags": ["a"]}, Step(1, 2, 3, "python3", ("--mpi=none",)),
    {"NCCL_DEBUG": "INFO"},
)  # fmt: skip


def read(**changes: Any) -> BundleOrder:
    return from_json(BundleOrder, json.loads(dumps(ORDER)) | changes)


def test_a_record_is_read_as_it_was_written() -> None:
    assert read() == ORDER
    assert read(step=None).step is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slots": "1"}, "slots is '1', not a whole number"),
        ({"slots": True}, "slots is True, not a whole number"),
        ({"slots": 1.0}, "slots is 1.0, not a whole number"),
        ({"bundle_id": None}, "bundle_id is None, not text"),
        ({"slot_names": "cpu0"}, "slot_names is 'cpu0', not a list"),
        ({"schedule": [["r0", "0"]]}, "schedule is '0', not a whole number"),
        ({"environment": []}, "environment is [], not an object"),
        ({"environment": {"A": 1}}, "environment is 1, not text"),
        ({"limits": {"run_seconds": 1.0}}, "limits has different fields than in this version: hang_seconds"),
        ({"limits": {"run_seconds": True, "hang_seconds": 1}}, "limits.run_seconds is True, not a number"),
        ({"added": 1}, "the record has different fields than in this version: added"),
    ],
)
def test_what_was_not_written_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        read(**changes)
    assert str(caught.value) == said
