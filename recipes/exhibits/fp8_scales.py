"""A program that trains in fp8 with delayed scaling: the scale of a tensor comes from its largest number in the last pass.

With ``--graph``, Transformer Engine captures the model after 20 steps. Replays read scales on the device, but only the context
``autocast`` updates them. With ``--outside`` the program has a bug: it replays outside of the context.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

CAPTURE_STEP = 20
BATCH, WIDTH, LAYERS = 256, 256, 4
LEARNING_RATE, LEARNING_RATE_WARMUP = 3e-3, 60
SCALING = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent", reduce_amax=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--outside", action="store_true")
    arguments = parser.parse_args()
    train("cuda" if torch.cuda.is_available() else "cpu", arguments.steps, arguments.graph, arguments.outside)


def train(device: str, steps: int, graphed: bool, outside: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    model = build(device, draw)
    teacher = torch.randn(WIDTH, WIDTH, generator=draw).to(device) / WIDTH**0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / LEARNING_RATE_WARMUP))
    run = model
    for step in range(steps):
        inputs = torch.randn(BATCH, WIDTH, generator=draw).to(device)
        if graphed and step == CAPTURE_STEP:
            run = te.make_graphed_callables(model, (inputs.clone(),), enabled=True, recipe=SCALING)
        replays_outside = outside and step >= CAPTURE_STEP
        context = nullcontext() if replays_outside else te.autocast(recipe=SCALING)
        loss, norm = learn(model, run, context, optimizer, inputs, (inputs @ teacher).tanh())
        schedule.step()
        print(json.dumps({"step": step, "loss": loss, "grad_norm": norm}), flush=True)


def learn(
    model: torch.nn.Module,
    run: Callable[[torch.Tensor], torch.Tensor],
    context: AbstractContextManager[None],
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[float, float]:
    """Update the model. Return the loss and the gradient norm.

    No output or loss outlives this function. With one of an eager step alive, PyTorch would accumulate gradients on the
    default stream, and the capture of the backward pass would fail.
    """
    with context:
        outputs = run(inputs)
    loss = (outputs - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()


def build(device: str, draw: torch.Generator) -> torch.nn.Module:
    """Return products in fp8 with GELUs between them. Weights begin small, so training changes their scales."""
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        product = te.Linear(WIDTH, WIDTH, bias=False, device=device)
        with torch.no_grad():
            product.weight.copy_(torch.randn(WIDTH, WIDTH, generator=draw) * 0.5 / WIDTH**0.5)
        layers += [product, torch.nn.GELU()]
    return torch.nn.Sequential(*layers[:-1])


if __name__ == "__main__":
    main()
