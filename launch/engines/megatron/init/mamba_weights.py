"""The parameters of Megatron-Core's Mamba-2 layers: their names here, and initial weights with Megatron's distributions.

torch_native has no such layers. As for its own parameters, a value depends on the seed and the parameter's name alone. Projections
and norms are drawn as those of other layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from launch.contract.mamba_sizes import CONVOLUTION
from launch.engines.torch_native.init.initial_weights import generator_of

MAMBA_PARAMETERS: Mapping[str, str] = {
    "mixer.in_proj.layer_norm_weight": "mamba.input_norm.weight",
    "mixer.in_proj.weight": "mamba.input.weight",
    "mixer.conv1d.weight": "mamba.convolution.weight",
    "mixer.conv1d.bias": "mamba.convolution.bias",
    "mixer.conv1d_weight": "mamba.convolution.weight",
    "mixer.conv1d_bias": "mamba.convolution.bias",
    "mixer.dt_bias": "mamba.step_size.bias",
    "mixer.A_log": "mamba.decay",
    "mixer.D": "mamba.skip",
    "mixer.norm.weight": "mamba.inner_norm.weight",
    "mixer.out_proj.weight": "mamba.output.weight",
}
"""Names of 0.16.1 and 0.19.2, which differ for the convolution, with this engine's names for the same."""


def _step_size_bias(uniform: torch.Tensor) -> torch.Tensor:
    """Return the numbers whose softplus is log-uniform between 0.001 and 0.1."""
    sizes = torch.exp(uniform * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    return sizes + torch.log(-torch.expm1(-sizes))


_FROM_UNIFORM: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mamba.convolution.weight": lambda uniform: (2 * uniform - 1) / math.sqrt(CONVOLUTION),
    "mamba.convolution.bias": lambda uniform: (2 * uniform - 1) / math.sqrt(CONVOLUTION),
    "mamba.step_size.bias": _step_size_bias,
    "mamba.decay": lambda uniform: torch.log(1 + 15 * uniform),
    "mamba.skip": torch.ones_like,
}
"""Initial weights from uniform numbers in [0, 1) (megatron-core 0.16.1 ssm/mamba_mixer.py:252-310)."""


def mamba_weights(name: str, shape: Sequence[int], seed: int, device: torch.device) -> torch.Tensor | None:
    """Return the parameter ``name`` in float32 of ``shape``; None if it is drawn as other layers' parameters are."""
    make = next((make for end, make in _FROM_UNIFORM.items() if name.endswith(end)), None)
    if make is None:
        return None
    return make(torch.rand(shape, generator=generator_of(seed, name, device), device=device, dtype=torch.float32))
