"""Repairs of known faults of Megatron-Core, by their names in a recipe (``cuda_graph.mend``).

A repair is active as long as the engine exists. launch/support/megatron.py lists the releases that have the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from launch.engines.megatron.mends.fused_gradients import gradients_added
from launch.engines.megatron.mends.local_inputs import inputs_kept
from launch.engines.megatron.mends.yarn_positions import positions_captured

MENDS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "fused_gradients": gradients_added,
    "local_inputs": inputs_kept,
    "yarn_positions": positions_captured,
}
