"""Builds the engine. Unsupported settings and missing packages raise before Megatron is imported."""

from __future__ import annotations

import importlib

from launch.contract.errors import EnvironmentFault
from launch.contract.spec import RunSpec
from launch.engines.determinism import use_deterministic_algorithms
from launch.engines.packages import import_package
from launch.engines.protocol import Engine, RankPlace, check_supported
from launch.megatron_config.graph_config import INSTALLED, is_installed_release

PACKAGES = {"megatron-core": "megatron.core", "transformer-engine": "transformer_engine.pytorch"}
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
    check_release(importlib.import_module("megatron.core.package_info").__version__)
    from launch.engines.megatron.engine import MegatronEngine

    if spec.training.deterministic:
        use_deterministic_algorithms()
    return MegatronEngine(spec, mesh)


def check_release(found: str) -> None:
    """Check the release of Megatron-Core: rules and settings here were verified with ``INSTALLED`` alone.

    Raises:
        EnvironmentFault: ``found`` belongs to another release.
    """
    if not is_installed_release(found):
        raise EnvironmentFault(f"engine megatron needs megatron-core {INSTALLED}, but {found} is installed; {INSTALL}")
