"""Build the engine. Unsupported settings and missing packages raise an error before Megatron is imported."""

from __future__ import annotations

import importlib
from typing import get_args

from launch.contract.errors import EnvironmentFault
from launch.contract.spec import MegatronCore, RunSpec
from launch.engines.determinism import use_deterministic_algorithms
from launch.engines.packages import import_package
from launch.engines.protocol import Engine, RankPlace, check_supported
from launch.megatron_config.graph_config import is_release

PACKAGES = {"megatron-core": "megatron.core", "transformer-engine": "transformer_engine.pytorch"}
MAMBA_PACKAGES = {"causal-conv1d": "causal_conv1d", "mamba-ssm": "mamba_ssm", "einops": "einops"}
"""The packages of Mamba layers. The first two are compiled on a host with the GPU's compiler."""
INSTALL = "install it with pip install '.[gpu]' in a checkout"


def build(spec: RunSpec, mesh: RankPlace) -> Engine:
    """Build the engine of ``spec`` on this rank, with initial weights.

    Raises:
        UnsupportedError: the engine does not support ``spec``. The message names every field at fault.
        EnvironmentFault: a package is missing, or Megatron-Core has another release.
    """
    check_supported(spec)
    for package, module in PACKAGES.items():
        import_package(module, package, "engine megatron", INSTALL)
    for package, module in MAMBA_PACKAGES.items() if spec.model.is_hybrid else ():
        fix = f"install it with pip install --no-build-isolation {package}"
        import_package(module, package, "model.hybrid_override_pattern", fix)
    check_release(importlib.import_module("megatron.core.package_info").__version__, spec.megatron_core)
    from launch.engines.megatron.engine import MegatronEngine

    if spec.training.deterministic:
        use_deterministic_algorithms()
    return MegatronEngine(spec, mesh)


def check_release(found: str, release: MegatronCore) -> None:
    """Check that the installed Megatron-Core, version ``found``, belongs to ``release``, for which the cell was planned.

    Raises:
        EnvironmentFault: ``found`` belongs to another release.
    """
    if is_release(found, release):
        return
    known = [other for other in get_args(MegatronCore) if is_release(found, other)]
    fix = f"set megatron_core to '{known[0]}' in the recipe" if known else INSTALL
    raise EnvironmentFault(f"the run has megatron_core={release}, but megatron-core {found} is installed; {fix}")
