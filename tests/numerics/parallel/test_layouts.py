"""Test that every parallel layout trains the same model as one process: losses, gradient norms, gathered parameters.

The suite has a pairwise cover of the options. `make test-slow` runs its layouts of eight ranks, and `make test-exhaustive` all
other layouts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from launch.contract.spec import RunSpec
from tests.distributed import workers
from tests.numerics.parallel.layouts import Layout, legal_layouts, spec_of, train_rank, train_rank_without_inductor
from tests.pairwise import cover

EXHAUSTIVE = bool(os.environ.get("EXHAUSTIVE"))
ROUNDED = [
    Layout("dense", tp=4, sequence_parallel=True, micro_batches=3),
    Layout("tied", tp=2, pp=2, micro_batches=3),
    Layout("moe", tp=2, ep=4, dp=2, sequence_parallel=True),
    Layout("shared", ep=2, dp=2, dispatcher="allgather", distributed_optimizer=True),
    Layout("gpt_oss", pp=2, dp=2, uneven=True),
]
"""Layouts that are tested in float32 too."""


def layouts() -> Iterator[Any]:
    """Yield the cover, and if they are asked for, all other layouts."""
    legal = sorted(legal_layouts(), key=lambda layout: layout.cost)
    covering = cover([layout.values for layout in legal])
    for number in covering:
        yield slow_if_large(legal[number])
    for number in set(range(len(legal) if EXHAUSTIVE else 0)).difference(covering):
        yield pytest.param(legal[number], marks=pytest.mark.exhaustive)


@cache
def alone(task: tuple[str, int, int]) -> dict[str, Any]:
    return train_rank(spec_of(*task), torch.float64)


def slow_if_large(layout: Layout) -> Any:
    return pytest.param(layout, marks=pytest.mark.slow) if layout.world_size > 4 else layout


@pytest.mark.parametrize("layout", list(layouts()), ids=str)
def test_trains_as_one_process_does(layout: Layout) -> None:
    expected = alone(layout.task)
    for rank, found in enumerate(workers(layout.world_size).run(train_rank, layout.spec, torch.float64)):
        for what, absolute in (("first", 0.0), ("loss", 0.0), ("grad_norm", 0.0), ("last", 1e-10)):
            said = partial("{} of rank {}: {}".format, what, rank)
            torch.testing.assert_close(found[what], expected[what], rtol=1e-9, atol=absolute, msg=said)


@pytest.mark.parametrize(
    ("layout", "training"),
    [
        pytest.param(Layout("moe", ep=2, dp=2, micro_batches=3), {"compile": "elementwise"}, marks=pytest.mark.slow),
        (Layout("gpt_oss", tp=2, pp=2, sequence_parallel=True), {"recompute": "selective"}),
        pytest.param(Layout("moe", ep=4, dp=8, dispatcher="allgather"), {}, marks=pytest.mark.exhaustive),
        pytest.param(Layout("dense", pp=8, micro_batches=3), {}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_ways_to_run_a_step_and_the_largest_degrees(layout: Layout, training: dict[str, Any]) -> None:
    """These layouts have options that the cover omits. test_model.py compares Inductor's kernels."""
    expected = alone(layout.task)
    spec = replace(layout.spec, training=replace(layout.spec.training, **training))
    for found in workers(layout.world_size).run(train_rank_without_inductor, spec, torch.float64):
        for what in ("loss", "grad_norm", "last"):
            torch.testing.assert_close(found[what], expected[what], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layout", ROUNDED, ids=str)
def test_losses_and_gradients_in_float32(layout: Layout) -> None:
    """Sums in another order round differently: by 1e-6 of a loss and 1e-5 of a parameter's largest gradient. Computing
    a gradient as the difference of two parameters loses more."""
    expected = train_rank(descending(spec_of(*layout.task)), torch.float32)
    for found in workers(layout.world_size).run(train_rank, descending(layout.spec), torch.float32):
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=0)
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=1e-5, atol=0)
        for name, before in expected["first"].items():
            gradient, other = (before - trained["last"][name] for trained in (expected, found))
            absolute = 1e-5 * gradient.abs().max().item() + 1e-6
            torch.testing.assert_close(other, gradient, rtol=0, atol=absolute, msg=partial("{}: {}".format, name))


def descending(spec: RunSpec) -> RunSpec:
    """Take one step that subtracts the gradient g. Adam's first step is rate * g / (abs(g) + epsilon)."""
    training = replace(
        spec.training,
        steps=1,
        learning_rate=1e5,
        adam_epsilon=1e5,
        learning_rate_schedule="constant",
        weight_decay=0.0,
        clip_grad=0.0,
    )
    return replace(spec, training=training)
