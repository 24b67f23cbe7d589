"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), also with the scaling of Llama 3 or YaRN."""

from __future__ import annotations

import math

import torch

from launch.contract.spec import Model

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, each (1 or batch, sequence, 1, kv_channels / 2), times YaRN's attention factor."""


def rotary_tables(model: Model, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
    """Return the tables of cosine and sine in ``dtype``. Position p rotates channel pair i by p times the pair's frequency.

    Angles are in float64, because float32 has an error of 0.008 radians at position 100,000.

    Args:
        positions: int64 (1 or batch, sequence).
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * rotary_frequencies(model, positions.device)
    factor = attention_factor(model)
    return (factor * angles.cos()).to(dtype).unsqueeze(2), (factor * angles.sin()).to(dtype).unsqueeze(2)


def rotary_frequencies(model: Model, device: torch.device) -> torch.Tensor:
    """Return radians per position for each channel pair, float64 (kv_channels / 2,)."""
    pairs = torch.arange(0, model.kv_channels, 2, device=device, dtype=torch.float64)
    plain = model.rotary_base ** (-pairs / model.kv_channels)
    if model.rope_scaling == "llama3":
        return _llama3(model, plain)
    if model.rope_scaling == "yarn":
        return _yarn(model, plain)
    return plain


def attention_factor(model: Model) -> float:
    """Return YaRN's factor on queries and keys: 0.1 ln(factor) + 1 (Peng et al., arXiv:2309.00071, equation 22)."""
    if model.rope_scaling != "yarn" or model.rope_scaling_factor <= 1:
        return 1.0
    return 0.1 * math.log(model.rope_scaling_factor) + 1.0


def _llama3(model: Model, plain: torch.Tensor) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between: float64 (kv_channels / 2,) -> the same.

    This is ``apply_scaling`` of meta-llama/llama-models, models/llama3/model.py.
    """
    turns = model.rope_original_max_position * plain / (2 * math.pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / model.rope_scaling_factor)


def _yarn(model: Model, plain: torch.Tensor) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, with a ramp over the pair's index between them.

    float64 (kv_channels / 2,) -> the same. arXiv:2309.00071, section 3.2; transformers' ``_compute_yarn_parameters``.
    """
    first, last = _pair_with_rotations(model, model.rope_beta_fast), _pair_with_rotations(model, model.rope_beta_slow)
    if model.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, model.kv_channels - 1.0)
    index = torch.arange(len(plain), device=plain.device, dtype=torch.float64)
    slowed = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    return plain * (slowed / model.rope_scaling_factor + (1 - slowed))


def _pair_with_rotations(model: Model, rotations: float) -> float:
    """Return the fractional index of the channel pair that makes ``rotations`` rotations within the original length."""
    length = model.rope_original_max_position / (rotations * 2 * math.pi)
    return model.kv_channels * math.log(length) / (2 * math.log(model.rotary_base))
