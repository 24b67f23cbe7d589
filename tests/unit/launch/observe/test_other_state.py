"""Test the digest of what a program keeps although no optimizer steps it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.contract.records.state_changes import NOT_STEPPED
from launch.observe.state.parameters import longest_names, parameter_names
from tests.unit.launch.observe.observed import PROGRAM, STEPS, observe, spec_of

NORMED = PROGRAM.replace(
    "torch.nn.Linear(4, 2)", "torch.nn.Sequential(torch.nn.Linear(4, 2, False), torch.nn.BatchNorm1d(2))"
)
AVERAGED = (
    PROGRAM.replace("data =", "ema = torch.optim.swa_utils.AveragedModel(model)\ndata =")
    + "    ema.update_parameters(model)\n"
)
SCRATCH = PROGRAM.replace(
    "optimizer =", "model.register_buffer('scratch', torch.ones(1), persistent=False)\noptimizer ="
)
SLOW = PROGRAM.replace("lr=0.1", "lr=0.01")
LISTED = SLOW.replace("data =", "ema = [one.detach().clone() for one in model.parameters()]\ndata =") + (
    "    with torch.no_grad(): [one.lerp_(weight, 0.1) for one, weight in zip(ema, model.parameters())]\n"
)
RENEWED = SLOW.replace("data =", "ema = {name: one.clone() for name, one in model.state_dict().items()}\ndata =") + (
    "    ema = {name: 0.9 * ema[name] + 0.1 * one for name, one in model.state_dict().items()}\n"
)
NO_COPIES = LISTED.replace(".clone()", "").replace(
    "    with", "    gradients = [weight.grad.clone() for weight in model.parameters()] #"
)
HELD = NORMED.replace("torch.nn.Sequential(", "torch.nn.Module()\nmodel.net = torch.nn.Sequential(").replace(
    "run = torch.compile(model,", "run = model.run = torch.compile(model.net,"
).replace("else model\n", "else model.net\n")  # fmt: skip
PROGRAMS = {
    "none": (PROGRAM, False),
    "running statistics": (NORMED, True),
    "running statistics of a part that is held a second time, compiled": (HELD, True),
    "frozen statistics": (NORMED.replace("    loss =", "    model.eval()\n    loss ="), False),
    "averaged weights": (AVERAGED, True),
    "weights that are averaged once": (AVERAGED.replace("    ema", "    if number == 0: ema"), False),
    "a list of averaged weights": (LISTED, True),
    "new averaged weights in each step": (RENEWED, True),
    "lists of weights and of gradients": (NO_COPIES, False),
    "a parameter that is never updated": (
        PROGRAM.replace("    optimizer.step()", "    model.bias.grad = None\n    optimizer.step()"),
        False,
    ),
    "a buffer that no checkpoint holds": (SCRATCH.replace("    loss =", "    model.scratch += 1\n    loss ="), False),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_digest_shows_whether_state_changes_after_the_capture(tmp_path: Path, name: str) -> None:
    """It does not depend on the order of modules in memory, or on the modules of compiled code."""
    program, changes = PROGRAMS[name]
    found = []
    for compiled in (False, True):
        (event,) = observe(tmp_path / str(compiled), program, spec_of(graphed=compiled)).events("other_state")
        found.append(event["changes"])
        # A compiled program captures a step later.
        for one in event["changes"]["values"]:
            assert one.pop("change") > 0
    assert found[0] == found[1] and (found[0]["tensors"] > 0) == changes, found
    assert found[0]["unchanged"] == (["bias"] if name == "a parameter that is never updated" else []), found
    names = {one["last"]["name"] for one in found[0]["values"]}
    floats = {"running statistics": {"1.running_mean", "1.running_var"}, "averaged weights": {"weight", "bias"}}
    floats["running statistics of a part that is held a second time, compiled"] = floats["running statistics"]
    copies = {"copy of weight", "copy of bias"}
    floats |= {"a list of averaged weights": copies, "new averaged weights in each step": copies}
    assert names == floats.get(name, set()), found


STOPPING = {
    "parameters": (PROGRAM.replace("    optimizer.step()", "    if number >= 5: model.bias.grad = None\n    optimizer.step()"), {"bias"}),
    "running statistics": (NORMED.replace("    loss =", "    model[1].train(number < 5)\n    loss ="),
        {"1.running_mean", "1.running_var", "1.num_batches_tracked"}),
    "a list of averaged weights": (LISTED.replace("    with", "    if number < 5:\n     with"), {"copy of weight", "copy of bias"}),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPPING)
def test_the_digest_in_the_middle_shows_what_stops_changing_before_it(tmp_path: Path, name: str) -> None:
    program, names = STOPPING[name]
    for compiled in (False, True):
        seen = observe(tmp_path / str(compiled), program, spec_of(graphed=compiled))
        (event,) = seen.events("other_state")
        assert {*event["changes"]["unchanged"]} == {f"{one}{NOT_STEPPED * (name != 'parameters')}" for one in names}, (
            event
        )
        assert [one.step for one in seen.steps if one.phase == "check"] == [STEPS // 2]


class Wrapper(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.loss = inner, torch.nn.MSELoss()


def test_a_module_that_only_one_side_wraps_changes_no_name() -> None:
    layer, norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    for first in (layer, Wrapper(layer)):
        model = torch.nn.Sequential(first, norm)
        root = Wrapper(Wrapper(model))
        assert [*parameter_names([*root.parameters()], ()).values()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert longest_names()[id(norm), "running_var"] == "1.running_var"
        del model, root
