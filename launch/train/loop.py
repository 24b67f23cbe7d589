"""The training loop: phases, timing, records. It knows engines only by their protocol.

    init -> build -> warmup -> capture -> settle -> measure -> probe -> teardown

An eager run has no capture. ``settle`` covers the first steps after the capture, which are still slower (allocator, caches,
clocks). Speed is measured in ``measure``. A checked step and the step after it are recorded as ``check``, but the phase does
not change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from launch.contract.errors import CaptureError
from launch.contract.records.events import SETTLE_STEPS, Phase, StepPhase
from launch.contract.records.inspection import INSPECTED_STEPS
from launch.contract.records.probe import PROBED_STEPS
from launch.contract.records.sketch import Sketch
from launch.contract.records.step_check import StepCheck
from launch.contract.spec import RunSpec
from launch.engines.profile_ranges import RANGES
from launch.engines.protocol import Engine, RankPlace, StepKind, StepResult
from launch.train.data_loader import TokenSource, batch
from launch.train.inspection.capture_blockers import inspect
from launch.train.inspection.check_memory import eager_step_bytes
from launch.train.inspection.step_check import check_step
from launch.train.telemetry.event_log import Recorder
from launch.train.telemetry.gpu_rates import measure_rates
from launch.train.telemetry.parameter_digest import write_parameters
from launch.train.telemetry.profiler import probe
from launch.train.telemetry.step_metrics import Metrics, PendingStep, StepTimer


def train(
    spec: RunSpec,
    mesh: RankPlace,
    source: TokenSource,
    engine: Engine,
    recorder: Recorder,
    metrics: Metrics,
    missing: int = 0,
) -> None:
    """Run all steps of ``spec``. On return every step is on disk, and the recorder is in ``teardown``.

    If ``missing`` is above 0, no step is checked, because checks lacked this many bytes in an earlier attempt.

    Raises:
        NumericError: a step's loss or gradient norm was not finite. All steps up to this one are on disk.
        CaptureError: the engine failed to capture, or captured in a different step than it had declared.
    """
    tokens = spec.training.global_batch_size * spec.training.sequence_length
    dp_rank = spec.parallelism.rank_in("dp", mesh.rank)
    capture_step = engine.capture_step
    last_unsettled = spec.cuda_graph.warmup_steps - 1 if capture_step is None else capture_step
    checked, needed = spec.checked_steps, 0
    after_capture: tuple[Sketch, ...] = ()

    def tokens_of(step: int) -> torch.Tensor:
        return batch(source, spec, step, dp_rank).to(mesh.device)

    for step in range(spec.training.steps):
        phase = phase_of(step, capture_step, last_unsettled)
        if phase != recorder.phase:
            metrics.flush()
        if step == capture_step:
            needed = eager_step_bytes(mesh.device, mesh.world_size)
        recorder.enter(phase, step)
        if step == last_unsettled + 1:
            after_capture = write_parameters(recorder, engine.named_parameters(), ())
        tensors = tokens_of(step)
        if step in checked:
            metrics.flush()
            with recorder.excluding():
                recorder.write("step_check", check=_check(engine, spec, step, tensors, needed, missing))
        result, timer = _take_step(engine, step, phase, tensors, mesh.device)
        seen_as: StepPhase = "check" if step in spec.steps_after_checks else phase
        metrics.add(PendingStep(step, result.loss, result.grad_norm, timer, tokens, seen_as))
        if phase == "capture":
            metrics.flush()
            recorder.write("capture", graphs=engine.graph_stats())
    metrics.flush()
    recorder.enter("probe", spec.training.steps)
    write_parameters(recorder, engine.named_parameters(), after_capture)
    recorder.write("proof", graphs=engine.graph_stats())
    _observe_further_steps(spec, engine, tokens_of, recorder)
    recorder.enter("teardown", spec.training.steps)


def _check(engine: Engine, spec: RunSpec, step: int, tokens: torch.Tensor, needed: int, missing: int) -> StepCheck:
    """Check ``step``, which takes ``needed`` bytes without its graphs, unless bytes are ``missing``."""
    if missing:
        return StepCheck(step, missing=missing)
    return check_step(engine.checkable_step(), step, tokens, needed, spec.placement.ranks_per_node)


def _take_step(
    engine: Engine, step: int, phase: Phase, tokens: torch.Tensor, device: torch.device
) -> tuple[StepResult, StepTimer]:
    """Take a step and time it.

    Raises:
        CaptureError: the engine captured in a different step than it had declared.
    """
    timer = StepTimer(device)
    timer.begin()
    with RANGES.named(f"step {step}"):
        result = engine.step(tokens)
    timer.end()
    _check_kind(step, phase, result.kind)
    return result, timer


def _observe_further_steps(
    spec: RunSpec, engine: Engine, tokens_of: Callable[[int], torch.Tensor], recorder: Recorder
) -> None:
    """Observe a few steps after the timed ones, and measure what the GPU can do."""
    # Only one profiler at a time sees a device.
    unprofiled = recorder.device.type == "cuda" and spec.profile == "none"
    if unprofiled:
        probed = range(spec.training.steps, spec.training.steps + PROBED_STEPS)
        recorder.write("probe", **vars(probe(engine.step, [tokens_of(step) for step in probed])))
    if spec.inspect:
        further = range(spec.training.steps, spec.training.steps + INSPECTED_STEPS)
        recorder.write("inspection", inspection=inspect(engine.step, [tokens_of(step) for step in further]))
    if unprofiled:
        rates = measure_rates(recorder.device, spec.training.precision)
        if rates is None:
            recorder.note("the rates of this GPU were not measured: its memory has too little room")
        else:
            recorder.write("rates", rates=rates)


def phase_of(step: int, capture_step: int | None, last_unsettled: int) -> Phase:
    """Return the phase of ``step``. Steps up to ``last_unsettled`` are warm-up or capture. ``settle`` follows."""
    if step == capture_step:
        return "capture"
    if step <= last_unsettled:
        return "warmup"
    return "settle" if step <= last_unsettled + SETTLE_STEPS else "measure"


def _check_kind(step: int, phase: Phase, kind: StepKind) -> None:
    expected: StepKind = "steady" if phase in ("settle", "measure") else "capture" if phase == "capture" else "warmup"
    if kind != expected:
        raise CaptureError(f"step {step} should be {expected!r}, but the engine reports {kind!r}")
