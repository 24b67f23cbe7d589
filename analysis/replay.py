"""Did what was captured run? Evidence from every rank, so that "captured but never replayed" cannot pass as success."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.load import Attempt
from launch.record import GraphStats
from launch.spec import RunSpec


@dataclass(frozen=True)
class Replay:
    """One run's proof of replay. ``stats`` is the rank's that says least for it; ``reason`` is empty where proven."""

    proven: bool
    reason: str
    stats: GraphStats
    ranks: int

    @property
    def summary(self) -> str:
        if not self.proven:
            return f"not proven: {self.reason}"
        graphs = f"{self.stats.graphs} graph{'s' if self.stats.graphs != 1 else ''}"
        ranks = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        return f"proven: {graphs}, {self.stats.replays} of {self.stats.expected_replays} replays{ranks}"


def prove(attempt: Attempt, spec: RunSpec) -> Replay:
    """The proof that ``attempt`` ran from its graphs: every rank must give it, for the implementation asked for."""
    ranks = spec.parallelism.world_size
    nothing = GraphStats(spec.cuda_graph.impl)
    for rank in range(ranks):
        stats = attempt.proofs.get(rank)
        if stats is None:
            captured = attempt.captures.get(rank, nothing)
            return Replay(False, f"rank {rank} ended without giving proof", captured, ranks)
        reason = _doubt(stats, spec, int((attempt.steps.step > _capture_step(attempt)).sum()))
        if reason:
            return Replay(False, f"rank {rank}: {reason}" if ranks > 1 else reason, stats, ranks)
    return Replay(True, "", attempt.proofs[0], ranks)


def _capture_step(attempt: Attempt) -> int:
    captured = attempt.steps.step[attempt.steps.phase == "capture"]
    return int(captured[-1]) if len(captured) else -1


def _doubt(stats: GraphStats, spec: RunSpec, steps: int) -> str:
    """What speaks against ``stats``, given ``steps`` after the capture: each takes one replay or more."""
    if stats.impl != spec.cuda_graph.impl:
        return f"the engine captured with {stats.impl}, not with {spec.cuda_graph.impl}"
    if stats.graphs == 0:
        return "nothing was captured"
    if stats.recompilations:
        return f"{stats.recompilations} recompilations after the capture"
    if not stats.proven:
        return f"{stats.replays} replays where {stats.expected_replays} were expected"
    if stats.replays < steps:
        return f"{stats.replays} replays in {steps} steps after the capture"
    return ""


def worst(replays: Sequence[Replay]) -> Replay:
    """The first that is not proven, else the first."""
    return min(replays, key=lambda replay: replay.proven)
