"""Spell graph settings as a release of Megatron-Core does. Only this module knows these spellings. Pure, without torch."""

from __future__ import annotations

from typing import Any

from launch.contract.spec import CudaGraph, MegatronCore


def is_release(version: str, release: MegatronCore) -> bool:
    """Return whether ``version`` of megatron-core belongs to ``release``."""
    return version == release or version.startswith(f"{release}.")


def graph_settings(graph: CudaGraph, release: MegatronCore) -> dict[str, Any]:
    """Return ``graph`` as fields of TransformerConfig in ``release``. An empty list of parts means the whole layer.

    Megatron must have the implementation. In 0.16, the whole step is ``cuda_graph_impl: local`` with ``cuda_graph_scope:
    [full_iteration]``. In 0.19, ``full_iteration`` is an implementation, and ``cuda_graph_modules`` names parts of layers.
    """
    impl, parts = graph.impl, list(graph.scope)
    if impl == "none":
        return {"cuda_graph_impl": "none"}
    if release == "0.19":
        return {"cuda_graph_impl": impl, "cuda_graph_modules": parts, "cuda_graph_warmup_steps": graph.warmup_steps}
    if impl == "full_iteration":
        impl, parts = "local", ["full_iteration"]
    return {"cuda_graph_impl": impl, "cuda_graph_scope": parts, "cuda_graph_warmup_steps": graph.warmup_steps}


def optimizer_graph_settings(graph: CudaGraph, release: MegatronCore) -> dict[str, Any]:
    """Return the field of OptimizerConfig that captures the optimizer, which 0.16 lacks. It has a graph of its own."""
    return {"optimizer_cuda_graph": True} if graph.optimizer and release != "0.16" else {}
