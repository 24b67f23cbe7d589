"""Adapters for the differences between releases of Megatron-Core. The installed release determines which one is used."""

from __future__ import annotations

from megatron.core.package_info import __version__

from launch.megatron_config.graph_config import is_release

if is_release(__version__, "0.16"):
    from launch.engines.megatron.release.megatron_0_16 import (
        OptimizerCudaGraphWrapper,
        cut_for_context_parallelism,
        has_captured,
    )
else:
    from launch.engines.megatron.release.megatron_0_19 import (
        OptimizerCudaGraphWrapper,
        cut_for_context_parallelism,
        has_captured,
    )

__all__ = ["OptimizerCudaGraphWrapper", "cut_for_context_parallelism", "has_captured"]
