"""Check that captured graphs were replayed on every rank: "captured but never replayed" must not pass.

An engine counts its own replays. On CUDA the profiler, which is independent of engines, must have seen their launches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from analysis.records.run import Attempt
from launch.common.text import count
from launch.contract.graph_impls import MOE_SCOPES
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.probe import Launches, Probe
from launch.contract.spec import RunSpec

OF_DENSE_LAYERS = {"mlp"}
LAUNCHES_OF_A_REPLAY = 2
"""The most graph launches of a replay: one for the forward pass and one for the backward pass."""

NOT_PROBED = "Nsight Systems profiled the run, so the probe could not count launches; run it with profile=none"


@dataclass(frozen=True)
class Replay:
    """The proof of replay of one run.

    ``stats`` are those of the first rank without proof, or, if all have it, of the first that captured anything. ``reason`` is
    empty if replay is proven.
    """

    proven: bool
    reason: str
    stats: GraphStats
    ranks: int
    bare_ranks: int = 0
    """Ranks without a layer of the scope, which captured nothing."""
    launches_seen: float | None = None
    """Graph launches per step that the probe saw on the rank of ``stats`` if replay is proven, else None. None on a CPU."""
    compiled_only: bool = False
    """Whether the run is a user's program on a CPU, which is compiled and has nothing to replay."""
    launches: Launches | None = None
    """How the host launched the kernels of a traced step, on the rank of ``stats``; None if this is not recorded."""

    @property
    def fix(self) -> str:
        own = "; a program of your own must give all steps the same shapes and number of micro-batches"
        return f"read in the log of the graphed run why steps ran eagerly or were captured again{own * bool(self.stats.recompilations or self.stats.impl == 'command')}"

    @property
    def summary(self) -> str:
        if not self.proven:
            return f"not proven: {self.reason}"
        if self.compiled_only:
            return f"not applicable on a CPU: {count('compiled function', self.stats.graphs)}"
        calls = f"{self.stats.replays} of {self.stats.expected_replays}"
        if self.launches_seen is None:
            return f"not applicable on a CPU: {count('compiled function', self.stats.graphs)}, called {calls} times"
        launches = count("graph launch", self.launches_seen)
        said = f"proven: {count('graph', self.stats.graphs)}, {calls} replays, {launches} per step seen"
        if self.bare_ranks:
            others = f"the other {self.bare_ranks} hold" if self.bare_ranks > 1 else "the other holds"
            said = f"{said} on {self.ranks - self.bare_ranks} of {self.ranks} ranks; {others} no layer of the scope"
        elif self.ranks > 1:
            said = f"{said} on each of {self.ranks} ranks"
        return f"{said}; {describe_launches(self.launches)}" if self.launches else said


def describe_launches(launches: Launches) -> str:
    """Say how many of a step's kernels graphs launch, such as "graphs launch 3 of 412 kernels of a step"."""
    unknown = f", and the launches of {round(launches.unknown)} were not traced" if round(launches.unknown) else ""
    return f"graphs launch {round(launches.by_graphs)} of {round(launches.kernels)} kernels of a step{unknown}"


def check_replay(attempt: Attempt, spec: RunSpec) -> Replay:
    """Check on every rank that ``attempt`` replayed graphs of the implementation in ``spec``."""
    if spec.made_elsewhere:
        return Replay(False, "no log shows replays", GraphStats(spec.cuda_graph.impl), 1)
    compiled_only = spec.engine == "command" and spec.placement.device == "cpu"
    ranks, bare = spec.parallelism.world_size, _bare_ranks(attempt, spec)
    steps = int((attempt.steps.step > _capture_step(attempt)).sum())
    for rank in range(ranks):
        stats = attempt.proofs.get(rank)
        if stats is None:
            captured = attempt.captures.get(rank, GraphStats(spec.cuda_graph.impl))
            return Replay(False, f"rank {rank} ended without a proof of replay", captured, ranks)
        reason = "" if rank in bare else _doubt(stats, spec, steps, compiled_only=compiled_only)
        if not reason and spec.placement.device == "cuda":
            reason = (
                NOT_PROBED
                if spec.profile == "nsys"
                else _unseen(stats, attempt.probes.get(rank)) or _mostly_eager(attempt.launches.get(rank), spec)
            )
        if reason:
            return Replay(False, f"rank {rank}: {reason}" if ranks > 1 else reason, stats, ranks)
    shown = next(rank for rank in range(ranks) if rank not in bare)
    seen = attempt.probes[shown].graph_launches if spec.placement.device == "cuda" else None
    launches = attempt.launches.get(shown)
    return Replay(True, "", attempt.proofs[shown], ranks, len(bare), seen, compiled_only, launches)


