"""Test the ends of parameters of a small transformer that AdamW trains: rounding is no fault, and a late wrong gradient is one."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from analysis.pairing.parameter_ends import compare_ends
from launch.contract.records.sketch import Sketch
from launch.engines.perturbation import next_output
from launch.train.telemetry.parameter_digest import changes_since, sketch_tensors

STEPS, CAPTURED, WRONG_FROM = 60, 3, 17
FAULTS = {
    "of the opposite sign": lambda gradient, first: gradient.neg_(),
    "of an earlier step": lambda gradient, first: gradient.copy_(first),
    "zero": lambda gradient, first: gradient.zero_(),
    "half as large": lambda gradient, first: gradient.mul_(0.5),
}
SMALL = ("layer.self_attn.in_proj_bias", "layer.norm1.bias", "layer.linear2.bias")


def model_of_one_layer() -> nn.Module:
    """Return a model with a key's bias, whose gradient is only rounding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    return nn.ModuleDict({"embedding": nn.Embedding(16, 16), "layer": layer, "head": nn.Linear(16, 16)})


def train(seed: int, fault: str = "", parameter: str = "") -> Any:
    """Train with rounding errors of ``seed`` after the capture: each module's output moves by one unit in the last place."""
    model, active = model_of_one_layer(), False
    generator = torch.Generator().manual_seed(seed)

    def move(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not active or not isinstance(output, torch.Tensor):
            return output
        up = torch.rand(output.shape, generator=generator) < 0.5
        return next_output(output, torch.where(up, torch.inf, -torch.inf))

    for module in model.modules():
        module.register_forward_hook(move)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    named, first = dict(model.named_parameters()), torch.empty(0)
    begun: tuple[Sketch, ...] = ()
    for step in range(STEPS):
        active = step > CAPTURED
        if step == CAPTURED + 1:
            begun = sketch_tensors(named.items())
        tokens = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(step)).cumsum(dim=1) % 16
        hidden = model["layer"](model["embedding"](tokens[:, :-1]))  # type: ignore[index]
        loss = functional.cross_entropy(model["head"](hidden).flatten(0, 1), tokens[:, 1:].flatten())  # type: ignore[index]
        optimizer.zero_grad()
        loss.backward()
        if fault and step >= WRONG_FROM:
            gradient = named[parameter].grad
            assert gradient is not None
            first = first if len(first) else gradient.clone()
            FAULTS[fault](gradient, first)
        optimizer.step()
    ends = {(0, one.last.name): one for one in changes_since(begun, sketch_tensors(named.items()))}
    return SimpleNamespace(parameter_ends=ends)


@pytest.fixture(scope="module")
def sound() -> list[Any]:
    return [train(seed) for seed in range(6)]


def test_rounding_that_training_amplifies_is_no_fault(sound: list[Any]) -> None:
    found = [compare_ends(three, [one, two], None, None) for one, two, three in permutations(sound, 3)]
    assert len(found) == 120 and not any(one.doubt() for one in found)
    assert found[0].ends[0, "layer.self_attn.in_proj_bias"].drift > 0.01, (
        "it contains a key's bias, whose gradient is rounding"
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("parameter", SMALL)
def test_a_wrong_gradient_of_a_small_parameter_after_the_first_replays_is_found(
    sound: list[Any], fault: str, parameter: str
) -> None:
    doubt = compare_ends(train(9, fault, parameter), sound[:2], None, None).doubt()
    assert doubt and parameter in doubt.reason, doubt
