"""Test that a digest of parameters shows whether an optimizer has stepped."""

from __future__ import annotations

import pytest
import torch

from launch.train.telemetry import parameter_digest
from launch.train.telemetry.parameter_digest import digest_parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_of_single_bits_change_the_digest_even_where_they_cancel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_digest, "CHUNK_ELEMENTS", 7)
    parameters = [torch.randn(5, 4).to(dtype), torch.randn(3).to(dtype)]
    before = digest_parameters(parameters)
    assert digest_parameters([each.clone() for each in parameters]) == before
    bits = parameters[0].view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    bits[0, 0] += 1
    changed = digest_parameters(parameters)
    bits[3, 1] -= 1
    assert len({before, changed, digest_parameters(parameters)}) == 3


def test_no_parameters_have_no_digest() -> None:
    assert digest_parameters([]) == ""
