"""Test the perturbed run of a program: from the first compared step on, its outputs move by one unit in the last place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.launch.observe.observed import PROGRAM, observe, spec_of

AUTOCAST = PROGRAM.replace(
    "    loss = run(batch)", '    with torch.autocast("cpu", torch.bfloat16): out = run(batch)\n    loss = out'
)
HALF = AUTOCAST.replace("bfloat16", "float16")
DROPOUT = PROGRAM.replace("loss = run(batch)", "loss = torch.nn.functional.dropout(run(batch), 0.5)")
FUNCTIONAL = PROGRAM.replace("run(batch)", "torch.nn.functional.linear(batch, model.weight, model.bias)")
SATURATED = """
import math
sigmoid, softmax = torch.nn.Sigmoid(), torch.nn.Softmax(-1)
class Masked(torch.nn.Module):
    def forward(self, values): return torch.cat([values, torch.full_like(values, -math.inf)], 1)
mask = Masked()
"""
PROBABILITIES = PROGRAM.replace("optimizer =", SATURATED + "optimizer =").replace(
    "loss = run(batch).square().mean()",
    "out = run(batch)\n"
    "    loss = out.square().mean() + torch.nn.functional.binary_cross_entropy(sigmoid(out * 100), torch.ones_like(out)) / 1e3\n"
    "    loss = loss + torch.distributions.Categorical(softmax(mask(out))).entropy().mean()",
)
PER_SAMPLE = PROGRAM.replace(
    "    loss.backward()",
    "    def square(weights, row): return torch.func.functional_call(model, weights, (row,)).square().mean()\n"
    "    weights = dict(model.named_parameters())\n"
    "    found = torch.func.vmap(torch.func.grad(square), in_dims=(None, 0))(weights, batch)\n"
    "    for name, weight in weights.items(): weight.grad = found[name].mean(0)",
).replace("loss = run(batch).square().mean()", "with torch.no_grad(): loss = run(batch).square().mean()")
OUTPUT, WEIGHTS = "the output of each leaf module", "no module gave an output, so 2 weights"


@pytest.mark.parametrize(
    ("program", "compiled", "moved", "most"),
    [
        (PROGRAM, False, OUTPUT, 1e-5),
        (DROPOUT, False, OUTPUT, 1e-5),
        (AUTOCAST, False, OUTPUT, 0.05),
        (HALF, False, OUTPUT, 0.01),
        (PROBABILITIES, False, OUTPUT, 1e-4),
        (FUNCTIONAL, False, WEIGHTS, 1e-5),
        (PER_SAMPLE, False, WEIGHTS, 1e-5),
        (PROGRAM, True, WEIGHTS, 1e-5),
    ],
    ids=["modules", "dropout", "autocast", "half", "probabilities", "functions", "vmap", "compiled"],
)
def test_a_perturbed_run_shows_rounding_from_the_first_compared_step_on(
    tmp_path: Path, program: str, compiled: bool, moved: str, most: float
) -> None:
    """Its random numbers are those of the program, or dropout would make a larger difference."""
    plain = observe(tmp_path / "a", program, spec_of(), compiled=compiled)
    perturbed = observe(tmp_path / "b", program, replace(spec_of(), perturbed=True), compiled=compiled)
    first = spec_of().first_compared
    losses = [[step.loss for step in run.steps] for run in (plain, perturbed)]
    assert losses[0][:first] == losses[1][:first]
    off = [abs(one / other - 1) for one, other in zip(*losses, strict=True)][first:]
    assert 0 < max(off) < most
    (note,) = [event["message"] for event in perturbed.events("note") if "perturbed" in event["message"]]
    assert f"from step {first} on, {moved}" in note
