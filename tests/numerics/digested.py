"""Train with layer digests, sound or with a fault in one place, and leave the records of a run on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launch.contract.paths import AttemptPaths
from launch.contract.spec import RunSpec
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.train.data_loader import open_source
from launch.train.loop import train
from launch.train.telemetry.event_log import Recorder
from launch.train.telemetry.step_metrics import Metrics
from tests.numerics.tiny import CPU

DTYPES = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}

Fault = Callable[[TorchNativeEngine], None]


def sound(engine: TorchNativeEngine) -> None:
    pass


def trained(spec: RunSpec, root: Path, fault: Fault = sound) -> None:
    """Train on this rank as a run with its records in ``root`` does."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh, attempt = RankPlace(rank, spec.parallelism.world_size, CPU), AttemptPaths(root / "1")
    engine = TorchNativeEngine(spec, mesh)
    fault(engine)
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    recorder, metrics = Recorder(attempt, rank, CPU), Metrics(attempt, rank)
    train(spec, mesh, source, engine, recorder, metrics)
    for lines in (
        recorder._lines,
        metrics._lines,
        metrics._digest_lines,
    ):  # a run leaves them to the end of its process
        if lines:
            lines.__exit__(None, None, None)


def in_layer(engine: TorchNativeEngine, layer: int, call: int, act: Callable[[Any], Any]) -> None:
    """``act`` on what ``layer`` gives in one ``call``, which are the micro-batches of a step, and of the next."""
    calls: Iterator[int] = iter(range(1 << 30))

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        x, routed = output
        hit = next(calls) == call
        return (act(x), routed) if hit else output

    for chunk in engine.chunks:
        if str(layer) in chunk.layers:
            chunk.layers[str(layer)].register_forward_hook(hook)


def with_other_bit(x: torch.Tensor) -> torch.Tensor:
    bits = x.detach().clone().view(DTYPES[x.dtype])
    bits.flatten()[bits.numel() // 2] ^= 1
    return x + (bits.view(x.dtype) - x).detach()


class OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return with_other_bit(gradient)


def train_ranks(spec: RunSpec, root: Path, layer: int, call: int, faulty_rank: int) -> None:
    """Train a sound run, and one that has a fault on one rank."""
    trained(spec, root / "sound")
    at_fault = dist.get_rank() == faulty_rank
    trained(spec, root / "faulty", lambda e: in_layer(e, layer, call, with_other_bit) if at_fault else None)
