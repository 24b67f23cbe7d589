"""The observer of one process: it claims a rank, follows steps and phases, and writes the records that engines write."""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from launch.common.atomic_files import JsonLines, write_json
from launch.contract.errors import CaptureError, NumericError, OrchestratorError
from launch.contract.metric_names import Column
from launch.contract.paths import AttemptPaths
from launch.contract.records.events import Phase
from launch.contract.records.gradient_sketch import StepSketch
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.identity import identity_of
from launch.contract.records.step_metrics import StepMetrics
from launch.contract.spec import read_spec
from launch.frameworks.command_line import observed_steps
from launch.observe.gradient_sketches import gradient_of, parameter_names, sketch
from launch.observe.metric_log import Metric, MetricLog, Source, columns_in_line
from launch.observe.phase_tracker import PhaseTracker
from launch.observe.program import describe_program
from launch.observe.readings import Clock, Moment, later
from launch.observe.step_groups import StepGroups
from launch.train.telemetry.event_log import Recorder
from launch.train.telemetry.parameter_digest import digest_parameters
from launch.train.telemetry.profiler import StepsTrace

WAIT_STEPS = 2
"""How long a line waits for a better source of its metrics."""
OTHER_RANK_AFTER = 8
"""After so many steps without metrics of rank 0, the last rank writes its own: Megatron logs there."""
SKETCHED_STEPS = 16
"""Gradients of later steps are not sketched, whenever the program captures."""
MOST_WAITING = 10_000
MOST_CONTRADICTIONS = 1
"""A summary at the end may differ from the last step's loss."""
ON_A_CPU = "compiled without CUDA graphs (CPU)"

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


_Method = TypeVar("_Method", bound=Callable[..., None])


def _counted(method: _Method) -> _Method:
    """Count the time of ``method`` as the observer's own."""

    @functools.wraps(method)
    def counted(self: Observer, *arguments: Any, **named: Any) -> None:
        begun = time.perf_counter()
        method(self, *arguments, **named)
        self._spending += time.perf_counter() - begun

    return cast(_Method, counted)


class ProgramError(OrchestratorError):
    """The program did not do what its run needs."""


