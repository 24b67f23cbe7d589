"""Check one step of a graphed run: compute it by replay and by the same code uncaptured, from the same state.

Chaos does not build up within one step, so a difference between both is either rounding or a fault. If any rank finds a
difference, the check measures how large rounding is from the same state (launch/train/inspection/uncaptured_passes.py).

A captured optimizer is checked separately: it runs uncaptured on the gradients of the replay. Adam divides by the size of
gradients, which would otherwise make rounding of the smallest gradients look large. If its state is large, each check compares
another share of it. The rest is held back.

No replay may change what it should leave as it is: the weights, or those that a captured optimizer holds back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from launch.contract.records.memory import requested_bytes
from launch.contract.records.step_check import MOST_DIFFERENCES, LayerResult, StepCheck, TensorDifference
from launch.engines.protocol import CheckableStep
from launch.train.inspection.check_memory import largest_on_ranks, missing_bytes, missing_host_bytes, pinned_bytes
from launch.train.inspection.fingerprint import FingerprintMaker
from launch.train.inspection.snapshot import Snapshot, parts_of
from launch.train.inspection.uncaptured_passes import ReplayedStep, UncapturedPasses


def check_step(
    checked: CheckableStep, number: int, batch: torch.Tensor, needed: int = 0, ranks_on_host: int = 1
) -> StepCheck:
    """Check step ``number`` if all ranks have enough memory, and restore the state from before the check. A collective call.

    Args:
        batch: int64 (microbatches, microbatch size, sequence + 1).
        needed: the bytes of GPU memory that an eager step uses in addition to the state.
    Raises:
        torch.OutOfMemoryError: this rank ran out of memory in a pass although there was enough before, and other ranks wait.
    """
    device, state = batch.device, parts_of(checked.state())
    beside = needed + sum(tensor.nbytes for tensor in state)
    on_host = device.type == "cpu" or largest_on_ranks(missing_bytes(beside, device), device) > 0
    lacked = missing_host_bytes(pinned_bytes(state), ranks_on_host) if on_host else 0
    if missing := largest_on_ranks(lacked, device):
        return StepCheck(number, missing=int(missing), missing_on="host")
    if missing := largest_on_ranks(missing_bytes(needed, device), device):
        return StepCheck(number, missing=int(missing))
    try:
        return _check_step(checked, number, batch, state, on_host)
    except torch.OutOfMemoryError as error:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise torch.OutOfMemoryError(f"in the check of step {number}, where other ranks wait: {error}") from error
        return StepCheck(number, missing=requested_bytes(str(error)))
    finally:
        if device.type == "cuda":
            # NCCL and other libraries cannot use memory that PyTorch's allocator keeps.
            torch.cuda.empty_cache()


def _check_step(
    checked: CheckableStep, number: int, batch: torch.Tensor, state: Sequence[torch.Tensor], on_host: bool
) -> StepCheck:
    begun = time.perf_counter()
    snapshot = Snapshot(state, checked.generators(), on_host)
    replay = _replay(checked, batch, snapshot)
    rows = _update(checked, replay, snapshot)
    passes = UncapturedPasses(checked, batch, replay, snapshot)
    calibrated = True
    if passes.is_unequal:
        calibrated = passes.calibrate()
        rows += passes.rows()
    first = _first_fault(rows, checked.layers())
    rows.sort(key=lambda row: row.in_limits, reverse=True)
    return StepCheck(
        number,
        len(replay.results) + len(replay.updated) + len(replay.held),
        len(rows),
        tuple(rows[:MOST_DIFFERENCES]),
        passes.routing_differences(),
        calibrated,
        max((*(row.noise for row in rows), *passes.score_noise_of_moved()), default=0.0),
        time.perf_counter() - begun,
        first,
        left_out=len(replay.held) if replay.updated else 0,
    )


def _first_fault(
    rows: Iterable[TensorDifference], layers: Iterable[LayerResult]
) -> tuple[LayerResult, TensorDifference] | None:
    """Return the first layer result that is a fault, in the order of the step, or None."""
    results = {layer.name: layer for layer in layers}
    faults = [(results[row.name], row) for row in rows if row.is_fault and row.name in results]
    return min(faults, key=lambda fault: fault[0].place, default=None)


def _replay(checked: CheckableStep, batch: torch.Tensor, snapshot: Snapshot) -> ReplayedStep:
    tensors = [*checked.state(), *(one for each in (checked.held, checked.results) for _, one in each())]
    maker = FingerprintMaker(max((tensor.numel() for tensor in tensors), default=0), batch.device)
    held = maker.make(checked.held)
    with snapshot.restored():
        checked.replay(batch)
        routing = {name: experts.clone() for name, experts in checked.routing().items()}
        changed = maker.differences(checked.held, held)
        return ReplayedStep(maker, maker.make(checked.results), routing, maker.make(checked.updated), held, changed)


def _update(checked: CheckableStep, replay: ReplayedStep, snapshot: Snapshot) -> list[TensorDifference]:
    """Run the optimizer uncaptured on the replay's gradients. Return how its results differ from the captured optimizer's.

    Return also what the replay changed although it had to leave it.
    """
    rows = [
        TensorDifference(name, size, replay.held.sketches[name].spacing, multiple=0)
        for name, size in replay.changed.items()
    ]
    if replay.updated:
        with snapshot.restored():
            checked.update()
            found = replay.maker.differences(checked.updated, replay.updated)
        rows += [TensorDifference(name, size, replay.updated.sketches[name].spacing) for name, size in found.items()]
    return rows
