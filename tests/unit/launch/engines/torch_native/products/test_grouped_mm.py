"""Test products of experts with every supported PyTorch."""

from __future__ import annotations

import runpy
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from launch.engines.torch_native.products import grouped_mm


def test_tags_are_a_sequence_as_pytorch_2_11_and_2_12_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """In these releases a single tag is not iterable, so the engine could not be imported."""
    tagged: dict[str, list[torch.Tag]] = {}

    def custom_op(name: str, *, tags: Any, **_: Any) -> MagicMock:
        tagged[name] = [*tags]
        return MagicMock()

    monkeypatch.setattr(torch.library, "custom_op", custom_op)
    runpy.run_path(grouped_mm.__file__)
    assert len(tagged) == 2 and all(tags == [torch.Tag.cudagraph_unsafe] for tags in tagged.values())
