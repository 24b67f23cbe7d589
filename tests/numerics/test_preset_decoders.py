"""Test that the decoder of a preset has as many parameters as its sizes give, including biases, norms and sinks."""

from __future__ import annotations

import pytest
import torch

from launch.engines.torch_native.decoder import Decoder
from launch.engines.torch_native.layers.build_context import BuildContext
from tests.presets import PRESETS, parameters, preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_decoder_has_as_many_parameters_as_its_preset(name: str) -> None:
    model = preset(name)
    with torch.device("meta"):
        decoder = Decoder(BuildContext(model))
    assert sum(parameter.numel() for parameter in decoder.parameters()) == parameters(model)
