"""The observer of one process. It follows steps and phases, and writes the same records as engines."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import torch

from launch.contract.errors import OrchestratorError, ProgramError
from launch.contract.metric_names import Column
from launch.contract.paths import AttemptPaths
from launch.contract.records.gradient_sketch import StepSketch
from launch.contract.spec import read_spec
from launch.observe.graph_counter import GraphCounter
from launch.observe.inspected_steps import InspectedSteps
from launch.observe.optimizers import Optimizers, identity
from launch.observe.rank import Rank
from launch.observe.steps.backlog import Backlog
from launch.observe.steps.metric_log import Known, Later, Metric, Source, columns_in, columns_in_line, split_lines
from launch.observe.steps.own_time import OwnTime
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

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


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
        self._backlog = Backlog()
        self._steps_left = 0
        """The steps after which the backlog is due, because the last timed one ends."""
        self._own_time = OwnTime()
        self._steady: Container[int] = ()
        """The optimizers, by id, at whose steps nothing is computed: all that are known, once the program shows its norm."""
        self.reads = True
        """Whether printed lines are read."""
        self._trace: StepsTrace | None = None
        self._inspected: InspectedSteps | None = None
        self._start_counting("optimizer steps")
        # Registered first, so it is called last.
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._forget)

    def _start_counting(self, steps_from: str) -> None:
        self._phases = PhaseTracker(self._spec.graphed, self._spec.cuda_graph.warmup_steps)
        self._groups = StepGroups()
        self._lines = StepLines(self._rank, self._spec, steps_from)
        self._graphs.restart()

    # --- what hooks tell ---------------------------------------------------------------------------------------------

    def before_optimizer(
        self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Begin an optimizer's step with these ``arguments``, of which it is the first."""
        begun = perf_counter()
        # The optimizer is still in the list if an exception ended its last step.
        if self._stepping:
            self._leave_optimizer(optimizer)
        self._stepping.append(id(optimizer))
        if id(optimizer) not in self._steady:
            self._begin_optimizer(optimizer, closure=_has_closure(arguments, named))
        self._own_time.hooks += perf_counter() - begun

    def _begin_optimizer(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Begin a step of a new optimizer, or of one whose gradients are needed: after a ``closure``, or now."""
        if self._rank.silent:
            self._rank.report_second_process()
        if len(self._stepping) > 1 or self._is_idle():
            return
        self._rank.begin(self._phases.phase)
        self._optimizers.add(optimizer)
        if not closure:
            self._say_gradients(optimizer)

    def after_optimizer(
        self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        begun = perf_counter()
        is_outermost = self._stepping[:1] == [id(optimizer)]
        self._leave_optimizer(optimizer)
        if is_outermost and not (self._says_steps or self._is_idle()):
            if not self._steady and _has_closure(arguments, named):
                self._say_gradients(optimizer)
            self._add_end(self._end_optimizer, identity(optimizer))
        self._own_time.hooks += perf_counter() - begun

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget an optimizer's step and all steps within it."""
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]

    def say_step(self, loss: Any, grad_norm: Any) -> None:
        """End a step that the program announces. From then on, steps of its optimizers do not count, not even earlier ones."""
        if self._is_idle():
            return
        begun = perf_counter()
        if not self._says_steps:
            self._begin_saying()
        self._add("loss", "launch.observe.step", _whole("loss", loss))
        if grad_norm is not None:
            self._add("grad_norm", "launch.observe.step", _whole("grad_norm", grad_norm))
        self._add_end(self._end_step)
        self._own_time.hooks += perf_counter() - begun

    def _begin_saying(self) -> None:
        self._catch_up()
        if self._lines.written and not self._lines.refused:
            raise ProgramError(
                "launch.observe.step was not called in the first steps: call it at the end of every step"
            )
        self._rank.begin(self._phases.phase)
        self._says_steps = True
        self._start_counting("launch.observe.step")

    def before_capture(self) -> None:
        if self._rank.silent or self._rank.recorder is None or not self._rank.begun:
            return
        self._catch_up()
        if self._spec.graphed and self._phases.phase in ("warmup", "settle"):
            self._rank.recorder.enter("capture", self._phases.steps)
        self._graphs.begin_capture()

    def after_capture(self) -> None:
        self._graphs.end_capture()

    def before_replay(self) -> None:
        self._graphs.replays += 1

    def take_own(self, metric: Metric, value: Any, *, to_sum: bool = False) -> None:
        """Take what one of the program's own functions returned for the current step, or for a micro-batch of it (``to_sum``).

        Every rank calls such a function, so every rank also takes part in the collective ``full_tensor``, even
        if it needs no result.
        """
        begun = perf_counter()
        # The first question is quicker.
        if type(value) is not torch.Tensor and hasattr(value, "full_tensor"):
            if self._is_capturing():
                return
            value = value.full_tensor()
        if not self._is_idle():
            self._add(metric, "the program's own functions", value, to_sum=to_sum)
        self._own_time.hooks += perf_counter() - begun

    def say(self, source: Source, record: Mapping[Any, Any]) -> None:
        """Take what the program logged after a step, by its own names. Numbers are read now, because tensors may change."""
        begun = perf_counter()
        said = columns_in(record)
        if said.keys() & {"loss", "grad_norm"}:
            self._say(source, said)
        self._own_time.hooks += perf_counter() - begun

    def say_scalar(self, source: Source, metric: Metric, value: Any, step: Any) -> None:
        """Take a single value that the program logged after a step, like :meth:`say` but quicker."""
        begun = perf_counter()
        said: dict[Column, Any] = {metric: value} if step is None else {metric: value, "step": step}
        is_plain = type(value) is float and (step is None or type(step) is int)
        self._say(source, said if is_plain else columns_in(said))
        self._own_time.hooks += perf_counter() - begun

    def _say(self, source: Source, said: Mapping[Column, float]) -> None:
        # During a capture there is no loss.
        if not self._is_idle() and self._backlog.add(self._take, source, said):
            self._catch_up()

    def read(self, text: str, rest: list[str]) -> None:
        """Read printed text after ``rest``, if no better source is known. ``rest`` becomes the incomplete last line."""
        begun = perf_counter()
        if not self._is_idle() and self._backlog.add(self._take_printed, text, rest):
            self._catch_up()
        self._own_time.hooks += perf_counter() - begun

    def excepthook(self, then: ExceptHook) -> ExceptHook:
        """Return a hook that records an uncaught exception, then calls ``then``."""

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._fail(error)
            then(kind, error, trace)

        return hook

    # --- what waits --------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Process what hooks have read, and determine how much may wait from now on."""
        self._backlog.process(self._lines.flush)
        rank, phases, log = self._rank, self._phases, self._lines.log
        timed = phases.phase == "measure" and not rank.done
        self._steps_left = self._spec.training.steps - phases.steps
        self._backlog.may_wait = timed and self._steps_left > 0
        shown = log.source("grad_norm") not in (None, "computed by the observer")
        self._steady = self._optimizers.seen if timed and shown else ()
        self.reads = not (rank.silent or rank.done or self._lines.refused) and (
            log.wants("loss", "printed") or log.wants("grad_norm", "printed")
        )

    def _take(self, source: Source, said: Mapping[Column, float]) -> None:
        log = self._lines.log
        if self._rank.done or not said.keys() & {"loss", "grad_norm"}:
            return
        log.say(source, said, self._running)
        if len(log.contradictions) > MOST_CONTRADICTIONS:
            raise ProgramError(
                f"the program prints {' and '.join(log.contradictions.values())}: call launch.observe.step(loss=..., "
                "grad_norm=...) at the end of each step"
            )
        self._write_steps()

    def _take_printed(self, text: str, rest: list[str]) -> None:
        lines, rest[0] = split_lines(text, rest[0])
        for line in lines:
            self._take("printed", columns_in_line(line, self._spec.command.pattern))

    def _take_number(self, metric: Metric, source: Source, number: Later, to_sum: bool) -> None:
        log = self._lines.log
        (log.add_to if to_sum else log.add)(metric, source, self._running, number)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _end_optimizer(self, optimizer: int, moment: Moment) -> None:
        """End an optimizer's step, and the training step that ends with it or before it."""
        late, ends = self._groups.stepped(optimizer)
        if late and self._moment is not None:
            self._end_step(self._moment)
        self._moment = moment
        if ends:
            self._end_step(moment)

    def _is_idle(self) -> bool:
        rank = self._rank
        return rank.silent or rank.done or rank.failed or (self._cuda and torch.cuda.is_current_stream_capturing())

    def _is_capturing(self) -> bool:
        return self._cuda and torch.cuda.is_current_stream_capturing()

    @property
    def _running(self) -> int:
        """The step that runs now, counted from 0."""
        return self._lines.ended + (self._groups.first_may_have_ended and not self._says_steps)

    def _end_step(self, moment: Moment) -> None:
        recorder, spec, phases = self._rank.recorder, self._spec, self._phases
        if recorder is None or self._rank.done:
            return
        graphs, replays = self._graphs.since_last_step(moment.counts)
        phase = phases.end_step(graphs, replays)
        self._own_time.end_step(moment.own_seconds, timed=phase == "measure")
        if phase != "measure" or not spec.graphed:
            self._graphs.graphs += graphs
        self._lines.end_step(moment, phase)
        if phases.steps == spec.training.steps:
            self._prove(recorder)
        elif phases.steps < spec.training.steps:
            if phases.phase == "settle" != phase:
                self._optimizers.write_digest(recorder)
            recorder.enter(phases.phase, phases.steps)
        elif self._inspected is not None:
            self._inspected.end_step()
        self._write_steps()

    def _prove(self, recorder: Recorder) -> None:
        """Write the proof of replay after the last timed step, and begin profiling."""
        recorder.enter("probe", self._phases.steps)
        self._optimizers.write_digest(recorder)
        recorder.write("proof", graphs=self._graphs.stats(self._phases))
        if cost := self._own_time.describe():
            recorder.note(cost)
        if self._cuda and self._spec.inspect:
            self._inspected = InspectedSteps(recorder)
        elif self._cuda:
            self._trace = StepsTrace()

    def _add_end(self, call: Callable[..., None], *arguments: Any) -> None:
        """Add a call that ends at most one step, and which also needs the moment."""
        moment = self._readings.now(self._graphs.counts(), self._own_time.hooks)
        self._steps_left -= 1
        if self._backlog.add(call, *arguments, moment) or self._steps_left <= 0:
            self._catch_up()

    def _add(self, metric: Metric, source: Source, value: Any, *, to_sum: bool = False) -> None:
        if self._lines.log.wants(metric, source):
            number = Known(0.0) if self._lines.refused else self._readings.later(value)
            if self._backlog.add(self._take_number, metric, source, number, to_sum):
                self._catch_up()

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
        if self._lines.log.source("grad_norm") in (None, "computed by the observer"):
            begun = perf_counter()
            norm = self._optimizers.norm()
            self._own_time.end_norm(perf_counter() - begun, timed=phases.phase == "measure")
            if norm is not None:
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

    def _forget(self) -> None:
        """In a forked child, keep nothing of this process's steps."""
        self._rank.forget()
        self._backlog, self._steady = Backlog(), ()

    def _fail(self, error: BaseException) -> None:
        """Record the error that ends the program, or the one that ended it earlier if a reading that waits shows it."""
        try:
            # An error of the observer's own ended the program. What follows it no longer counts.
            if not (self._rank.silent or isinstance(error, OrchestratorError)):
                self._catch_up()
        except (OrchestratorError, OSError) as earlier:
            error = earlier
        except RuntimeError:
            # CUDA does not answer any more after some errors. The program's own error says why.
            pass
        self._rank.fail(error)

    def _leave(self) -> None:
        """Write the remaining records at the end of the process."""
        rank = self._rank
        if rank.silent or rank.recorder is None:
            return
        if (error := getattr(sys, "last_value", None)) is not None:
            self._fail(error)
        if not (rank.done or rank.failed):
            try:
                self._catch_up()
                self._write_rest()
            except OrchestratorError as fault:
                rank.fail(fault)
            finally:
                self._lines.flush()
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


def _has_closure(arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether an optimizer, the first argument, computes the gradients in its step."""
    return callable(arguments[1] if len(arguments) > 1 else named.get("closure"))


def _whole(name: str, value: Any) -> Any:
    """Return ``value``, or what a DTensor holds on every rank.

    Raises:
        ProgramError: each rank holds a part. The observer collects none, because the program may report on one rank alone.
    """
    if type(value) is torch.Tensor or not hasattr(value, "full_tensor"):
        return value
    if all(placement.is_replicate() for placement in value.placements):
        return value.to_local()
    raise ProgramError(
        f"launch.observe.step got a {name} of which each rank holds a part: pass {name}.full_tensor(), and call that on every rank"
    )
