"""The observer of one process. It follows steps and phases, and writes the same records as engines."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, TypeVar

import torch

from launch.contract.errors import OrchestratorError, ProgramError
from launch.contract.metric_names import Column
from launch.contract.paths import AttemptPaths
from launch.contract.records.gradient_sketch import StepSketch
from launch.contract.spec import read_spec
from launch.observe.graph_counter import GraphCounter
from launch.observe.optimizers import Optimizers, identity
from launch.observe.rank import Rank
from launch.observe.steps.metric_log import Known, Metric, Source, columns_in_line, split_lines
from launch.observe.steps.phase_tracker import PhaseTracker
from launch.observe.steps.readings import Moment, Readings
from launch.observe.steps.step_groups import StepGroups
from launch.observe.steps.step_lines import StepLines
from launch.train.telemetry.event_log import Recorder
from launch.train.telemetry.profiler import StepsTrace

SKETCHED_STEPS = 16
"""Gradients of later steps are not sketched, no matter when the program captures."""
MOST_CONTRADICTIONS = 1
"""The number of contradictions to accept. A summary at the end may differ from the last step's loss."""

Result = TypeVar("Result")
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _counted(method: Callable[..., Result]) -> Callable[..., Result]:
    """Count the time of ``method`` as time of the observer."""

    @functools.wraps(method)
    def counted(self: Observer, *arguments: Any, **named: Any) -> Result:
        begun = time.perf_counter()
        result = method(self, *arguments, **named)
        self._spending += time.perf_counter() - begun
        return result

    return counted


