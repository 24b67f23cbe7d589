"""Test the step check: the first check finds a planted fault and names the right tensor, but rounding is no fault."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from launch.engines.torch_native.engine import TorchNativeEngine
from launch.train.inspection import check_memory, step_check, uncaptured_passes
from launch.train.inspection.snapshot import Snapshot
from tests.numerics.checked_step import (
    FAULTS,
    FEW,
    FULL,
    MODEL,
    PLACES,
    check,
    faults_of,
    other_weight,
    out_of_memory,
    spec_of,
    sum_in_halves,
    train_to_first_check,
)
from tests.numerics.tiny import GPT_OSS


@pytest.fixture(scope="module", params=["fp32", "bf16", "lean"])
def captured(request: pytest.FixtureRequest) -> tuple[TorchNativeEngine, torch.Tensor]:
    """Return an engine that has captured, and the batch of its first check. Checks do not change the engine."""
    samples = FEW if request.param == "fp32" else 8
    return train_to_first_check(spec_of(replace(FULL, optimizer=True), request.param, samples))


EXHAUSTIVE = pytest.mark.exhaustive
OF_THE_OPTIMIZER = {"a lost sample", "a frozen scalar"}
"""Faults that a lean optimizer is tested with. Without it, bf16 sees the others."""


@pytest.mark.parametrize(
    ("captured", "name"),
    [
        pytest.param(
            precision, name, marks=[EXHAUSTIVE] if precision == "lean" and name not in OF_THE_OPTIMIZER else []
        )
        for precision in ("fp32", "bf16", "lean")
        for name in FAULTS
    ],
    indirect=["captured"],
)
def test_a_planted_fault_is_found_and_named(captured: tuple[TorchNativeEngine, torch.Tensor], name: str) -> None:
    fault, tensor = FAULTS[name]
    found = check(captured, fault)
    assert found.calibrated and tensor in faults_of(found)


def test_rounding_is_no_fault(captured: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    found = check(captured, sum_in_halves)
    assert found.unequal > 20 and faults_of(found) == []


def sum_in_quarters(engine: TorchNativeEngine) -> AbstractContextManager[Any]:
    linear = torch.nn.functional.linear

    def in_quarters(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        parts = zip(x.chunk(4, -1), weight.chunk(4, -1), strict=True)
        y = functools.reduce(torch.add, (linear(*part) for part in parts))
        return y if bias is None else y + bias

    return mock.patch.object(torch.nn.functional, "linear", in_quarters)


AMPLIFIED = replace(GPT_OSS, hidden_size=32, vocab_size=64, init_std=2.0)
"""Its first layer amplifies rounding by up to 1,000 times as much as what follows it: attention and router are saturated."""


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=EXHAUSTIVE), pytest.param(4, marks=EXHAUSTIVE)])
def test_rounding_that_the_first_layer_amplifies_is_no_fault_but_a_planted_fault_is_one(seed: int) -> None:
    """Another order of summation differs by 0.1% to 0.4% of a gradient, up to 10 times the limit that its output alone gives."""
    spec = spec_of(FULL)
    spec = replace(spec, model=AMPLIFIED, training=replace(spec.training, seed=seed))
    captured = train_to_first_check(spec)
    with mock.patch.multiple(uncaptured_passes, LEAST_GROWTH=math.inf, LEAST_GROWTH_ALONE=math.inf):
        assert any(faults_of(check(captured, order)) for order in (sum_in_halves, sum_in_quarters))
    for order in (sum_in_halves, sum_in_quarters):
        found = check(captured, order)
        assert found.unequal > 20 and faults_of(found) == []
    planted = FAULTS.keys() - {"a frozen scalar"} if seed != 1 else {"a sample weighted 0.7", "a stale weight"}
    for name in planted:
        found = check(captured, FAULTS[name][0])
        assert found.calibrated and max(row.in_limits for row in found.rows) > 30, name


@pytest.mark.parametrize(("precision", "seed"), [("fp32", 1), ("fp32", 2), ("bf16", 2), ("bf16", 5)])
def test_rounding_that_large_weights_amplify_is_no_fault(precision: str, seed: int) -> None:
    """It differs by 8 to 24 times the noise: in fp32 by less than 0.05% of a result, in bf16 where another has a large noise."""
    spec = spec_of(FULL, precision)
    model = replace(MODEL, init_std=2.0 if precision == "fp32" else 1.0)
    spec = replace(spec, model=model, training=replace(spec.training, seed=seed))
    found = check(train_to_first_check(spec), sum_in_halves)
    assert found.unequal > 20 and faults_of(found) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_graph_that_changes_a_weight_is_found(precision: str) -> None:
    """Uncaptured code then computes with the same wrong weight, so nothing else differs."""
    name = "layers.1.attention_norm.weight"

    @contextmanager
    def garble(engine: TorchNativeEngine) -> Iterator[None]:
        weight = dict(engine.chunks[0].named_parameters())[name].data
        weight[0] *= 1.01
        yield

    assert faults_of(check(train_to_first_check(spec_of(FULL, precision, FEW)), garble)) == [f"weight of 0.{name}"]


def test_equal_bits_need_no_scale(captured: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    found = check(captured, lambda engine: nullcontext())
    assert found.tensors > 20 and found.unequal == 0 and found.calibrated


def test_a_result_that_is_not_finite_on_one_side_is_a_fault(captured: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    found = check(captured, other_weight("final_norm.weight", lambda weight: weight.fill_(torch.nan)))
    assert "loss of micro-batch 0" in faults_of(found)


@pytest.mark.parametrize("captured", ["lean"], indirect=True)
def test_host_memory_that_is_missing_is_measured(
    captured: tuple[TorchNativeEngine, torch.Tensor], tmp_path: Path
) -> None:
    """The measurement respects the limits of control groups, and counts all ranks of a host."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "memory.max").write_text("max\n")
    with mock.patch.object(check_memory, "_memory_groups", lambda: [tmp_path, tmp_path / "open", tmp_path / "none"]):
        assert check_memory.missing_host_bytes(400_000, 1) == 0 < check_memory.missing_host_bytes(400_001, 1)
        assert check_memory.missing_host_bytes(300_000, 2) == 100_000
        (tmp_path / "memory.current").write_text("900000\n")  # A lean optimizer's state fits into 400,000 bytes.
        found = check(captured, lambda engine: nullcontext())
    needed = check_memory.pinned_bytes(captured[0].checkable_step().state())
    assert (found.missing_on, found.tensors, found.missing) == ("host", 0, needed - 200_000)


