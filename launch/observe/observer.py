"""The observer of one process. Its hooks read what the program does, and what they read waits to be processed.

In timed steps a hook finds its own code and data evicted from the CPU's caches, so it does as little as possible.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Final

import torch

from launch.contract.errors import OrchestratorError, ProgramError
from launch.contract.metric_names import Column
from launch.contract.paths import AttemptPaths
from launch.contract.records.step_metrics import Metric
from launch.contract.spec import read_spec
from launch.observe.description.used_settings import UsedSettings
from launch.observe.printed_streams import PrintedStreams
from launch.observe.progress_bars import ProgressBars
from launch.observe.rank import Rank
from launch.observe.state.optimizers import identity
from launch.observe.steps.backlog import Backlog
from launch.observe.steps.graph_counter import GraphCounter
from launch.observe.steps.metric_log import Known, Source, columns_in
from launch.observe.steps.readings import Readings
from launch.observe.steps.training_steps import TrainingSteps

_WITHIN: Final = -1
"""In place of an identity: the steps of this optimizer do not count."""

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Observer:
    """Receives what hooks report. It writes nothing until the process shows that it is a rank."""

    def __init__(self, folder: Path) -> None:
        attempt = AttemptPaths(folder)
        spec = read_spec(attempt.spec)
        self._cuda = spec.placement.device == "cuda"
        self._rank = Rank(attempt, spec)
        self.graphs = GraphCounter(spec)
        self.used = UsedSettings()
        self._steps = TrainingSteps(self._rank, spec, self.graphs, self.used)
        self._graphed = spec.graphed
        self._readings = Readings(self._cuda)
        self._backlog = Backlog()
        self._own = 0.0
        """The seconds that hooks have taken so far."""
        self._end_optimizer, self._take = self._steps.end_optimizer, self._steps.take
        self._stepping: list[int] = []
        """The optimizers whose steps run now, by id. There may be several, because a container (torchtitan's) steps others."""
        self._within: dict[int, torch.optim.Optimizer] = {}
        """The optimizers that stepped within the step of another one, by id."""
        self._timed = False
        """Whether steps are timed now, so that only a capture hides them."""
        self._known: Mapping[int, int] = {}
        """The identities by id of the optimizers at whose steps nothing is computed: all that are known, once steps are timed
        and the program shows its norm. Those that step within others are ``_WITHIN``."""
        self._last: int | None = None
        """The identity of the last optimizer of each training step. The ends of others need no mark on the GPU."""
        self._steps_left = 0
        """The steps after which the backlog is due, because the last timed one ends."""
        self._reads = True
        """Whether printed lines are read."""
        self.streams = PrintedStreams(partial(self._read, self._steps.take_printed))
        read_shown = partial(self._read, self._steps.take_shown)
        self.bars = None if spec.command.pattern else ProgressBars(read_shown, self.streams)
        """A pattern of the recipe describes what bars draw, so then they are read as drawn."""
        # Registered first, so it is called last.
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._forget)

    # --- what hooks tell ---------------------------------------------------------------------------------------------

    def before_optimizer(
        self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Begin an optimizer's step with these ``arguments``, of which it is the first."""
        if id(optimizer) in self._known:
            return
        begun = perf_counter()
        # The optimizer is still in the list if an exception ended its last step.
        if self._stepping:
            self._leave_optimizer(optimizer)
        self._stepping.append(id(optimizer))
        self._begin_optimizer(optimizer, closure=_has_closure(arguments, named))
        self._own += perf_counter() - begun

    def _begin_optimizer(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        """Begin a step of a new optimizer, or of one whose gradients are needed: after a ``closure``, or now."""
        if self._rank.silent:
            self._rank.report_second_process()
        if len(self._stepping) > 1:
            self._within[id(optimizer)] = optimizer
        elif not self._is_idle():
            self._rank.begin(self._steps.phases.phase)
            self._steps.optimizers.add(optimizer)
            if not closure:
                self._say_gradients(optimizer)

    def after_optimizer(
        self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        begun = perf_counter()
        known, graphs = self._known.get(id(optimizer)), self.graphs
        if known is None:
            self._end_new_optimizer(optimizer, arguments, named)
        elif known != _WITHIN and not graphs.capturing:
            mark = None
            # This repeats what ``_end`` does, because each call of a function that is not in the caches takes about 2 us.
            if known == self._last:
                self._steps_left -= 1
                mark = self._readings.record()
            counts = (graphs.captures, graphs.replays, 0) if self._cuda else graphs.counts()
            ended = counts, self._own, begun, mark
            if self._backlog.add(begun, self._end_optimizer, known, ended) or self._steps_left <= 0:
                self._catch_up()
        self._own += perf_counter() - begun

    def _end_new_optimizer(
        self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        is_outermost = self._stepping[:1] == [id(optimizer)]
        self._leave_optimizer(optimizer)
        if is_outermost and not self.graphs.capturing:
            closure = _has_closure(arguments, named)
            self.used.end_step(id(optimizer), self.graphs.captures, closure=closure)
        if is_outermost and not (self._steps.announced or self._is_idle()):
            if _has_closure(arguments, named):
                self._say_gradients(optimizer)
            self._end(perf_counter(), self._end_optimizer, identity(optimizer))

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget an optimizer's step and all steps within it."""
        if id(optimizer) in self._stepping:
            del self._stepping[self._stepping.index(id(optimizer)) :]

    def say_step(self, loss: Any, grad_norm: Any) -> None:
        """End a step that the program announces. From then on, steps of its optimizers do not count, not even earlier ones."""
        if self._is_idle():
            return
        begun = perf_counter()
        if not self._steps.announced:
            self._catch_up()
            self._steps.announce()
            self._catch_up()
        self._add("loss", "launch.observe.step", _whole("loss", loss))
        if grad_norm is not None:
            self._add("grad_norm", "launch.observe.step", _whole("grad_norm", grad_norm))
        self._end(begun, self._steps.end)
        self._own += perf_counter() - begun

    def say_scaler(self) -> None:
        """Take note that a gradient scaler skips the steps whose gradients are not finite."""
        self.used.scaled = True

    def before_capture(self) -> None:
        if self._rank.silent or self._rank.recorder is None or not self._rank.begun:
            return
        self._catch_up()
        phases = self._steps.phases
        if self._graphed and self.graphs.purpose.may_train and phases.phase in ("warmup", "settle"):
            self._rank.recorder.enter("capture", phases.steps)

    def take_clipping(self, norm: Any, max_norm: Any, norm_type: Any) -> None:
        """Take the norm of the gradients before they are clipped."""
        if not self._timed:
            self.used.say_clipping(max_norm, norm_type)
        self.take_own("grad_norm", norm)

    def take_batch(self, batch: Any, iterator: Any) -> None:
        """Take a batch that ``iterator`` of a data loader gives to the program."""
        if self._timed:
            self.used.batches.missed = True
        else:
            self.used.batches.take(batch, iterator)

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
        if not (self.graphs.capturing if self._timed else self._is_idle()):
            self._add(metric, "the program's own functions", value, to_sum=to_sum)
        self._own += perf_counter() - begun

    def say(self, source: Source, record: Mapping[Any, Any]) -> None:
        """Take what the program logged after a step, by its own names. Numbers are read now, because tensors may change."""
        begun = perf_counter()
        said = columns_in(record)
        # During a capture there is no loss.
        is_metric = said.keys() & {"loss", "grad_norm"} and not self._is_idle()
        if is_metric and self._backlog.add(begun, self._take, source, said):
            self._catch_up()
        self._own += perf_counter() - begun

    def say_scalar(self, metric: Metric, value: Any, step: Any) -> None:
        """Take a single value that the program's logger got after a step, like :meth:`say` but quicker."""
        begun = perf_counter()
        said: dict[Column, Any] = {metric: value} if step is None else {metric: value, "step": step}
        is_plain = type(value) is float and (step is None or type(step) is int)
        if not is_plain:
            said = columns_in(said)
        # The first question is the whole one in timed steps, and quicker.
        idle = self.graphs.capturing if self._timed else self._is_idle()
        if not idle and self._backlog.add(begun, self._take, "its logger", said):
            self._catch_up()
        self._own += perf_counter() - begun

    def _read(self, take: Callable[..., None], *printed: Any) -> None:
        """Let ``take`` read what the program printed or let a progress bar show, if no better source is known."""
        if not self._reads:
            return
        begun = perf_counter()
        if not self._is_idle() and self._backlog.add(begun, take, *printed):
            self._catch_up()
        self._own += perf_counter() - begun

    def excepthook(self, then: ExceptHook) -> ExceptHook:
        """Return a hook that records an uncaught exception, then calls ``then``."""

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._fail(error)
            then(kind, error, trace)

        return hook

    # --- what hooks read ---------------------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        if self._timed:
            return self.graphs.capturing
        return self._rank.silent or self._rank.done or self._rank.failed or self._is_capturing()

    def _is_capturing(self) -> bool:
        return self._cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def _end(self, now: float, call: Callable[..., None], *arguments: Any) -> None:
        """Add a call that ends a step, and which also needs the moment."""
        ended = self.graphs.counts(), self._own, now, self._readings.record()
        self._steps_left -= 1
        if self._backlog.add(now, call, *arguments, ended) or self._steps_left <= 0:
            self._catch_up()

    def _add(self, metric: Metric, source: Source, value: Any, *, to_sum: bool = False) -> None:
        lines = self._steps.lines
        if lines.log.wants(metric, source):
            number = Known(0.0) if lines.refused else self._readings.later(value)
            if self._backlog.add(perf_counter(), self._steps.take_number, metric, source, number, to_sum):
                self._catch_up()

    def _say_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Sketch the gradients of the first steps. Compute their norm if the program does not show it."""
        self._steps.sketch(optimizer)
        if not self._steps.shows_norm:
            begun = perf_counter()
            norm = self._steps.optimizers.norm(optimizer)
            seconds = perf_counter() - begun
            self._own -= seconds
            self._steps.own_time.end_norm(seconds, timed=self._timed)
            if norm is not None:
                self._add("grad_norm", "computed by the observer", norm)

    def _catch_up(self) -> None:
        """Process what hooks have read, and determine what they need to read from now on."""
        steps = self._steps
        self._backlog.process(steps.lines.flush)
        self._timed = steps.timed and not (self._rank.silent or self._rank.failed)
        self._steps_left = steps.left
        self._backlog.may_wait = self._timed and steps.left > 0
        is_steady = self._timed and steps.shows_norm and not (self._stepping or steps.groups.has_new)
        self._known = self._identities() if is_steady else {}
        self._last = steps.groups.last
        self._reads = steps.wants_text
        if self._reads:
            self.streams.hook()

    def _identities(self) -> Mapping[int, int]:
        """Return the identities of all optimizers, or none if one of them steps both alone and within others."""
        seen = self._steps.optimizers.seen
        if seen.keys() & self._within:
            return {}
        counted = {key: _WITHIN if self._steps.announced else identity(one) for key, one in seen.items()}
        return counted | dict.fromkeys(self._within, _WITHIN)

    # --- the end of the process --------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """In a forked child, keep nothing of this process's steps."""
        self._rank.forget()
        self._backlog, self._known, self._timed = Backlog(), {}, False

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
        self._known, self._timed = {}, False

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
                self._steps.write_rest()
            except OrchestratorError as fault:
                rank.fail(fault)
            finally:
                self._steps.lines.flush()
        if rank.done and not rank.failed:
            rank.recorder.leave()


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
