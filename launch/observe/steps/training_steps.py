"""The program's training steps, from what hooks have read: their ends, phases and metrics, and the records that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from launch.contract.errors import ProgramError
from launch.contract.metric_names import Column, names_evaluation
from launch.contract.plan import MINIMUM_STEPS
from launch.contract.records.events import StepPhase
from launch.contract.records.sketch import Sketch, StepSketch
from launch.contract.records.step_metrics import Metric
from launch.contract.spec import RunSpec
from launch.observe.description.used_settings import UsedSettings
from launch.observe.rank import Rank
from launch.observe.state.optimizers import Optimizers, identity
from launch.observe.steps.graph_counter import GraphCounter
from launch.observe.steps.inspected_steps import InspectedSteps
from launch.observe.steps.metric_log import Later, Source, columns_in_line, split_lines
from launch.observe.steps.own_time import OwnTime
from launch.observe.steps.perturbation import Perturbation
from launch.observe.steps.phase_tracker import PhaseTracker
from launch.observe.steps.readings import Ended, Moment
from launch.observe.steps.step_groups import StepGroups
from launch.observe.steps.step_lines import StepLines
from launch.train.telemetry.event_log import Recorder
from launch.train.telemetry.profiler import StepsTrace

SKETCHED_STEPS = 16
"""Gradients of later steps are not sketched, no matter when the program captures. Long eager runs sketch all these steps, because a
graphed run may capture in any of them. Short ones have too few steps to time fewer of them."""
MOST_CONTRADICTIONS = 1
"""The number of contradictions to accept. A summary at the end may differ from the last step's loss."""


