"""An engine's counts of its graphs: the evidence of capture and replay."""

from __future__ import annotations

from dataclasses import dataclass

from launch.common.typed_json import Amount


@dataclass(frozen=True)
class GraphStats:
    """An engine's counts of its graphs.

    ``replays`` counts replays since the capture. ``expected_replays`` is the count if every step after the capture runs from
    graphs. For torch_compile on a CPU, a "graph" is a compiled frame and a "replay" is one execution of it.
    """

    impl: str
    effective_scope: tuple[str, ...] = ()
    mechanism: str = ""
    """The mechanism in words, such as "compiled without CUDA graphs (CPU)"."""
    graphs: int = 0
    replays: int = 0
    expected_replays: int = 0
    recompilations: int = 0
    """How often torch_compile, or ``training.compile: whole`` in an eager run, recompiled the model."""
    capture_seconds: Amount = 0.0
    launches_per_step: int = 0
    """CUDA graph launches per step if all captured parts run from graphs; 0 without graphs."""
    compiled: int = 0
    """How many functions of a user's program torch.compile compiled, in eager runs too."""

    @property
    def proven(self) -> bool:
        return self.graphs > 0 and self.replays == self.expected_replays > 0 and self.recompilations == 0
