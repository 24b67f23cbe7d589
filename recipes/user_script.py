"""An ordinary training program that knows nothing of this project. recipes/user_script.yaml runs it.

With ``--graph`` it captures forward and backward pass by hand on a GPU, and compiles the model on a CPU. With
``--stale-inputs`` it has a bug of many graphed programs: it copies no new batch into the graph's inputs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch

WARMUP_STEPS = 3
BATCH, WIDTH, LAYERS = 64, 256, 24


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--stale-inputs", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        train("cpu", arguments.steps, arguments.stale_inputs, compiled=arguments.graph, graphed=False)
        return
    # Use one stream for warm-up and capture, because autograd accumulates gradients on the stream of their first use.
    with torch.cuda.stream(torch.cuda.Stream()):
        train("cuda", arguments.steps, arguments.stale_inputs, compiled=False, graphed=arguments.graph)


def train(device: str, steps: int, stale: bool, *, compiled: bool, graphed: bool) -> None:
    blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, 1)).to(device)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.empty(BATCH, WIDTH, device=device), torch.empty(BATCH, 1, device=device)

    def compute() -> torch.Tensor:
        loss = (run(inputs) - targets).square().mean()
        loss.backward()
        return loss

    compute_step = compute
    batches = torch.Generator().manual_seed(1)
    for step in range(steps):
        batch = torch.randn(BATCH, WIDTH, generator=batches)
        if step <= WARMUP_STEPS or not stale:
            inputs.copy_(batch)
            targets.copy_(batch[:, :1].tanh())
        optimizer.zero_grad(set_to_none=False)
        if graphed and step == WARMUP_STEPS:
            compute_step = capture(compute)
        loss = compute_step()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(json.dumps({"step": step, "loss": loss.item(), "grad_norm": norm.item()}), flush=True)


def capture(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture ``compute`` on the current stream. Return a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        loss = compute()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


if __name__ == "__main__":
    main()
