"""Count a program's captures, replays and compilations."""

from __future__ import annotations

import time
from types import ModuleType

from launch.contract.errors import CaptureError
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import RunSpec
from launch.observe.steps.capture_purpose import CapturePurpose, may_train
from launch.observe.steps.phase_tracker import PhaseTracker
from launch.observe.steps.readings import Counts
from launch.observe.steps.training_replays import count_training_replays
from launch.train.inspection.capture_blockers import compile_obstacle, compiled_functions

_ON_A_CPU = "compiled without CUDA graphs (CPU)"


class GraphCounter:
    """Counts a program's captures and replays. ``graphs`` counts CUDA graphs, or compiled functions if there is no GPU."""

    def __init__(self, spec: RunSpec) -> None:
        self.captures = self.graphs = 0
        self.replayed: list[int] = []
        """The numbers of the graphs that were replayed, in order, without those that :meth:`since_last_step` has returned."""
        self._taken = 0
        self._of_evaluations = 0
        """How many functions were compiled for evaluations."""
        self._begun = 0
        self._evaluations: set[int] = set()
        """The numbers of the graphs that were captured for evaluations."""
        self.purpose = CapturePurpose()
        self._spec = spec
        self._cuda = spec.placement.device == "cuda"
        self._seen = (0, 0)
        """The numbers of captures and compilations at the end of the last step."""
        self._capture_seconds = self._began = 0.0
        self.capturing = False
        """Whether a capture runs now."""

    @property
    def replays(self) -> int:
        return self._taken + len(self.replayed)

    def counts(self) -> Counts:
        return self.captures, self.replays, 0 if self._cuda else compiled_functions() - self._of_evaluations

    def hook_compilations(self, callback: ModuleType) -> None:
        """Leave out what is compiled for an evaluation. ``callback`` is Dynamo's module of callbacks."""
        begun: list[int] = []
        callback.on_compile_start(lambda *_: begun.append(compiled_functions()))

        def end(*_: object) -> None:
            compiled = compiled_functions() - begun.pop()
            if not may_train():
                self._of_evaluations += compiled

        callback.on_compile_end(end)

    def restart(self) -> None:
        """Count again from the program's beginning."""
        self.graphs, self._seen = 0, (0, 0)

    def begin_capture(self) -> int:
        """Return the number of the graph that is captured."""
        self.capturing = True
        self._began = time.monotonic()
        self._begun += 1
        if not self.purpose.may_train:
            self._evaluations.add(self._begun)
        return self._begun

    def end_capture(self, number: int, *, succeeded: bool) -> None:
        self.capturing = False
        if succeeded and number not in self._evaluations:
            self.captures += 1
            self._capture_seconds += time.monotonic() - self._began

    def since_last_step(self, counts: Counts) -> tuple[int, list[int]]:
        """Return the number of new graphs, and the numbers of the graphs replayed, in the step that ended at ``counts``.

        Leave out those of evaluations.
        """
        captures, frames = self._seen
        self._seen = counts[0], counts[2]
        replayed = self.replayed[: counts[1] - self._taken]
        # In place, because a replay in another thread may add to it.
        del self.replayed[: len(replayed)]
        self._taken += len(replayed)
        trained = [number for number in replayed if number not in self._evaluations]
        return (counts[0] - captures if self._cuda else counts[2] - frames), trained

    def stats(self, phases: PhaseTracker) -> GraphStats:
        """Return the proof of replay after the last timed step."""
        spec, training = self._spec, count_training_replays(phases.replayed, recaptured=phases.recaptures > 0)
        return GraphStats(
            impl=spec.cuda_graph.impl if spec.graphed or not self.graphs else "command",
            effective_scope=spec.cuda_graph.scope or tuple(filter(None, [spec.cuda_graph.name])),
            mechanism="" if not self.graphs else "captured by the program" if self._cuda else _ON_A_CPU,
            graphs=self.graphs,
            replays=training.replays,
            expected_replays=training.per_step * len(phases.replayed),
            recompilations=0 if self._cuda and training.steady else phases.recaptures,
            capture_seconds=self._capture_seconds,
            launches_per_step=training.per_step,
            compiled=compiled_functions(),
        )

    def fault(self, phases: PhaseTracker) -> CaptureError | None:
        """Return why a complete run does not show its graphs, or None."""
        if not self._spec.graphed or phases.phase == "measure":
            return None
        if not self.graphs and self._evaluations:
            return CaptureError(
                f"the program captured graphs only where gradients were off: it trained {phases.steps} steps eagerly"
            )
        if not self.graphs:
            what = "CUDA graph" if self._cuda else "compiled function"
            obstacle = compile_obstacle()
            advice = f". {obstacle}" if obstacle else ": check that its arguments turn graphs on"
            return CaptureError(f"the program made no {what} in {phases.steps} steps{advice}")
        what = "captured graphs" if self._cuda else "compiled functions"
        return CaptureError(
            f"the program still {what} in the last of {phases.steps} steps: give every step the same shapes (pad "
            "sequences, drop the last batch of an epoch), or train for more steps"
        )
