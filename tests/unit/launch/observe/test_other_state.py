"""Test the digest of what a program keeps although no optimizer steps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.launch.observe.observed import PROGRAM, observe, spec_of

NORMED = PROGRAM.replace("torch.nn.Linear(4, 2)", "torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))")
AVERAGED = (
    PROGRAM.replace("data =", "ema = torch.optim.swa_utils.AveragedModel(model)\ndata =")
    + "    ema.update_parameters(model)\n"
)
SCRATCH = PROGRAM.replace(
    "optimizer =", "model.register_buffer('scratch', torch.ones(1), persistent=False)\noptimizer ="
)
PROGRAMS = {
    "none": (PROGRAM, False),
    "running statistics": (NORMED, True),
    "frozen statistics": (NORMED.replace("    loss =", "    model.eval()\n    loss ="), False),
    "averaged weights": (AVERAGED, True),
    "weights that are averaged once": (AVERAGED.replace("    ema", "    if number == 0: ema"), False),
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
    assert names == floats.get(name, set()), found
