"""The lines of metrics.jsonl. Each step is written, in order, once its loss and gradient norm are known."""

from __future__ import annotations

import math

from launch.common.atomic_files import JsonLines
from launch.contract.errors import NumericError, ProgramError
from launch.contract.records.events import Phase
from launch.contract.records.step_metrics import StepMetrics
from launch.contract.spec import RunSpec
from launch.frameworks.command_line import observed_steps
from launch.observe.rank import Rank, create
from launch.observe.steps.metric_log import MetricLog
from launch.observe.steps.readings import Moment

WAIT_STEPS = 2
"""The number of steps that a line waits for a better source of its metrics."""
OTHER_RANK_AFTER = 8
"""After this many steps without metrics of rank 0, the last rank writes its own. Megatron logs on the last rank."""
MOST_WAITING = 10_000


class StepLines:
    """Writes the steps of a run. ``written`` counts the steps on disk. ``last`` is the number of steps that end the run."""

    def __init__(self, rank: Rank, spec: RunSpec, steps_from: str) -> None:
        self.log = MetricLog()
        self.written = 0
        self.last = observed_steps(spec)
        self._rank, self._spec, self._steps_from = rank, spec, steps_from
        self._tokens = spec.training.global_batch_size * spec.training.sequence_length
        self._ended: list[tuple[Moment, Phase]] = []
        """The end and the phase of each step."""
        self._file: JsonLines | None = None

    @property
    def ended(self) -> int:
        return len(self._ended)

    @property
    def is_writer(self) -> bool:
        """Whether this rank must write the metrics, as rank 0 or in its place."""
        return self._rank.number == 0 or self._file is not None

    def end_step(self, moment: Moment, phase: Phase) -> None:
        if phase == "capture":
            self._unsettle()
        self._ended.append((moment, phase))

    def _unsettle(self) -> None:
        """Turn settling steps before another capture into warm-up, because both runs of a pair settle once.

        None of these steps is written yet.
        """
        for place in range(self.written, self.ended):
            moment, phase = self._ended[place]
            self._ended[place] = (moment, "warmup" if phase == "settle" else phase)

    def write(self, replays: int, *, at_end: bool = False) -> bool:
        """Write the steps whose metrics are known. Return whether the run is complete.

        Args:
            replays: the number of graph replays so far.
            at_end: whether nothing more will become known.

        Raises:
            NumericError: a number is not finite. Its step is on disk.
            ProgramError: too many steps wait for their metrics.
        """
        complete = self.ended >= self.last
        timed = min(self.ended, self._spec.training.steps)
        while self.written < timed and (complete or at_end or self.ended > self.written + WAIT_STEPS):
            # No step is timed any more, and a later hook may never be called, so wait for numbers here.
            if not self._write(self.written, wait=complete or at_end):
                break
        if self.ended > self.written + MOST_WAITING:
            raise ProgramError(self.why_incomplete(replays))
        return complete and (self.written == timed or self._others_write())

    def _write(self, step: int, *, wait: bool) -> bool:
        """Write one step. Return False if it must wait."""
        loss, norm = self.log.at("loss", step), self.log.at("grad_norm", step)
        moment, phase = self._ended[step]
        if loss is None or norm is None or not (wait or (loss.ready() and norm.ready() and moment.ready())):
            return False
        file = self._file = self._file or self._create()
        if file is None:
            return False
        before = self._ended[step - 1][0] if step else None
        numbers = StepMetrics(step, loss.read(), norm.read(), moment.milliseconds_since(before), self._tokens, phase)
        file.write(numbers)
        self.log.forget(step)
        self.written += 1
        for name, value in (("loss", numbers.loss), ("grad_norm", numbers.grad_norm)):
            if not math.isfinite(value):
                raise NumericError(f"{name} is {value} at step {step} (phase {phase})")
        return True

    def _create(self) -> JsonLines | None:
        """Create the file of metrics if this rank writes it: rank 0, or the last rank if rank 0 has no metrics."""
        number, recorder = self._rank.number, self._rank.recorder
        is_last = number == self._spec.parallelism.world_size - 1 and self.ended >= OTHER_RANK_AFTER
        if recorder is None or not (number == 0 or is_last) or not create(self._rank.attempt.metrics):
            return None
        sources = {metric: str(self.log.source(metric)) for metric in ("loss", "grad_norm")}
        recorder.write("choices", choices={**sources, "steps": self._steps_from, "metrics": f"rank {number}"})
        return JsonLines(self._rank.attempt.metrics)

    def _others_write(self) -> bool:
        return self._file is None and (self._rank.number != 0 or self._rank.attempt.metrics.exists())

    def why_incomplete(self, replays: int) -> str:
        """Return why the program's run is not complete, with the fix."""
        ended, wanted = self.ended, self.last
        if ended < wanted and replays > ended:
            return (
                f"{ended} of {wanted} optimizer steps were seen, but {replays} replays of graphs: if a graph contains the "
                "optimizer, call launch.observe.step(loss=..., grad_norm=...) at the end of each step"
            )
        if ended < wanted:
            return f"the program ended after {ended} of {wanted} steps: let it take {wanted} ({{steps}} in the command)"
        for metric in ("loss", "grad_norm"):
            if self.log.source(metric) is None:
                return (
                    f"the program shows no {metric} of its {ended} steps: print it in JSON lines, or call "
                    "launch.observe.step(loss=..., grad_norm=...) at the end of each step"
                )
        return f"the program shows the loss or gradient norm of too few of its {ended} steps: log every step"
