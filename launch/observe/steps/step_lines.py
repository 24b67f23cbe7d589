"""The lines of metrics.jsonl. Each step is written, in order, once its loss and gradient norm are known."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from launch.common.atomic_files import JsonLines
from launch.contract.errors import ProgramError
from launch.contract.records.events import StepPhase
from launch.contract.records.step_metrics import METRICS, Metric, StepMetrics
from launch.contract.spec import RunSpec
from launch.frameworks.command_line import observed_steps
from launch.observe.rank import Rank, create
from launch.observe.steps.metric_log import MetricLog
from launch.observe.steps.readings import Moment

WAIT_STEPS = 2
"""The number of steps that a line waits for its metrics. The first line also waits to see which sources show every step."""
OTHER_RANK_AFTER = 8
"""After this many steps without metrics of rank 0, the last rank writes its own. Megatron logs on the last rank."""
MOST_WAITING = 10_000
MOST_AHEAD = 1.5
"""How far the program's numbers may run ahead of its optimizer's steps, as a multiple of these. Loss scaling skips some of them,
while micro-batches have at least twice as many numbers."""


class StepLines:
    """Makes the lines of a run's steps, and writes them.

    ``written`` counts the steps whose lines are made. ``last`` is the number of steps that end the run.
    """

    def __init__(
        self, rank: Rank, spec: RunSpec, steps_from: str, settings: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        self.log = MetricLog()
        self.written = 0
        self.last = observed_steps(spec)
        self._rank, self._spec, self._steps_from, self._settings = rank, spec, steps_from, settings
        self._tokens = spec.training.global_batch_size * spec.training.sequence_length
        self._waiting: deque[tuple[Moment, StepPhase]] = deque()
        """The end and the phase of each step that is not written."""
        self._before: Moment | None = None
        """The end of the last step that is written."""
        self._file: JsonLines | None = None
        self._texts: list[str] = []
        """The lines to write."""
        self.scaled = self._skipped = False
        """Whether a gradient scaler skips steps whose gradients are not finite, and has skipped one."""
        self.optimizers = 0
        """The number of optimizers whose steps are counted."""
        self.refused = False
        """Whether this rank's metrics are of no use, because another rank writes them."""

    @property
    def ended(self) -> int:
        return self.written + len(self._waiting)

    @property
    def is_writer(self) -> bool:
        """Whether this rank must write the metrics, as rank 0 or in its place."""
        return self._rank.number == 0 or self._file is not None

    def end_step(self, moment: Moment, phase: StepPhase) -> None:
        if phase == "capture":
            self._unsettle()
        self._waiting.append((moment, phase))

    def _unsettle(self) -> None:
        """Turn settling steps before another capture into warm-up, because both runs of a pair settle once.

        None of these steps is written yet.
        """
        for place, (moment, phase) in enumerate(self._waiting):
            self._waiting[place] = (moment, "warmup" if phase == "settle" else phase)

    def write(self, replays: int, *, at_end: bool = False) -> bool:
        """Make the lines of the steps whose metrics are known. Return whether the run is complete.

        Args:
            replays: the number of graph replays so far.
            at_end: whether nothing more will become known.

        Raises:
            NumericError: a number is not finite. Its step has a line.
            ProgramError: too many steps wait for their metrics, or the program numbers other steps than its optimizer's.
        """
        over, complete = at_end, self.ended >= self.last
        timed = min(self.ended, self._spec.training.steps)
        # After the last step no step is timed any more, and a later hook may never be called, so wait for numbers here.
        at_end |= complete
        while self.written < timed and (at_end or len(self._waiting) > WAIT_STEPS) and (over or self._is_final()):
            if not self._write(wait=at_end):
                break
        if self.refused or len(self._waiting) > MOST_WAITING:
            if not self._others_write():
                raise ProgramError(self.why_incomplete(replays))
            self._drop()
        if complete and (numbered := self.log.furthest + 1) >= MOST_AHEAD * self.ended:
            raise ProgramError(
                f"the program shows losses of {numbered} steps in {self.ended} steps of its optimizer, perhaps one of each "
                "micro-batch: number and log the optimizer's steps, or call launch.observe.step(loss=..., grad_norm=...) at "
                "the end of each"
            )
        return complete and (self.written == timed or self._others_write())

    def _is_final(self) -> bool:
        """Return whether no better line of the next step to write can follow, unless the program ends."""
        return self.ended > self.written + 1 or not self.log.awaits_number(self.written)

    def flush(self) -> None:
        """Write all lines at once, because each call of the file system takes time."""
        if self._file is not None and self._texts:
            self._file.write_line("\n".join(self._texts))
            self._texts.clear()

    def _drop(self) -> None:
        """Drop the steps that wait."""
        for step in range(self.written, self.ended):
            self.log.forget(step)
        self.written = self.ended
        self._waiting.clear()

    def _write(self, *, wait: bool) -> bool:
        """Write the next step. Return False if it must wait."""
        step, (moment, phase) = self.written, self._waiting[0]
        # The program may not have shown the last step yet.
        self.log.settle(max(self.ended - 1, 1))
        loss, norm = self.log.at("loss", step), self.log.at("grad_norm", step)
        if loss is None or norm is None or not (wait or (moment.ready() and loss.ready() and norm.ready())):
            return False
        self._file = self._file or self._create()
        if self._file is None:
            return False
        milliseconds = moment.milliseconds_since(self._before)
        numbers = self._applied(StepMetrics(step, loss.read(), norm.read(), milliseconds, self._tokens, phase))
        self._texts.append(numbers.line())
        self.log.forget(step)
        self._waiting.popleft()
        self._before = moment
        self.written += 1
        numbers.check()
        return True

    def _applied(self, numbers: StepMetrics) -> StepMetrics:
        """Return ``numbers`` with a norm of 0 if a gradient scaler skipped the step.

        A fused optimizer steps there too, and leaves its parameters as they are. No reading of the scaler says so here, because a
        graph may contain it. If it does not skip, the parameters become NaN, and so does the next loss.
        """
        if not self.scaled or math.isfinite(numbers.grad_norm) or not math.isfinite(numbers.loss):
            return numbers
        if not self._skipped and self._rank.recorder is not None:
            self._skipped = True
            self._rank.recorder.note(
                f"the gradient of step {numbers.step} is not finite, so the gradient scaler skips the step: the gradient norm of "
                "such steps counts as 0"
            )
        return replace(numbers, grad_norm=0.0)

    def _create(self) -> JsonLines | None:
        """Create the file of metrics if this rank writes it: rank 0, or the last rank if rank 0 has no metrics."""
        number, recorder = self._rank.number, self._rank.recorder
        last = self._spec.parallelism.world_size - 1
        if recorder is None or self.refused or (number == last > 0 and self.ended < OTHER_RANK_AFTER):
            return None
        self.refused = number not in (0, last) or not create(self._rank.attempt.metrics)
        if self.refused:
            return None
        sources: dict[str, str] = {metric: str(self.log.source(metric)) for metric in METRICS}
        choices = {**sources, **self._settings(), "steps": self._steps_from, "metrics": f"rank {number}"}
        if self.log.first_number is not None:
            choices["first_number"] = str(self.log.first_number)
        recorder.write("choices", choices=choices)
        return JsonLines(self._rank.attempt.metrics)

    def _others_write(self) -> bool:
        elsewhere = self._rank.number != 0 or self.refused or self._rank.attempt.metrics.exists()
        return self._file is None and elsewhere

    def why_incomplete(self, replays: int) -> str:
        """Return why the program's run is not complete, with the fix."""
        ended, wanted = self.ended, self.last
        if ended < wanted and replays > ended:
            return (
                f"{ended} of {wanted} optimizer steps were seen, but {replays} replays of graphs: if a graph contains the "
                "optimizer, call launch.observe.step(loss=..., grad_norm=...) at the end of each step"
            )
        if ended < wanted and self.optimizers > 1:
            return (
                f"the program ended after {ended} of {wanted} steps of its {self.optimizers} optimizers, which count as one step if "
                "they step one after another: read in its log whether it failed, else call launch.observe.step(loss=..., "
                f"grad_norm=...) at the end of each training step, and let it take {wanted} ({{steps}} in the command)"
            )
        if ended < wanted:
            return (
                f"the program ended after {ended} of {wanted} optimizer steps: read in its log why it ended, or pass it their "
                "number, as in --iters {steps}; steps that it skips, as after a NaN or by loss scaling, do not count"
            )
        for metric in METRICS:
            if self.log.source(metric) is None:
                return (
                    f"the program shows no {metric} of its {ended} steps: describe its lines in command.pattern, print it in JSON "
                    "lines, or call launch.observe.step(loss=..., grad_norm=...) at the end of each step"
                )
        missing: Metric = "loss" if self.log.at("loss", self.written) is None else "grad_norm"
        if self.written == 0 and ended > wanted:
            # As in PyTorch's example of a whole captured step.
            return (
                f"the program shows no {missing} of its first optimizer step, and took {ended} of them instead of {wanted}: if some warm "
                "up a graph, call launch.observe.step(loss=..., grad_norm=...) at the end of each training step, and earlier ones do not "
                "count"
            )
        who = "the program's logger" if self.log.source(missing) == "its logger" else "the program"
        return (
            f"{who} shows no {missing} of step {self.written} of its {ended} steps, counted from 0: log every step, or call "
            "launch.observe.step(loss=..., grad_norm=...) at the end of each step"
        )
