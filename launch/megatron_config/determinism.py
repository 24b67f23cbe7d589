"""What deterministic mode requires of the environment."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from launch.contract.errors import EnvironmentFault

ALLOW = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
ALGORITHM = "NCCL_ALGO"


def settle_determinism(environment: MutableMapping[str, str]) -> Mapping[str, str]:
    """Forbid Transformer Engine kernels that add in no fixed order, which Megatron-Core's deterministic mode insists on
    (0.16.1 extensions/transformer_engine.py:1254), and name NCCL's algorithm where nobody has, as Megatron-LM's does. To be
    called before layers and communicators exist. Returns what holds, by name.

    Raises:
        EnvironmentFault: Transformer Engine is told to allow them.
    """
    if environment.setdefault(ALLOW, "0") != "0":
        raise EnvironmentFault(
            f"{ALLOW}={environment[ALLOW]} with training.deterministic=true: set it to 0, leave it out, or set "
            "training.deterministic=false"
        )
    return {ALLOW: "0", ALGORITHM: environment.setdefault(ALGORITHM, "Ring")}