@pytest.mark.parametrize("captured", ["lean"], indirect=True)
def test_memory_that_runs_out_in_a_pass_of_several_ranks_ends_the_run_with_the_reason(
    captured: tuple[TorchNativeEngine, torch.Tensor],
) -> None:
    with (
        mock.patch.multiple(dist, is_initialized=lambda: True, get_world_size=lambda: 2),
        mock.patch.object(step_check, "largest_on_ranks", lambda value, device: value),
        mock.patch.object(uncaptured_passes, "largest_on_ranks", lambda value, device: value),
        out_of_memory(PLACES["forward"], 0),
        pytest.raises(
            torch.OutOfMemoryError, match=r"^in the check of step 2, where other ranks wait: CUDA out of memory"
        ),
    ):
        check(captured, lambda engine: nullcontext())


@pytest.mark.parametrize("captured", ["fp32"], indirect=True)
@pytest.mark.parametrize(
    ("passes", "place"),
    [
        pytest.param(passes, place, marks=[EXHAUSTIVE] if (passes % 2 == 0) == (place == "forward") else [])
        for passes in range(4)
        for place in PLACES
    ],
)
def test_a_check_without_memory_leaves_nothing_behind(
    captured: tuple[TorchNativeEngine, torch.Tensor], passes: int, place: str
) -> None:
    """Memory runs out in the first pass, in the pass with the replay's routing, or in those that measure the noise."""
    engine, batch = captured
    moved = other_weight("layers.1.mlp.router.weight", lambda weight: weight[2].neg_())

    def replayed() -> list[torch.Tensor]:
        step = engine.checkable_step()
        with Snapshot(step.state(), step.generators(), on_host=False).restored():
            step.replay(batch)
            return [result.clone() for _, result in (*step.results(), *step.updated())]

    before = replayed()
    with out_of_memory(PLACES[place], passes):
        found = check(captured, moved)
    assert (found.missing, found.tensors) == (3 * 2**29, 0)
    assert not engine._train_step.keep_routing
    assert all(torch.equal(*pair) for pair in zip(before, replayed(), strict=True))
    assert check(captured, moved).calibrated
