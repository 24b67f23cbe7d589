"""Train a small model on real text with fp32 AdamW and with the lean one, and print the table of docs/models.md.

    python -m benchmarks.lean_optimizer [STEPS]

STEPS is a multiple of 5, by default 2,000, which takes 13 minutes of one CPU thread. The text is the source of Python's standard library, in bytes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from launch.contract.spec import Data, Model, RunSpec, Training
from launch.engines.perturbation import next_after
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.train.data_loader import batch, open_source

MODEL = Model(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16, ffn_hidden_size=192,
    vocab_size=256,
)  # fmt: skip
SETTINGS: dict[str, Any] = {
    "precision": "bf16", "sequence_length": 128, "micro_batch_size": 8, "global_batch_size": 8, "learning_rate": 3e-3,
    "min_learning_rate": 3e-4, "learning_rate_warmup_steps": 50, "weight_decay": 0.1,
}  # fmt: skip
RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "fp32": ({}, False),
    "fp32, first weight moved": ({}, True),
    "lean": ({"optimizer_precision": "lean"}, False),
}
"""The settings of each run, and whether each element of the first weight moves by one unit in the last place before
training."""
SEEDS = (1, 2, 3)
WINDOWS = 5


def train(steps: int, seed: int, settings: dict[str, Any], moved: bool) -> torch.Tensor:
    """Return the mean loss of each window of steps, float64 (windows,)."""
    spec = RunSpec(
        model=MODEL, training=Training(steps=steps, seed=seed, **SETTINGS | settings), data=Data(kind="text")
    )
    engine = TorchNativeEngine(spec, RankPlace(0, 1, torch.device("cpu")))
    source = open_source(spec.data, MODEL.vocab_size, seed)
    if moved:
        weight = next(iter(engine.parameters())).detach()
        weight.copy_(next_after(weight))
    losses = [engine.step(batch(source, spec, step, 0)).loss.double() for step in range(steps)]
    return torch.stack(losses).view(WINDOWS, -1).mean(1)


def row(name: str, losses: torch.Tensor, reference: torch.Tensor) -> str:
    """Return a row: means over seeds, and each seed's difference from ``reference`` in the last window."""
    means = [f"{mean:.3f}" for mean in losses.mean(0)]
    differences = ", ".join(f"{one:+.3f}" for one in (losses - reference)[:, -1])
    return "| " + " | ".join([name, *means, differences if name != "fp32" else ""]) + " |"


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    torch.set_num_threads(1)
    ends = [f"steps to {steps * (number + 1) // WINDOWS:,}" for number in range(WINDOWS)]
    heads = ["optimizer", *ends, f"difference at the end, seeds {', '.join(map(str, SEEDS))}"]
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|", flush=True)
    found: dict[str, torch.Tensor] = {}
    for name, (settings, moved) in RUNS.items():
        found[name] = torch.stack([train(steps, seed, settings, moved) for seed in SEEDS])
        print(row(name, found[name], found["fp32"]), flush=True)


if __name__ == "__main__":
    main()
