"""Keep NCCL from registering graph memory that the allocator's expandable segments may move."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from launch.contract.errors import EnvironmentFault

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
REGISTER = "NCCL_GRAPH_REGISTER"


def expandable_segments_setting(environment: Mapping[str, str]) -> str | None:
    """Return the variable that turns expandable segments on, or None. PyTorch ignores spaces in it."""
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower().split(","):
            return name
    return None


def disable_nccl_graph_register(environment: MutableMapping[str, str], graphed: bool) -> Mapping[str, str]:
    """Set NCCL_GRAPH_REGISTER=0 if it is unset and segments expand (Megatron-Core 0.16.1 transformer/cuda_graphs.py:1682).

    The eager baseline gets it too, so that graphs are the only difference of a pair. Call this before communicators exist.
    Return the setting by name, with its reason.

    Raises:
        EnvironmentFault: the environment turns registration on for a graphed run.
    """
    expandable = expandable_segments_setting(environment)
    if expandable is None:
        return {}
    given = environment.setdefault(REGISTER, "0")
    if graphed and given != "0":
        raise EnvironmentFault(
            f"{REGISTER}={given} with {expandable}={environment[expandable]}: replays would read memory that has moved; set "
            f"{REGISTER}=0, or leave expandable_segments:True out"
        )
    return {REGISTER: f"{given}, beside {expandable}={environment[expandable]}"}
