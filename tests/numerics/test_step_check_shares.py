"""Test step checks that compare the optimizer in shares, one in each check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from launch.contract.spec import RunSpec
from launch.engines import torch_native
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.optim import adamw, fused_kernels
from launch.train.inspection.step_check import check_step
from tests.distributed import workers
from tests.numerics.checked_step import (
    FEW,
    FULL,
    ZERO,
    check,
    faults_of,
    kept_by,
    run_with_checks,
    spec_of,
    train_to_first_check,
    weigh_sample,
)
from tests.numerics.test_graphed_layers import EXPERTS
from tests.numerics.tiny import make_spec

EXHAUSTIVE = pytest.mark.exhaustive


@contextmanager
def in_shares(engine: TorchNativeEngine, count: int) -> Iterator[None]:
    """Each check compares one of ``count`` shares of the captured optimizer."""
    size = sum(tensor.nbytes for piece in engine._optimizer.pieces for tensor in piece.state())
    with mock.patch.object(torch_native.step_check, "COMPARED_BYTES", math.ceil(size / count)):
        yield


def small_pieces() -> AbstractContextManager[Any]:
    """Cut the optimizer of engines that are built inside the context into pieces of 3,000 elements."""
    modules = (adamw, fused_kernels)
    patches = ExitStack()
    for module in modules:
        patches.enter_context(mock.patch.object(module, "PIECE_ELEMENTS", 3000))
    return patches


@pytest.fixture(scope="module", params=["fp32", "bf16", "lean"])
def in_pieces(request: pytest.FixtureRequest) -> tuple[TorchNativeEngine, torch.Tensor]:
    with small_pieces():
        return train_to_first_check(spec_of(replace(FULL, optimizer=True), request.param, FEW))


def test_checks_in_shares_compare_the_whole_optimizer_and_change_nothing(
    in_pieces: tuple[TorchNativeEngine, torch.Tensor],
) -> None:
    engine, batch = in_pieces
    before, compared = kept_by(engine), []
    pieces = engine._optimizer.pieces
    assert len(pieces) > 6
    with in_shares(engine, 2):
        for number in range(2):
            with mock.patch.object(engine, "_step", engine._checked_steps[number]):
                step = engine.checkable_step()
                found = check_step(step, engine._step, batch)
            assert (found.unequal, found.calibrated) == (0, True) and found.left_out > 20
            names = [name for name, _ in step.updated() if not name.startswith("step count")]
            assert len(names) + found.left_out == sum(len(list(piece.named_state())) for piece in pieces)
            compared += names
            assert all(torch.equal(*pair) for pair in zip(before, kept_by(engine), strict=True))
    assert len(set(compared)) == len(compared) == sum(len(list(piece.named_state())) for piece in pieces)


@pytest.mark.parametrize("number", range(2))
def test_a_fault_of_one_piece_is_found_by_the_check_that_compares_it(
    in_pieces: tuple[TorchNativeEngine, torch.Tensor], number: int
) -> None:
    """The graph decays one piece again. It is in the second of two shares, and named there."""
    engine, batch = in_pieces
    piece = engine._optimizer.pieces[1]

    @contextmanager
    def decay(engine: TorchNativeEngine) -> Iterator[None]:
        yield
        if not piece.held:
            piece.moments[0][0].mul_(0.9)

    with in_shares(engine, 2), mock.patch.object(engine, "_step", engine._checked_steps[number]):
        faults = faults_of(check((engine, batch), decay))
    assert {name for name, _ in piece.named_state() if name.startswith("first moment")} >= set(faults)
    assert bool(faults) is (number == 1)


def test_a_graph_that_writes_to_what_is_held_back_is_found(in_pieces: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    """The check does not restore it, but names it."""
    engine, batch = in_pieces
    moment = engine._optimizer.pieces[1].moments[0][0]
    kept = moment.clone()

    @contextmanager
    def overwrite(engine: TorchNativeEngine) -> Iterator[None]:
        yield
        moment.mul_(0.9)

    with in_shares(engine, 2), mock.patch.object(engine, "_step", engine._checked_steps[0]):
        faults = faults_of(check((engine, batch), overwrite))
    moment.copy_(kept)
    assert faults and all(name.startswith("first moment of") for name in faults)


@pytest.mark.parametrize(
    "in_pieces", [pytest.param("fp32", marks=EXHAUSTIVE), pytest.param("bf16", marks=EXHAUSTIVE), "lean"], indirect=True
)
def test_gradients_are_compared_in_every_share(in_pieces: tuple[TorchNativeEngine, torch.Tensor]) -> None:
    engine, batch = in_pieces
    with in_shares(engine, 2):
        for number in range(2):
            with mock.patch.object(engine, "_step", engine._checked_steps[number]):
                found = check((engine, batch), weigh_sample(0.0))
            assert found.calibrated and "gradient of 0.head.weight" in faults_of(found)


def run_in_shares(spec: RunSpec) -> dict[str, Any]:
    with small_pieces(), mock.patch.object(torch_native.step_check, "COMPARED_BYTES", 1):
        return run_with_checks(spec)


def test_ranks_that_share_the_optimizer_compare_it_in_shares_and_change_nothing() -> None:
    """A replay gathers the weights that other ranks update, so they are restored too."""
    spec = make_spec(replace(EXPERTS, num_layers=4), steps=4, global_batch_size=4, precision="bf16")
    spec = replace(spec, parallelism=ZERO, cuda_graph=replace(FULL, optimizer=True))
    plain, checked = (workers(2).run(run_in_shares, replace(spec, step_checks=count)) for count in (0, 2))
    for without, with_checks in zip(plain, checked, strict=True):
        assert with_checks["checks"] == [(2, True, 0, 0), (3, True, 0, 0)]
        assert with_checks["results"] == without["results"]
        assert torch.equal(with_checks["weights"], without["weights"])