def _capture_step(attempt: Attempt) -> int:
    captured = attempt.steps.step[attempt.steps.phase == "capture"]
    return int(captured[-1]) if len(captured) else -1


def _doubt(stats: GraphStats, spec: RunSpec, steps: int, *, compiled_only: bool) -> str:
    """Return why ``stats`` do not prove at least one replay in each of the ``steps`` after the capture, or an empty text."""
    if stats.impl != spec.cuda_graph.impl:
        return f"the engine captured with {stats.impl}, not with {spec.cuda_graph.impl}"
    if stats.graphs == 0:
        return "nothing was captured"
    if stats.recompilations and spec.engine == "command" and spec.placement.device == "cuda":
        lacking = f", and {stats.replays} of {stats.expected_replays} replays"
        captures = f"{count('capture', stats.recompilations)} after the first ones"
        return captures + lacking * (stats.replays != stats.expected_replays)
    if stats.recompilations:
        return f"{count('recompilation', stats.recompilations)} after the capture"
    if compiled_only:
        return ""
    if not stats.proven:
        return f"{stats.replays} replays, {stats.expected_replays} expected"
    if stats.replays < steps:
        return f"{stats.replays} replays in {steps} steps after the capture"
    if LAUNCHES_OF_A_REPLAY * stats.replays < stats.launches_per_step * steps:
        told = f"of {stats.launches_per_step} graph launches each"
        return f"{stats.replays} replays in {steps} steps after the capture, {told}: too few"
    return ""


def _unseen(stats: GraphStats, probe: Probe | None) -> str:
    """Return why the profiler's probe does not confirm ``stats``, or an empty text."""
    if probe is None:
        return "ended without a probe"
    seen, expected = probe.graph_launches, stats.launches_per_step
    if stats.graphs == 0:
        return f"the probe saw {seen:g} graph launches a step, although nothing was captured" if seen else ""
    if not seen > 0:
        return "not graphed: the probe saw no graph launch"
    if expected <= 0:
        return f"the engine does not report how many launches its {stats.graphs} graphs need per step"
    if not seen >= expected:
        return f"the probe saw {seen:g} graph launches a step, but {expected} were expected"
    return ""


def _mostly_eager(launches: Launches | None, spec: RunSpec) -> str:
    """Return why ``launches`` contradict a user's program that should capture the whole step, or an empty text.

    Its count of replays does not show that it captured only a trivial part. Our engines capture what they say.
    """
    whole = spec.engine == "command" and spec.cuda_graph.impl == "full_iteration"
    if not (whole and launches and launches.mostly_one_by_one):
        return ""
    return f"{describe_launches(launches)}, so most of the step is not captured (full_iteration)"


def _bare_ranks(attempt: Attempt, spec: RunSpec) -> Collection[int]:
    """Return the ranks of the pipeline stages that have no layer of the scope and captured nothing.

    All ranks of such a stage must have captured nothing, and the layout must allow a stage without layers of the scope.
    """
    if not _stages_may_be_bare(spec):
        return ()
    layout = spec.parallelism
    bare: list[int] = []
    for first in range(0, layout.world_size, layout.stage_size):
        stage = range(first, first + layout.stage_size)
        if all(_captured_nothing(attempt.proofs.get(rank), spec) for rank in stage):
            bare += stage
    return bare if len(bare) < layout.world_size else ()


def _captured_nothing(stats: GraphStats | None, spec: RunSpec) -> bool:
    """Return whether the rank reports no graphs, and nothing that contradicts this."""
    return stats is not None and stats == GraphStats(
        spec.cuda_graph.impl, stats.effective_scope, stats.mechanism, capture_seconds=stats.capture_seconds
    )


def _stages_may_be_bare(spec: RunSpec) -> bool:
    """Return whether a pipeline stage can lack the layers of the scope.

    Every ``moe_layer_freq``-th layer has experts and the others are dense, so a long enough stage has both. Every layer has
    attention.
    """
    scope, model, layout = set(spec.cuda_graph.scope), spec.model, spec.parallelism
    if not scope or not model.is_moe or not model.has_dense_layers:
        return False
    shortest = model.num_layers // (layout.pp * layout.vpp)
    return (scope <= OF_DENSE_LAYERS and shortest < 2) or (scope <= set(MOE_SCOPES) and shortest < model.moe_layer_freq)


def worst(replays: Sequence[Replay]) -> Replay:
    """Return the first replay that is not proven, else the first."""
    return min(replays, key=lambda replay: replay.proven)