class Observer:
    """All that is known of this process. It is silent until the process shows that it is a rank."""

    def __init__(self, folder: Path) -> None:
        self._attempt = AttemptPaths(folder)
        self._spec = read_spec(self._attempt.spec)
        self._folders = tuple(sys.path)
        self._cuda = self._spec.placement.device == "cuda"
        self._last = observed_steps(self._spec)
        self._start_counting()
        self._recorder: Recorder | None = None
        self._metrics: JsonLines | None = None
        self._parameter_names: dict[int, Mapping[int, str]] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._clock = Clock(self._cuda)
        self._moment: Moment | None = None
        """When the last optimizer stepped."""
        self._written = 0
        self._loss_sum: Any = None
        self._loss_step = -1
        """The step of that sum."""
        self._captures = self._replays = 0
        self._seen = (0, 0, 0)
        """Captures, replays and compilations when the last step ended."""
        self._begun = self._says_steps = self._norm_seen = self._silent = self._done = self._failed = False
        self._reported = False
        self._capture_seconds = self._began_capture = 0.0
        self._spent: list[float] = []
        self._spending = 0.0
        self._trace: StepsTrace | None = None
        if "RANK" in os.environ:
            self._claim()
        # Registered first, and so called last.
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._forget)

    def _start_counting(self) -> None:
        self._phases = PhaseTracker(self._spec.graphed, self._spec.cuda_graph.warmup_steps)
        self._groups = StepGroups()
        self._log = MetricLog()
        self._graphs = 0
        self._ended: list[tuple[Moment, Phase]] = []
        """The end and the phase of each step."""

    # --- what hooks tell ---------------------------------------------------------------------------------------------

    @_counted
    def before_optimizer(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """``closure``: the optimizer computes the gradients itself, in the step."""
        if self._silent:
            self._report_second_process()
        if self._is_idle():
            return
        self._begin()
        self._optimizers[id(optimizer)] = optimizer
        if not closure:
            self._say_gradients(optimizer)

    @_counted
    def after_optimizer(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        if self._is_idle() or self._says_steps:
            return
        if closure:
            self._say_gradients(optimizer)
        late, ends = self._groups.stepped(_identity(optimizer))
        if late and self._moment is not None:
            self._end_step(self._moment)
        self._moment = self._now()
        if ends:
            self._end_step(self._moment)

    @_counted
    def say_step(self, loss: Any, grad_norm: Any) -> None:
        """End a step that the program announces. What its optimizers do counts no longer, nor what they did before."""
        if self._is_idle():
            return
        if not self._says_steps and self._written:
            raise ProgramError(
                "launch.observe.step was not called in the first steps: call it at the end of every step"
            )
        self._begin()
        if not self._says_steps:
            self._says_steps = True
            self._seen = (0, 0, 0)
            self._start_counting()
        self._add("loss", "launch.observe.step", loss)
        if grad_norm is not None:
            self._add("grad_norm", "launch.observe.step", grad_norm)
        self._end_step(self._now())

    def before_capture(self) -> None:
        if self._silent or self._recorder is None or not self._begun:
            return
        if self._spec.graphed and self._phases.phase in ("warmup", "settle"):
            self._recorder.enter("capture", self._phases.steps)
        self._began_capture = time.monotonic()

    def after_capture(self) -> None:
        self._captures += 1
        self._capture_seconds += time.monotonic() - self._began_capture if self._began_capture else 0.0

    def before_replay(self) -> None:
        self._replays += 1

    @_counted
    def say_own(self, metric: Metric, value: Any) -> None:
        """Take what a function of the program's own returned for the step that runs."""
        if not self._is_idle():
            self._norm_seen |= metric == "grad_norm"
            self._add(metric, "the program's own functions", value)

    @_counted
    def add_own_loss(self, loss: Any) -> None:
        """Add a micro-batch's share of the loss."""
        if not self._is_idle():
            before = self._loss_sum if self._loss_step == self._running else None
            # A replay overwrites the tensor.
            self._loss_sum = loss.detach().clone() if before is None else before + loss.detach()
            self._loss_step = self._running
            self._add("loss", "the program's own functions", self._loss_sum)

    def say(self, source: Source, said: Mapping[Column, float]) -> None:
        """Take what the program logged or printed, after the step that it is about. A capture computes no loss."""
        if self._is_idle() or not said.keys() & {"loss", "grad_norm"}:
            return
        self._log.say(source, said, self._running)
        if len(self._log.contradictions) > MOST_CONTRADICTIONS:
            raise ProgramError(
                f"the program prints {' and '.join(self._log.contradictions.values())}: call launch.observe.step(loss=..., "
                "grad_norm=...) at the end of each step"
            )
        self._write_steps()

    @_counted
    def read_line(self, line: str) -> None:
        """Read a printed line, where no better source is known."""
        if self._wants_printed and (said := columns_in_line(line)):
            self.say("printed", said)

    @property
    def _wants_printed(self) -> bool:
        known = self._log.source("loss"), self._log.source("grad_norm")
        return not (self._silent or self._done) and ("printed" in known or None in known)

    def excepthook(self, then: ExceptHook) -> ExceptHook:
        """Return a hook that records an exception nobody caught, then calls ``then``."""

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._fail(error)
            then(kind, error, trace)

        return hook

    # --- steps -------------------------------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        return self._silent or self._done or (self._cuda and torch.cuda.is_current_stream_capturing())

    @property
    def _running(self) -> int:
        """The step that runs now, counted from 0."""
        return len(self._ended) + (self._groups.first_may_have_ended and not self._says_steps)

    def _begin(self) -> None:
        """Become a rank at the first step."""
        if self._begun:
            return
        self._begun = True
        self._claim()
        if self._recorder is None:
            return
        if self._cuda:
            self._recorder.device = torch.device("cuda", torch.cuda.current_device())
        if self._rank == 0:
            environment = describe_program(self._recorder.device, self._spec, self._folders)
            write_json(self._attempt.environment, identity_of(self._attempt) | environment)
        self._recorder.enter(self._phases.phase, 0)

    def _now(self) -> Moment:
        return self._clock.now((self._captures, self._replays, _compiled_frames()))

    def _end_step(self, moment: Moment) -> None:
        recorder, spec = self._recorder, self._spec
        if recorder is None:
            return
        captures, replays, frames = (now - before for now, before in zip(moment.counts, self._seen, strict=True))
        self._seen = moment.counts
        phase = self._phases.end_step(captures if self._cuda else frames, replays)
        if phase != "measure" or not spec.graphed:
            self._graphs += captures if self._cuda else frames
        if phase == "capture":
            self._unsettle()
        self._ended.append((moment, phase))
        self._norm_seen = False
        if self._phases.steps == spec.training.steps:
            self._prove(recorder)
        elif self._phases.steps < spec.training.steps:
            if self._phases.phase == "settle" != phase:
                self._digest(recorder)
            recorder.enter(self._phases.phase, self._phases.steps)
        self._spent.append(self._spending)
        self._spending = 0.0
        self._write_steps()

    def _unsettle(self) -> None:
        """Count steps that settled before another capture as warm-up: both runs of a pair settle once. None is written yet."""
        for place in range(self._written, len(self._ended)):
            moment, phase = self._ended[place]
            self._ended[place] = (moment, "warmup" if phase == "settle" else phase)

    def _prove(self, recorder: Recorder) -> None:
        """Write the proof of replay after the last timed step, and begin to profile."""
        phases, spec = self._phases, self._spec
        recorder.enter("probe", phases.steps)
        self._digest(recorder)
        each = max(phases.replays, default=0)
        stats = GraphStats(
            impl=spec.cuda_graph.impl if spec.graphed or not self._graphs else "command",
            effective_scope=spec.cuda_graph.scope or tuple(filter(None, [spec.cuda_graph.name])),
            mechanism="" if not self._graphs else "captured by the program" if self._cuda else ON_A_CPU,
            graphs=self._graphs,
            replays=sum(phases.replays),
            expected_replays=each * len(phases.replays),
            recompilations=phases.recaptures,
            capture_seconds=self._capture_seconds,
            launches_per_step=each,
        )
        recorder.write("proof", graphs=stats)
        cost = median(self._spent) * 1e6 if self._spent else 0.0
        recorder.note(f"the observer took {cost:.0f} us of a step (median)")
        if self._cuda:
            self._trace = StepsTrace()

    def _digest(self, recorder: Recorder) -> None:
        """Write a digest of the parameters, which shows whether the optimizer changes any."""
        groups = (group for optimizer in self._optimizers.values() for group in optimizer.param_groups)
        parameters = [parameter for group in groups for parameter in group["params"]]
        if not parameters:
            recorder.note("no optimizer was seen, so whether parameters change is unknown")
            return
        try:
            recorder.write("parameters", digest=digest_parameters(parameters))
        except (RuntimeError, TypeError, KeyError, NotImplementedError) as error:
            recorder.note(f"parameters have no digest, so whether they change is unknown: {error}")

    # --- metrics -----------------------------------------------------------------------------------------------------

    def _add(self, metric: Metric, source: Source, value: Any) -> None:
        self._log.add(metric, source, self._running, later(value))

    def _say_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Sketch the gradients of the first steps, outside the timed ones, and compute their norm where nothing shows it."""
        if self._recorder is not None and self._phases.phase != "measure" and self._phases.steps < SKETCHED_STEPS:
            try:
                with self._recorder.excluding():
                    gradients = sketch(optimizer, self._names(optimizer))
                self._recorder.write("gradients", sketch=StepSketch(self._running, tuple(gradients)))
            except (RuntimeError, TypeError, NotImplementedError) as error:
                self._recorder.note(
                    f"gradients have no sketch, so those of the first replays are not compared: {error}"
                )
        self._say_norm()

    def _names(self, optimizer: torch.optim.Optimizer) -> Mapping[int, str]:
        if id(optimizer) not in self._parameter_names:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._parameter_names[id(optimizer)] = parameter_names(parameters)
        return self._parameter_names[id(optimizer)]

    def _say_norm(self) -> None:
        """Compute the norm of all gradients on this rank, where the program shows none."""
        if self._norm_seen or self._log.source("grad_norm") not in (None, "computed by the observer"):
            return
        groups = (group for optimizer in self._optimizers.values() for group in optimizer.param_groups)
        gradients = [gradient for group in groups for p in group["params"] if (gradient := gradient_of(p)) is not None]
        if gradients:
            self._add("grad_norm", "computed by the observer", torch.nn.utils.get_total_norm(gradients))

    def _write_steps(self) -> None:
        """Write each step whose metrics are known, in order. Finish after the last one."""
        if self._recorder is None or self._done:
            return
        complete = len(self._ended) >= self._last
        timed = min(len(self._ended), self._spec.training.steps)
        while self._written < timed and (complete or len(self._ended) > self._written + WAIT_STEPS):
            # Nothing is timed any more, and a later hook may never come.
            if not self._write(self._written, wait=complete):
                break
        if len(self._ended) > self._written + MOST_WAITING:
            raise ProgramError(self._why_incomplete())
        if complete and (self._written == timed or self._others_write()):
            self._finish(self._recorder)

    def _write(self, step: int, *, wait: bool = False) -> bool:
        """Write one step. Return False where it has to wait.

        Raises:
            NumericError: its loss or gradient norm is not finite. It is on disk.
        """
        loss, norm = self._log.at("loss", step), self._log.at("grad_norm", step)
        moment, phase = self._ended[step]
        writer = self._writer()
        if loss is None or norm is None or writer is None:
            return False
        if not (wait or (loss.ready() and norm.ready() and moment.ready())):
            return False
        before = self._ended[step - 1][0] if step else None
        numbers = StepMetrics(step, loss.read(), norm.read(), moment.milliseconds_since(before), self._tokens, phase)
        writer.write(numbers)
        self._log.forget(step)
        self._written += 1
        for name, value in (("loss", numbers.loss), ("grad_norm", numbers.grad_norm)):
            if not math.isfinite(value):
                raise NumericError(f"{name} is {value} at step {step} (phase {phase})")
        return True

    @property
    def _tokens(self) -> int:
        return self._spec.training.global_batch_size * self._spec.training.sequence_length

    def _writer(self) -> JsonLines | None:
        """Return the file of metrics, where this rank writes it: rank 0, or the last one where rank 0 has none."""
        if self._metrics is not None:
            return self._metrics
        is_last = self._rank == self._spec.parallelism.world_size - 1 and len(self._ended) >= OTHER_RANK_AFTER
        knows = self._log.source("loss") and self._log.source("grad_norm")
        if knows and (self._rank == 0 or is_last) and _create(self._attempt.metrics):
            self._metrics = JsonLines(self._attempt.metrics)
            self._tell_choices()
        return self._metrics

    def _others_write(self) -> bool:
        return self._metrics is None and (self._rank != 0 or self._attempt.metrics.exists())

    def _tell_choices(self) -> None:
        assert self._recorder is not None
        sources = {metric: str(self._log.source(metric)) for metric in ("loss", "grad_norm")}
        steps = "launch.observe.step" if self._says_steps else "optimizer steps"
        self._recorder.write("choices", choices={**sources, "steps": steps, "metrics": f"rank {self._rank}"})

    # --- the rank ----------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        if "RANK" in os.environ:
            return int(os.environ["RANK"])
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def _claim(self) -> None:
        """Become this rank, unless another process is: a launcher's children inherit its variables."""
        if self._recorder is not None or self._silent:
            return
        if _create(self._attempt.events(self._rank)):
            self._recorder = Recorder(self._attempt, self._rank, torch.device(self._spec.placement.device))
        else:
            self._silent = True

    def _report_second_process(self) -> None:
        """Record that this process trains, though another one was the rank: nothing of its steps is compared."""
        if not self._reported:
            self._reported = True
            recorder = Recorder(self._attempt, self._rank, torch.device("cpu"))
            text = f"a second process trains as rank {self._rank}: let the command start one training program"
            recorder.exception(ProgramError(text))

    def _forget(self) -> None:
        """Be no rank in a forked child, unless nobody was one before: then it may become one."""
        if self._recorder is not None:
            self._silent = True

    def _finish(self, recorder: Recorder) -> None:
        """End the run's records: all steps are on disk."""
        if self._trace is not None:
            recorder.write("probe", probe=self._trace.end(self._last - self._spec.training.steps))
        if fault := self._fault():
            self._fail(fault)
        else:
            recorder.enter("teardown", self._phases.steps)
        self._done = True

    def _fault(self) -> OrchestratorError | None:
        """Return why a complete run shows nothing."""
        if not self._spec.graphed or self._phases.phase == "measure":
            return None
        if not self._graphs:
            what = "CUDA graph" if self._cuda else "compiled function"
            return CaptureError(
                f"the program made no {what} in {self._phases.steps} steps: check that the arguments of these graphs turn them on"
            )
        return CaptureError(
            f"the program still captured graphs in the last of {self._phases.steps} steps: give every step the same shapes (pad "
            "sequences, drop the last batch of an epoch), or train for more steps"
        )

    def _why_incomplete(self) -> str:
        ended, wanted = len(self._ended), self._last
        if ended < wanted and self._replays > ended:
            return (
                f"{ended} of {wanted} optimizer steps were seen, but {self._replays} replays of graphs: where a graph holds the "
                "optimizer, call launch.observe.step(loss=..., grad_norm=...) at the end of each step"
            )
        if ended < wanted:
            return f"the program ended after {ended} of {wanted} steps: let it take {wanted} ({{steps}} in the command)"
        for metric in ("loss", "grad_norm"):
            if self._log.source(metric) is None:
                return (
                    f"the program shows no {metric} of its {ended} steps: print it in JSON lines, or call "
                    "launch.observe.step(loss=..., grad_norm=...) at the end of each step"
                )
        return f"the program shows the loss or gradient norm of too few of its {ended} steps: log every step"

    def _fail(self, error: BaseException) -> None:
        self._claim()
        if self._recorder is not None and not (self._done or self._failed or isinstance(error, SystemExit)):
            self._failed = True
            self._recorder.exception(error)

    def _leave(self) -> None:
        """Write what is left at the end of the process."""
        if self._silent or self._recorder is None:
            return
        if (error := getattr(sys, "last_value", None)) is not None:
            self._fail(error)
        if not (self._done or self._failed):
            try:
                self._write_rest()
            except OrchestratorError as fault:
                self._fail(fault)
        if self._done and not self._failed:
            self._recorder.leave()

    def _write_rest(self) -> None:
        """Write what no later step will push out.

        Raises:
            NumericError: a number is not finite.
            ProgramError: steps or their metrics are missing.
        """
        if self._groups.first_may_have_ended and self._moment is not None and not self._says_steps:
            self._end_step(self._moment)
        while self._written < min(len(self._ended), self._spec.training.steps) and self._write(
            self._written, wait=True
        ):
            pass
        self._write_steps()
        if not self._done and (self._rank == 0 or self._metrics is not None):
            raise ProgramError(self._why_incomplete())


def _compiled_frames() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def _identity(optimizer: torch.optim.Optimizer) -> int:
    """Return a number that an optimizer shares with the one that it replaces: that of its first parameter."""
    return next((id(parameter) for group in optimizer.param_groups for parameter in group["params"]), id(optimizer))


def _create(path: Path) -> bool:
    """Create an empty file. Return False where it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True
