"""Set the environment that deterministic training needs."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from launch.contract.errors import EnvironmentFault

ALLOW = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
ALGORITHM = "NCCL_ALGO"


PROGRAM_VARIABLES = {ALLOW: "0", ALGORITHM: "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The variables of a program that trains with Megatron's deterministic mode. Megatron Bridge 0.6.2 ends without the second;
Megatron-LM sets all three itself since 0.19 (megatron/training/determinism.py)."""


def settle_determinism(environment: MutableMapping[str, str]) -> Mapping[str, str]:
    """Forbid Transformer Engine kernels that add in no fixed order, and set NCCL's algorithm if it is unset.

    Megatron-Core's deterministic mode requires the first (0.16.1 extensions/transformer_engine.py:1254), and Megatron-LM sets
    the second. Call this before layers and communicators exist. Return the settings by name.

    Raises:
        EnvironmentFault: the environment allows such kernels.
    """
    if environment.setdefault(ALLOW, "0") != "0":
        raise EnvironmentFault(
            f"{ALLOW}={environment[ALLOW]} with training.deterministic=true: set it to 0, leave it out, or set "
            "training.deterministic=false"
        )
    return {ALLOW: "0", ALGORITHM: environment.setdefault(ALGORITHM, "Ring")}
