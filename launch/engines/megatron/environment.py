"""What graphs require of the environment, settled for the eager twin too, and what deterministic mode does."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Optional

from launch.errors import EnvironmentFault

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
REGISTER = "NCCL_GRAPH_REGISTER"
ALLOW = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
ALGORITHM = "NCCL_ALGO"


def expands_by(environment: Mapping[str, str]) -> Optional[str]:
    """The variable that has the allocator's segments expand; None where none has. PyTorch leaves out spaces."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower().split(","):
            return name
    return None


def settle(environment: MutableMapping[str, str], graphed: bool) -> Mapping[str, str]:
    """Keep NCCL from registering graph memory that expandable segments move (0.16.1 transformer/cuda_graphs.py:1682),
    where nobody has. To be called before communicators exist. Returns what was set, by name, and why.

    Raises:
        EnvironmentFault: a graphed run is told to register it.
    """
    expandable = expands_by(environment)
    if expandable is None:
        return {}
    given = environment.setdefault(REGISTER, "0")
    if graphed and given != "0":
        raise EnvironmentFault(
            f"{REGISTER}={given} with {expandable}={environment[expandable]}: graphs would read memory that has "
            f"moved; set {REGISTER}=0, or leave expandable_segments:True out"
        )
    return {REGISTER: f"{given}, beside {expandable}={environment[expandable]}"}


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
