"""The graph implementations, one row each, and the parts of a layer that each scope contains.

A new implementation is a row here, its name in ``launch.contract.spec.GraphImpl``, and a class in each engine that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from launch.contract.spec import EngineName, GraphImpl

SCOPE_PARTS: Mapping[str, frozenset[str]] = {
    "attn": frozenset({"attention"}),
    "mlp": frozenset({"mlp"}),
    "moe": frozenset({"router", "preprocessing", "experts"}),
    "moe_router": frozenset({"router"}),
    "moe_preprocess": frozenset({"preprocessing"}),
    "mamba": frozenset({"mamba"}),
}
"""The parts of a layer that each scope contains (docs/graphs.md)."""

GRAPH_SCOPES = tuple(SCOPE_PARTS)
SCOPE_SETS = tuple(parts for size in range(len(GRAPH_SCOPES) + 1) for parts in combinations(GRAPH_SCOPES, size))
"""Every set of scopes, the smaller sets first."""
MOE_SCOPES = tuple(name for name, parts in SCOPE_PARTS.items() if parts <= SCOPE_PARTS["moe"])

Extent = Literal["nothing", "layers", "model", "step"]
"""What is captured: parts of layers (named by ``cuda_graph.scope``), the model and its loss, or the whole step."""


@dataclass(frozen=True)
class GraphImplementation:
    """The properties of an implementation that are the same in every engine."""

    engines: tuple[EngineName, ...]
    extent: Extent
    mechanism: str
    """A description for the documentation. Records have the engine's own description (GraphStats.mechanism)."""
    needs_cuda: bool = True
    compiles: bool = False
    """Whether Inductor compiles model and loss as one function."""
    least_warmup_steps: int = 0
    """Above 0 if communicators must exist before the capture."""
    captures_in_first_step: bool = False
    """Whether it captures at the end of the first step. All others capture in the first step after the warm-up."""
    splits_layers: bool = True
    """Whether only the parts in the scope are captured. Otherwise the scope selects layers, and each is captured whole."""
    optimizer_engines: tuple[EngineName, ...] = ()
    """The engines whose graph can also contain gradient clipping and the optimizer."""

    @property
    def takes_scope(self) -> bool:
        return self.extent == "layers"

    @property
    def takes_whole_model(self) -> bool:
        return self.extent in ("model", "step")


GRAPH_IMPLS: Mapping[GraphImpl, GraphImplementation] = {
    "none": GraphImplementation(("torch_native", "megatron", "command"), "nothing", "eager", needs_cuda=False),
    "torch_compile": GraphImplementation(
        ("torch_native", "command"), "model", "torch.compile(mode='reduce-overhead') of model and loss; on a CPU without graphs",
        needs_cuda=False, compiles=True,
    ),
    "torch": GraphImplementation(("torch_native",), "layers", "torch.cuda.make_graphed_callables"),
    "transformer_engine": GraphImplementation(
        ("torch_native", "megatron", "command"), "layers", "transformer_engine.pytorch.make_graphed_callables", least_warmup_steps=1
    ),
    "local": GraphImplementation(
        ("megatron", "command"), "layers", "Megatron-Core's CudaGraphManager", captures_in_first_step=True, splits_layers=False
    ),
    "full_iteration": GraphImplementation(
        ("torch_native", "megatron", "command"), "step", "torch.cuda.graph around a step's forward and backward passes",
        least_warmup_steps=1, optimizer_engines=("torch_native", "megatron"),
    ),
    "command": GraphImplementation(("command",), "step", "what the program captures itself", needs_cuda=False),
}  # fmt: skip

UNKNOWN = GraphImplementation((), "nothing", "unknown")
"""The row for an unknown name. With it, the rest of a recipe with a typing error can still be checked."""