class TrainingSteps:
    """Follows the steps. Hooks call nothing of it in timed steps but by the backlog."""

    def __init__(self, rank: Rank, spec: RunSpec, graphs: GraphCounter, used: UsedSettings) -> None:
        self._rank, self._spec, self._graphs = rank, spec, graphs
        self.optimizers = Optimizers()
        self.used = used
        self.own_time = OwnTime()
        self._perturbation = Perturbation(self.optimizers)
        self._moment: Moment | None = None
        """When the last optimizer stepped."""
        self._trace: StepsTrace | None = None
        self._inspected: InspectedSteps | None = None
        self._latest: dict[int, tuple[Sketch, ...]] = {}
        """The last sketch of each optimizer, by its id."""
        self.announced = False
        """Whether the program announces its steps itself."""
        self._start_counting("optimizer steps")

    def _start_counting(self, steps_from: str) -> None:
        self.phases = PhaseTracker(self._spec.graphed, self._spec.cuda_graph.warmup_steps)
        self.groups = StepGroups()
        self._said: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What the program said since an optimizer's step that may have ended a training step."""
        self.lines = StepLines(self._rank, self._spec, steps_from, self._settings)
        self._graphs.restart()

    def announce(self) -> None:
        """Count from the beginning again, by the steps that the program announces.

        Raises:
            ProgramError: its first steps were counted by its optimizers and are written.
        """
        if self.lines.written and not self.lines.refused:
            raise ProgramError(
                "launch.observe.step was not called in the first steps: call it at the end of every step"
            )
        self._rank.begin(self.phases.phase)
        self.announced = True
        self.used.announce()
        self._start_counting("launch.observe.step")
        if self._rank.recorder is not None:
            self._rank.recorder.write("announced")
            # An optimizer may have stepped several times, to warm up or within the step that ends now.
            for gradients in self._latest.values():
                self._rank.recorder.write("gradients", sketch=StepSketch(0, gradients))
        self._latest.clear()

    @property
    def timed(self) -> bool:
        return self.phases.phase == "measure" and not (self._rank.done or self._sketches)

    @property
    def _sketches(self) -> bool:
        """Return whether gradients of the current step are sketched."""
        spec, phases = self._spec, self.phases
        long = not spec.graphed and spec.training.steps >= MINIMUM_STEPS
        return phases.steps < SKETCHED_STEPS and (long or phases.phase != "measure")

    @property
    def left(self) -> int:
        """Return the number of steps until the state is digested, in the middle or after the last timed step."""
        ended, middle = self.phases.steps, self._spec.middle
        return (middle if ended < middle else self._spec.training.steps) - ended

    @property
    def shows_norm(self) -> bool:
        """Return whether the program shows a gradient norm, so that the observer computes none."""
        return self.lines.log.source("grad_norm") not in (None, "computed by the observer")

    @property
    def wants_text(self) -> bool:
        """Return whether no source better than printed lines is known."""
        unused = self._rank.silent or self._rank.done or self.lines.refused
        return not unused and (self.lines.log.wants("loss", "printed") or self.lines.log.wants("grad_norm", "printed"))

    # --- metrics -----------------------------------------------------------------------------------------------------

    def take(self, source: Source, said: Mapping[Column, float]) -> None:
        """Take what the program logged after a step.

        Raises:
            ProgramError: it contradicts itself.
        """
        if said.keys() & {"loss", "grad_norm"}:
            self._hold(self._take, source, said)

    def _take(self, source: Source, said: Mapping[Column, float]) -> None:
        log = self.lines.log
        if self._rank.done:
            return
        log.say(source, said, self.lines.ended)
        if len(log.contradictions) > MOST_CONTRADICTIONS:
            raise ProgramError(
                f"the program prints {' and '.join(log.contradictions.values())}: describe the line that counts in "
                "command.pattern, or call launch.observe.step(loss=..., grad_norm=...) at the end of each step"
            )
        if not (self.timed and self.left > 0):
            self.write()

    def take_printed(self, text: str, rest: list[str]) -> None:
        """Take printed text after ``rest``, which becomes the incomplete last line."""
        lines, rest[0] = split_lines(text, rest[0])
        for line in lines:
            self.take("printed", columns_in_line(line, self._spec.command.pattern))

    def take_shown(self, title: str, text: str) -> None:
        """Take the ``text`` that the program lets a progress bar with this ``title`` show."""
        if not names_evaluation(title):
            self.take("printed", columns_in_line(text))

    def take_number(self, metric: Metric, source: Source, number: Later, to_sum: bool) -> None:
        self._hold(self._take_number, metric, source, number, to_sum)

    def _take_number(self, metric: Metric, source: Source, number: Later, to_sum: bool) -> None:
        log = self.lines.log
        (log.add_to if to_sum else log.add)(metric, source, self.lines.ended, number)

    def _hold(self, call: Callable[..., None], *arguments: Any) -> None:
        """Make ``call`` once it is known how many steps had ended when the program said this: now, or at the next step."""
        if self.groups.is_undecided:
            self._said.append((call, arguments))
        else:
            call(*arguments)

    def _release(self) -> None:
        said, self._said = self._said, []
        for call, arguments in said:
            call(*arguments)

    def sketch(self, optimizer: torch.optim.Optimizer) -> None:
        """Sketch the gradients of ``optimizer`` in the first steps."""
        recorder = self._rank.recorder
        if recorder is None or not self._sketches:
            return
        try:
            # The times of measured steps include their sketches.
            with recorder.excluding(seconds=self.phases.phase != "measure"):
                gradients = self.optimizers.sketch(optimizer)
            step = self.lines.ended + self.groups.steps_again(identity(optimizer))
            recorder.write("gradients", sketch=StepSketch(step, gradients))
            if not self.announced:
                self._latest[id(optimizer)] = gradients
        except (RuntimeError, TypeError, NotImplementedError) as error:
            recorder.note(f"gradients have no sketch, so those of the first replays are not compared: {error}")

    # --- ends of steps -----------------------------------------------------------------------------------------------

    def end_optimizer(self, optimizer: int, ended: Ended) -> None:
        """End an optimizer's step, and the training step that ends with it or before it."""
        late, ends = self.groups.stepped(optimizer)
        if late and self._moment is not None:
            self._end(self._moment)
        self._release()
        self._moment = Moment(*ended)
        if ends:
            self._end(self._moment)

    def end(self, ended: Ended) -> None:
        self._end(Moment(*ended))

    def _end(self, moment: Moment) -> None:
        recorder, spec, phases = self._rank.recorder, self._spec, self.phases
        if recorder is None or self._rank.done:
            return
        graphs, replayed = self._graphs.since_last_step(moment.counts)
        # Sketches slow a step down, and the digest in the middle the step after it. So speeds leave these steps out.
        slowed = self._sketches or phases.steps == spec.middle
        phase = phases.end_step(graphs, replayed)
        self.own_time.end_step(moment.own_seconds, timed=phase == "measure" and not slowed)
        if phase != "measure" or not spec.graphed:
            self._graphs.graphs += graphs
        self.lines.end_step(moment, "check" if phase == "measure" and slowed else phase)
        self._note_settings(phase)
        if spec.perturbed:
            self._perturb(recorder)
        if phases.steps == spec.training.steps:
            self._prove(recorder)
        elif phases.steps < spec.training.steps:
            if phases.phase == "settle" != phase:
                self.optimizers.write_parameters(recorder)
            elif phases.phase == "settle":
                # A step later, because a program may average its weights after what ends its step.
                self.optimizers.digest_other_state(recorder, phases.steps)
            elif phases.phase == "measure" and phases.steps == spec.middle:
                self.optimizers.digest_middle(recorder)
            recorder.enter(phases.phase, phases.steps)
        elif self._inspected is not None:
            self._inspected.end_step()
        self.write()

    def _note_settings(self, phase: StepPhase) -> None:
        """Note the settings of the first step. Timed steps pay for no hook that is only needed to describe the program."""
        self.optimizers.note_settings()
        if self.announced:
            self.used.batches.end_step()
        if phase == "measure":
            self.used.unhook()

    def _settings(self) -> Mapping[str, str]:
        """Return what the program has used in the first steps."""
        return self.optimizers.describe() | self.used.describe()

    def _perturb(self, recorder: Recorder) -> None:
        """Begin to perturb if the perturbed step comes next. After this step, note what was moved."""
        first = self._spec.first_compared
        if self.phases.steps == first:
            self._perturbation.begin()
        elif self.phases.steps == first + 1:
            recorder.note(f"perturbed: from step {first} on, {self._perturbation.end_first_step()}")

    def _prove(self, recorder: Recorder) -> None:
        """Write the proof of replay after the last timed step, and begin profiling."""
        recorder.enter("probe", self.phases.steps)
        self.optimizers.write_parameters(recorder, at_end=True)
        self.optimizers.write_changes(recorder, self.phases.steps)
        recorder.write("proof", graphs=self._graphs.stats(self.phases))
        self._rank.write_imports()
        self._rank.write_changed_settings()
        if cost := self.own_time.describe():
            recorder.note(cost)
        if self._spec.inspect:
            self._inspected = InspectedSteps(recorder, self._spec.placement.device)
        elif self._spec.placement.device == "cuda":
            self._trace = StepsTrace()

    def write(self, *, at_end: bool = False) -> None:
        """Make the line of each step whose metrics are known. After the last step, complete the run's records."""
        rank, recorder = self._rank, self._rank.recorder
        if recorder is None or rank.done:
            return
        self.lines.scaled = self.used.scaled
        self.lines.optimizers = 0 if self.announced else len(self.optimizers.seen)
        if not self.lines.write(self._graphs.replays, at_end=at_end):
            return
        if self._trace is not None:
            recorder.write("probe", **vars(self._trace.end(self.lines.last - self._spec.training.steps)))
        if fault := self._graphs.fault(self.phases):
            rank.fail(fault)
        else:
            recorder.enter("teardown", self.phases.steps)
        rank.done = True

    def write_rest(self) -> None:
        """Write the steps that still wait, because no later step will follow.

        Raises:
            NumericError: a number is not finite.
            ProgramError: steps or their metrics are missing.
        """
        # An optimizer may have skipped the last step.
        if self.groups.is_open and self._moment is not None and not self.announced:
            self._end(self._moment)
        self._release()
        self.write(at_end=True)
        if not self._rank.done and self.lines.is_writer:
            raise ProgramError(self.lines.why_incomplete(self._graphs.replays))
