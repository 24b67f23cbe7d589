"""Test which backward passes and limits of gradient norms are compared, without a program."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from launch.observe.description import used_settings
from launch.observe.description.used_settings import UsedSettings


@pytest.mark.parametrize(
    ("steps", "compiled", "expected"),
    [
        ([(4, 0), (4, 0), (4, 0)], 0, "4"),
        ([(7, 0), (4, 0), (4, 0)], 0, "4"),
        ([(1, 0), (1, 0), (4, 2), (0, 2)], 0, "1"),
        ([(1, 0), (4, 2), (0, 2)], 0, None),
        ([(4, 1), (2, 1), (2, 1)], 0, None),
        ([(1, 0), (1, 2), (1, 2)], 1, "1"),
        ([(0, 0), (0, 0)], 0, None),
        ([(1, 0)], 0, None),
    ],
    ids=[
        "micro-batches",
        "a warm-up in the first step",
        "captured later",
        "captured at once",
        "some losses captured",
        "captured by torch.compile",
        "no pass is seen",
        "one step",
    ],
)
def test_only_passes_that_no_graph_replaces_are_compared(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, int]], compiled: int, expected: str | None
) -> None:
    monkeypatch.setattr(used_settings, "compiled_functions", lambda: compiled)
    used, autograd = UsedSettings(), SimpleNamespace(backward=lambda: None)
    used.hook_backward(autograd)  # type: ignore[arg-type]
    for passes, captures in steps:
        for _ in range(passes):
            autograd.backward()
        used.end_step(1, captures, closure=False)
        used.end_step(2, captures, closure=False)
    assert used.describe().get("backward_passes") == expected


def test_passes_of_a_closure_are_not_compared() -> None:
    used, autograd = UsedSettings(), SimpleNamespace(backward=lambda: None)
    used.hook_backward(autograd)  # type: ignore[arg-type]
    for _ in range(3):
        autograd.backward()
        used.end_step(1, 0, closure=True)
    assert "backward_passes" not in used.describe()


@pytest.mark.parametrize(
    ("limits", "expected"),
    [([], "none"), ([1.0, 1.0], "max_norm 1"), ([math.inf], "none"), ([1.0, 0.9], None), ([torch.tensor(1.0)], None)],
    ids=["not clipped", "clipped", "only a norm", "an adaptive limit", "a tensor"],
)
def test_a_limit_of_norms_counts_if_it_is_one_number(limits: list[object], expected: str | None) -> None:
    used = UsedSettings()
    for limit in limits:
        used.say_clipping(limit, 2.0)
    assert used.describe().get("clipping") == expected
