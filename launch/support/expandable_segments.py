"""Graph memory and NCCL, which registers what a captured collective reads: not beside segments that move."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from launch.contract.errors import EnvironmentFault

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
REGISTER = "NCCL_GRAPH_REGISTER"


def expandable_segments_setting(environment: Mapping[str, str]) -> str | None:
    """The variable that has the allocator's segments expand; None where none has. PyTorch leaves out spaces."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower().split(","):
            return name
    return None


def disable_nccl_graph_register(environment: MutableMapping[str, str], graphed: bool) -> Mapping[str, str]:
    """Keep NCCL from registering graph memory that expandable segments move (Megatron-Core 0.16.1
    transformer/cuda_graphs.py:1682), where nobody has: for the eager twin too, so that a pair differs in graphs alone. To be
    called before communicators exist. Returns what was set, by name, and why.

    Raises:
        EnvironmentFault: a graphed run is told to register it.
    """
    expandable = expandable_segments_setting(environment)
    if expandable is None:
        return {}
    given = environment.setdefault(REGISTER, "0")
    if graphed and given != "0":
        raise EnvironmentFault(
            f"{REGISTER}={given} with {expandable}={environment[expandable]}: graphs would read memory that has "
            f"moved; set {REGISTER}=0, or leave expandable_segments:True out"
        )
    return {REGISTER: f"{given}, beside {expandable}={environment[expandable]}"}
