"""The sizes of a Mamba-2 layer in a hybrid model: those of Megatron-Core's defaults, which are also those of Nemotron-H-8B.

A layer projects its input to a gate z, the input x, the states' B and C of each group, and a step size of each head. A causal
convolution runs over x, B and C, then the scan over the sequence, a gated norm and the output projection.

Sources: Dao and Gu, arXiv:2405.21060; megatron-core 0.16.1 ssm/mamba_mixer.py and transformer/transformer_config.py:846;
megatron-bridge 0.3.1 models/nemotronh/nemotron_h_provider.py (8B).
"""

from __future__ import annotations

from launch.contract.spec import Model

EXPANSION = 2
STATE = 128
HEAD = 64
GROUPS = 8
CONVOLUTION = 4
"""The tokens that the convolution sees."""
WIDTH_MULTIPLE = HEAD * GROUPS // EXPANSION
"""What must divide hidden_size, so that every group has a whole number of heads."""


def inner_width(model: Model) -> int:
    return EXPANSION * model.hidden_size


def heads(model: Model) -> int:
    return inner_width(model) // HEAD


def convolved_width(model: Model) -> int:
    """Return the channels of x, B and C."""
    return inner_width(model) + 2 * GROUPS * STATE


def projected_width(model: Model) -> int:
    """Return the channels of z, x, B, C and the step sizes."""
    return inner_width(model) + convolved_width(model) + heads(model)