class Observer:
    """Receives what hooks report. It writes nothing until the process shows that it is a rank."""

    def __init__(self, folder: Path) -> None:
        attempt = AttemptPaths(folder)
        self._spec = read_spec(attempt.spec)
        self._cuda = self._spec.placement.device == "cuda"
        self._rank = Rank(attempt, self._spec)
        self._graphs = GraphCounter(self._spec)
        self._optimizers = Optimizers()
        self._readings = Readings(self._cuda)
        self._stepping: list[int] = []
        """The optimizers whose steps run now, by id. There may be several, because a container (torchtitan's) steps others."""
        self._moment: Moment | None = None
        """When the last optimizer stepped."""
        self._says_steps = False
        self._spent: list[float] = []
        self._spending = 0.0
        self._trace: StepsTrace | None = None
        self._start_counting("optimizer steps")
        # Registered first, so it is called last.
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._rank.forget)

    def _start_counting(self, steps_from: str) -> None:
        self._phases = PhaseTracker(self._spec.graphed, self._spec.cuda_graph.warmup_steps)
        self._groups = StepGroups()
        self._lines = StepLines(self._rank, self._spec, steps_from)
        self._graphs.restart()

    # --- what hooks tell ---------------------------------------------------------------------------------------------

    @_counted
    def before_optimizer(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Begin an optimizer's step. ``closure`` is whether the optimizer itself computes the gradients in the step."""
        # The optimizer is still in the list if an exception ended its last step.
        self._leave_optimizer(optimizer)
        self._stepping.append(id(optimizer))
        if self._rank.silent:
            self._rank.report_second_process()
        if self._is_idle() or len(self._stepping) > 1:
            return
        self._rank.begin(self._phases.phase)
        self._optimizers.add(optimizer)
        if not closure:
            self._say_gradients(optimizer)

    @_counted
    def after_optimizer(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        if not self._leave_optimizer(optimizer) or self._stepping or self._is_idle() or self._says_steps:
            return
        if closure:
            self._say_gradients(optimizer)
        late, ends = self._groups.stepped(identity(optimizer))
        if late and self._moment is not None:
            self._end_step(self._moment)
        self._moment = self._readings.now(self._graphs.counts)
        if ends:
            self._end_step(self._moment)

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Forget an optimizer's step and all steps within it. Return whether it ran."""
        if runs := id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]
        return runs

    @_counted
    def say_step(self, loss: Any, grad_norm: Any) -> None:
        """End a step that the program announces. From then on, steps of its optimizers do not count, not even earlier ones."""
        if self._is_idle():
            return
        if not self._says_steps and self._lines.written and not self._lines.refused:
            raise ProgramError(
                "launch.observe.step was not called in the first steps: call it at the end of every step"
            )
        self._rank.begin(self._phases.phase)
        if not self._says_steps:
            self._says_steps = True
            self._start_counting("launch.observe.step")
        self._add("loss", "launch.observe.step", _whole("loss", loss))
        if grad_norm is not None:
            self._add("grad_norm", "launch.observe.step", _whole("grad_norm", grad_norm))
        self._end_step(self._readings.now(self._graphs.counts))

    def before_capture(self) -> None:
        if self._rank.silent or self._rank.recorder is None or not self._rank.begun:
            return
        if self._spec.graphed and self._phases.phase in ("warmup", "settle"):
            self._rank.recorder.enter("capture", self._phases.steps)
        self._graphs.begin_capture()

    def after_capture(self) -> None:
        self._graphs.end_capture()

    def before_replay(self) -> None:
        self._graphs.replays += 1

    @_counted
    def take_own(self, metric: Metric, value: Any, *, to_sum: bool = False) -> None:
        """Take what one of the program's own functions returned for the current step, or for a micro-batch of it (``to_sum``).

        Every rank calls such a function, so every rank also takes part in the collective ``full_tensor``, even
        if it needs no result.
        """
        if self._is_capturing():
            return
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        if not self._is_idle():
            self._add(metric, "the program's own functions", value, to_sum=to_sum)

    @_counted
    def say(self, source: Source, said: Mapping[Column, float]) -> None:
        self._say(source, said)

    def _say(self, source: Source, said: Mapping[Column, float]) -> None:
        """Take what the program logged or printed after a step. During a capture there is no loss."""
        if self._is_idle() or not said.keys() & {"loss", "grad_norm"}:
            return
        log = self._lines.log
        log.say(source, said, self._running)
        if len(log.contradictions) > MOST_CONTRADICTIONS:
            raise ProgramError(
                f"the program prints {' and '.join(log.contradictions.values())}: call launch.observe.step(loss=..., "
                "grad_norm=...) at the end of each step"
            )
        self._write_steps()

    @_counted
    def read(self, text: str, rest: str) -> str:
        """Read printed text after ``rest``, if no better source is known. Return the incomplete last line."""
        if not self._wants_printed:
            return ""
        lines, rest = split_lines(text, rest)
        for line in lines:
            if said := columns_in_line(line, self._spec.command.pattern):
                self._say("printed", said)
        return rest

    @property
    def _wants_printed(self) -> bool:
        rank, log = self._rank, self._lines.log
        if rank.silent or rank.done or self._lines.refused:
            return False
        return log.wants("loss", "printed") or log.wants("grad_norm", "printed")

    def excepthook(self, then: ExceptHook) -> ExceptHook:
        """Return a hook that records an uncaught exception, then calls ``then``."""

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._rank.fail(error)
            then(kind, error, trace)

        return hook

    # --- steps -------------------------------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        return self._rank.silent or self._rank.done or self._is_capturing()

    def _is_capturing(self) -> bool:
        return self._cuda and torch.cuda.is_current_stream_capturing()

    @property
    def _running(self) -> int:
        """The step that runs now, counted from 0."""
        return self._lines.ended + (self._groups.first_may_have_ended and not self._says_steps)

    def _end_step(self, moment: Moment) -> None:
        recorder, spec, phases = self._rank.recorder, self._spec, self._phases
        if recorder is None:
            return
        graphs, replays = self._graphs.since_last_step(moment.counts)
        phase = phases.end_step(graphs, replays)
        if phase != "measure" or not spec.graphed:
            self._graphs.graphs += graphs
        self._lines.end_step(moment, phase)
        if phases.steps == spec.training.steps:
            self._prove(recorder)
        elif phases.steps < spec.training.steps:
            if phases.phase == "settle" != phase:
                self._optimizers.write_digest(recorder)
            recorder.enter(phases.phase, phases.steps)
        self._spent.append(self._spending)
        self._spending = 0.0
        self._write_steps()

    def _prove(self, recorder: Recorder) -> None:
        """Write the proof of replay after the last timed step, and begin profiling."""
        recorder.enter("probe", self._phases.steps)
        self._optimizers.write_digest(recorder)
        recorder.write("proof", graphs=self._graphs.stats(self._phases))
        cost = median(self._spent) * 1e6 if self._spent else 0.0
        recorder.note(f"the observer took {cost:.0f} us per step (median)")
        if self._cuda:
            self._trace = StepsTrace()

    def _add(self, metric: Metric, source: Source, value: Any, *, to_sum: bool = False) -> None:
        log = self._lines.log
        if log.wants(metric, source):
            number = Known(0.0) if self._lines.refused else self._readings.later(value)
            (log.add_to if to_sum else log.add)(metric, source, self._running, number)

    def _say_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Sketch the gradients of the first steps, outside timed steps. Compute their norm if the program does not show it."""
        recorder, phases = self._rank.recorder, self._phases
        if recorder is not None and phases.phase != "measure" and phases.steps < SKETCHED_STEPS:
            try:
                with recorder.excluding():
                    gradients = self._optimizers.sketch(optimizer)
                recorder.write("gradients", sketch=StepSketch(self._running, gradients))
            except (RuntimeError, TypeError, NotImplementedError) as error:
                recorder.note(f"gradients have no sketch, so those of the first replays are not compared: {error}")
        shown = self._lines.log.source("grad_norm") not in (None, "computed by the observer")
        if not shown and (norm := self._optimizers.norm()) is not None:
            self._add("grad_norm", "computed by the observer", norm)

    def _write_steps(self, *, at_end: bool = False) -> None:
        """Write each step whose metrics are known. After the last step, complete the run's records."""
        rank, recorder = self._rank, self._rank.recorder
        if recorder is None or rank.done or not self._lines.write(self._graphs.replays, at_end=at_end):
            return
        if self._trace is not None:
            recorder.write("probe", **vars(self._trace.end(self._lines.last - self._spec.training.steps)))
        if fault := self._graphs.fault(self._phases):
            rank.fail(fault)
        else:
            recorder.enter("teardown", self._phases.steps)
        rank.done = True

    def _leave(self) -> None:
        """Write the remaining records at the end of the process."""
        rank = self._rank
        if rank.silent or rank.recorder is None:
            return
        if (error := getattr(sys, "last_value", None)) is not None:
            rank.fail(error)
        if not (rank.done or rank.failed):
            try:
                self._write_rest()
            except OrchestratorError as fault:
                rank.fail(fault)
        if rank.done and not rank.failed:
            rank.recorder.leave()

    def _write_rest(self) -> None:
        """Write the steps that still wait, because no later step will follow.

        Raises:
            NumericError: a number is not finite.
            ProgramError: steps or their metrics are missing.
        """
        if self._groups.first_may_have_ended and self._moment is not None and not self._says_steps:
            self._end_step(self._moment)
        self._write_steps(at_end=True)
        if not self._rank.done and self._lines.is_writer:
            raise ProgramError(self._lines.why_incomplete(self._graphs.replays))


def _whole(name: str, value: Any) -> Any:
    """Return ``value``, or what a DTensor holds on every rank.

    Raises:
        ProgramError: each rank holds a part. The observer collects none, because the program may report on one rank alone.
    """
    if not hasattr(value, "full_tensor"):
        return value
    if all(placement.is_replicate() for placement in value.placements):
        return value.to_local()
    raise ProgramError(
        f"launch.observe.step got a {name} of which each rank holds a part: pass {name}.full_tensor(), and call that on every rank"
    )
