"""How a run gets the engine: what it cannot do, and packages that are missing, are said before Megatron is imported."""

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
    """The engine of ``spec`` on this rank, its weights drawn.

    Raises:
        UnsupportedError: ``spec`` asks for what this engine does not have; the message names every field at fault.
        EnvironmentFault: a package is missing, or Megatron-Core is of another release.
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
    """What is refused and what is set is what release ``INSTALLED`` was seen to need.

    Raises:
        EnvironmentFault: ``found`` is a version of another release.
    """
    if not is_installed_release(found):
        raise EnvironmentFault(f"engine megatron needs megatron-core {INSTALLED}, but {found} is installed; {INSTALL}")
