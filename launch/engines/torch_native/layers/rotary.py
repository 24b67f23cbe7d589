"""Rotary positions (Su et al., 2021, arXiv:2104.09864), as they are, and stretched as Llama 3 and YaRN do it."""

from __future__ import annotations

import math

import torch

from launch.contract.spec import Model

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, each of shape (1 or batch, sequence, 1, kv_channels / 2), times YaRN's attention factor."""


def rotary_tables(model: Model, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
    """Position p turns pair i by p times its frequency.

    Angles are computed in float64: at position 100,000 float32 is off by 0.008 radians.

    Args:
        positions: int64 of shape (1 or batch, sequence).
    """
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies(model, positions.device)
    factor = attention_factor(model)
    return (factor * angles.cos()).to(dtype).unsqueeze(2), (factor * angles.sin()).to(dtype).unsqueeze(2)


def frequencies(model: Model, device: torch.device) -> torch.Tensor:
    """Radians a position of each pair, float64 of shape (kv_channels / 2,)."""
    pairs = torch.arange(0, model.kv_channels, 2, device=device, dtype=torch.float64)
    plain = model.rotary_base ** (-pairs / model.kv_channels)
    if model.rope_scaling == "llama3":
        return _llama3(model, plain)
    if model.rope_scaling == "yarn":
        return _yarn(model, plain)
    return plain


def attention_factor(model: Model) -> float:
    """What YaRN multiplies queries and keys by, each: 0.1 ln(factor) + 1 (Peng et al., arXiv:2309.00071, equation 22)."""
    if model.rope_scaling != "yarn" or model.rope_scaling_factor <= 1:
        return 1.0
    return 0.1 * math.log(model.rope_scaling_factor) + 1.0


def _llama3(model: Model, plain: torch.Tensor) -> torch.Tensor:
    """Slow pairs are slowed down by the factor, fast ones kept, those between interpolated (meta-llama/llama-models,
    models/llama3/model.py, ``apply_scaling``)."""
    turns = model.rope_original_max_position * plain / (2 * math.pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / model.rope_scaling_factor)


def _yarn(model: Model, plain: torch.Tensor) -> torch.Tensor:
    """Pairs that turn often within the original length are kept, those that hardly turn are slowed down by the factor,
    and in between a ramp over the pair's index (arXiv:2309.00071, section 3.2; transformers'
    ``_compute_yarn_parameters``)."""
    first, last = _pair_turning(model, model.rope_beta_fast), _pair_turning(model, model.rope_beta_slow)
    if model.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, model.kv_channels - 1.0)
    index = torch.arange(len(plain), device=plain.device, dtype=torch.float64)
    slowed = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    return plain * (slowed / model.rope_scaling_factor + (1 - slowed))


def _pair_turning(model: Model, times: float) -> float:
    """The index, as a real number, of the pair that turns so many times within the original length."""
    length = model.rope_original_max_position / (times * 2 * math.pi)
    return model.kv_channels * math.log(length) / (2 * math.log(model.rotary_base))
