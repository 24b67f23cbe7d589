"""Spell graph settings as a release of Megatron does. No other module knows this. Pure, without torch.

Up to megatron-core 0.16 the whole step is ``cuda_graph_impl: local`` with ``cuda_graph_scope: [full_iteration]``. Since May
2026 Megatron-LM's main branch (pull request 4292) has an implementation ``full_iteration``, and names parts of layers in
``cuda_graph_modules``.
"""

from __future__ import annotations

from typing import Any, Literal

from launch.contract.spec import CudaGraph

Release = Literal["0.16", "main"]
INSTALLED: Release = "0.16"
"""The release that the engine runs on. ``export`` prints either."""


def is_installed_release(version: str) -> bool:
    """Return whether ``version`` of megatron-core belongs to the release that the engine runs on."""
    return version == INSTALLED or version.startswith(f"{INSTALLED}.")


def graph_settings(graph: CudaGraph, release: Release = "0.16") -> dict[str, Any]:
    """Return ``graph`` as fields of TransformerConfig in ``release``. An empty list of parts is the whole layer.

    Megatron must have the implementation.
    """
    impl, parts = graph.impl, list(graph.scope)
    if impl == "none":
        return {"cuda_graph_impl": "none"}
    if release == "main":
        return {"cuda_graph_impl": impl, "cuda_graph_modules": parts, "cuda_graph_warmup_steps": graph.warmup_steps}
    if impl == "full_iteration":
        impl, parts = "local", ["full_iteration"]
    return {"cuda_graph_impl": impl, "cuda_graph_scope": parts, "cuda_graph_warmup_steps": graph.warmup_steps}
