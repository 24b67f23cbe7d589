"""How a run gets the engine: what it cannot do, and packages that are missing, are said before Megatron is imported."""

from __future__ import annotations

import importlib

from launch.determinism import use_deterministic_algorithms
from launch.engines.base import Engine, Mesh
from launch.errors import EnvironmentFault, UnsupportedError
from launch.parallel_dims import misfits
from launch.spec import RunSpec
from launch.support import unsupported

PACKAGES = {"megatron-core": "megatron.core", "transformer-engine": "transformer_engine.pytorch"}


def build(spec: RunSpec, mesh: Mesh) -> Engine:
    """The engine of ``spec`` on this rank, its weights drawn.

    Raises:
        UnsupportedError: ``spec`` asks for what this engine does not have; the message names every field at fault.
        EnvironmentFault: a package is missing.
    """
    if reasons := unsupported(spec):
        raise UnsupportedError("; ".join(f"{reason.message}: {reason.remedy}" for reason in reasons))
    if wrong := misfits(spec):
        raise UnsupportedError(
            f"the layout does not fit: {', '.join(wrong)}; see docs/rules.md for the way out of each"
        )
    for package, module in PACKAGES.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise EnvironmentFault(
                f"engine megatron needs the package {package}, which cannot be imported here: {error}; install it with "
                "pip install '.[gpu]' in a checkout"
            ) from error
    from launch.engines.megatron.engine import MegatronEngine

    if spec.training.deterministic:
        use_deterministic_algorithms()
    return MegatronEngine(spec, mesh)
