"""A trained engine with its first step check, and faults to plant before it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from launch.contract.records.step_check import StepCheck
from launch.contract.spec import CudaGraph, Parallelism, RunSpec
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.decoder import Layer
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.parallel.data_parallel import GradientReduction
from launch.engines.torch_native.step_check import TorchNativeStep
from launch.train.inspection import step_check
from launch.train.inspection.step_check import check_step
from tests.numerics.full_iteration_on_cpu import full_iteration_on_cpu
from tests.numerics.graphed_callables_on_cpu import graphs_on_cpu
from tests.numerics.tiny import CPU, MOE, batches, make_spec

MODEL = replace(MOE, num_layers=3, hidden_size=32, vocab_size=64)
FULL = CudaGraph("full_iteration", warmup_steps=1)
Fault = Callable[[TorchNativeEngine], AbstractContextManager[Any]]

FEW = 5
"""Micro-batches of a step in which the fourth and the fifth have faults. Small faults in 16 bits need the noise of eight."""


def spec_of(graph: CudaGraph, precision: str = "fp32", samples: int = 8) -> RunSpec:
    precisions = (
        {"precision": "bf16", "optimizer_precision": "lean"} if precision == "lean" else {"precision": precision}
    )
    spec = make_spec(MODEL, steps=4, global_batch_size=samples, sequence_length=16, learning_rate=1e-3, **precisions)
    return replace(spec, cuda_graph=graph, step_checks=2)


def engine_of(spec: RunSpec, rank: int = 0) -> TorchNativeEngine:
    with full_iteration_on_cpu():
        return TorchNativeEngine(spec, RankPlace(rank, spec.parallelism.world_size, CPU))


def train_to_first_check(spec: RunSpec, rank: int = 0) -> tuple[TorchNativeEngine, torch.Tensor]:
    engine, given = engine_of(spec, rank), batches(spec)
    for _ in range(spec.first_compared):
        engine.step(next(given))
    return engine, next(given)


def check(captured: tuple[TorchNativeEngine, torch.Tensor], fault: Fault) -> StepCheck:
    """Check a step in which only the replay has ``fault``."""
    engine, batch = captured
    runner: Any = engine._runner
    replay = runner.replay

    def faulty(batch: torch.Tensor) -> Any:
        with fault(engine):
            return replay(batch)

    with mock.patch.object(runner, "replay", faulty):
        return check_step(engine.checkable_step(), engine._step, batch)


def faults_of(found: StepCheck) -> list[str]:
    return [row.name for row in found.differences if row.is_fault] + [row.name for row in found.routing if row.is_fault]


def sum_in_halves(engine: TorchNativeEngine) -> AbstractContextManager[Any]:
    """Sum in another order, as another kernel may."""
    linear = torch.nn.functional.linear

    def in_halves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        half = weight.shape[1] // 2
        y = linear(x[..., :half], weight[:, :half]) + linear(x[..., half:], weight[:, half:])
        return y if bias is None else y + bias

    return mock.patch.object(torch.nn.functional, "linear", in_halves)


def weigh_sample(share: float) -> Fault:
    """Let one of the samples count ``share``."""

    def fault(engine: TorchNativeEngine) -> AbstractContextManager[Any]:
        accumulate, calls = engine.flat_parameters.accumulate_gradients, itertools.count()
        return mock.patch.object(
            engine.flat_parameters, "accumulate_gradients",
            lambda given, *flags: accumulate(given * share if next(calls) == 3 else given, *flags),
        )  # fmt: skip

    return fault


@contextmanager
def previous_batch(engine: TorchNativeEngine) -> Iterator[None]:
    """Do not copy the static batch."""
    batch = (engine._runner.batch + 1) % MODEL.vocab_size  # type: ignore[union-attr]
    static = mock.Mock(wraps=batch, copy_=lambda _: batch)
    with (
        mock.patch.object(engine._runner, "batch", static),
        mock.patch.object(
            engine._train_step, "forward_backward", lambda _, run=engine._train_step.forward_backward: run(batch)
        ),
    ):
        yield


@contextmanager
def overwritten_microbatch(engine: TorchNativeEngine) -> Iterator[None]:
    """Use the gradient of the previous micro-batch (pytorch/pytorch#181723)."""
    run = engine._train_step.forward_backward

    def overwrite(batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone()
        batch[4] = batch[3]
        return run(batch)

    with mock.patch.object(engine._train_step, "forward_backward", overwrite):
        yield


def other_weight(name: str, change: Callable[[torch.Tensor], object]) -> Fault:
    """Let the graph read another copy of a weight."""

    @contextmanager
    def fault(engine: TorchNativeEngine) -> Iterator[None]:
        weight = dict(engine.chunks[0].named_parameters())[name].data
        run = engine._train_step.forward_backward

        def stale(batch: torch.Tensor) -> torch.Tensor:
            kept = weight.clone()
            change(weight)
            loss = run(batch)
            weight.copy_(kept)
            return loss

        with mock.patch.object(engine._train_step, "forward_backward", stale):
            yield

    return fault


@contextmanager
def flipped_exponent_bit(engine: TorchNativeEngine) -> Iterator[None]:
    """Make one number of the input of layer 1 four times as large."""

    def flip(layer: Any, inputs: Any) -> Any:
        x = inputs[0].clone()
        x.view(-1)[5] *= 4
        return x, *inputs[1:]

    handle = engine.chunks[0].named_layers()["1"].register_forward_pre_hook(flip)
    yield
    handle.remove()


@contextmanager
def frozen_rate(engine: TorchNativeEngine) -> Iterator[None]:
    """Let the graph use the learning rate of an earlier step."""
    rate = engine._optimizer._rate
    kept = rate.clone()
    rate.mul_(1.02)
    yield
    rate.copy_(kept)


FAULTS: dict[str, tuple[Fault, str]] = {
    "a lost sample": (weigh_sample(0.0), "gradient of 0.head.weight"),
    # In bf16 the norm alone exceeds rounding on every processor.
    "a sample weighted 0.7": (weigh_sample(0.7), "gradient norm"),
    "the previous batch": (previous_batch, "gradient of 0.head.weight"),
    "an overwritten micro-batch": (overwritten_microbatch, "loss of micro-batch 4"),
    "a stale weight": (
        other_weight("layers.1.attention_norm.weight", lambda weight: weight.mul_(1.5)),
        "gradient of 0.layers.1.attention.qkv.weight",
    ),
    "a flipped exponent bit": (flipped_exponent_bit, "gradient of 0.layers.1.attention.qkv.weight"),
    "a frozen scalar": (frozen_rate, "weight of 0.layers.1.mlp.down"),
    "an expert's tokens dropped": (
        other_weight("layers.1.mlp.down", lambda weight: weight[0].zero_()),
        "gradient of 0.layers.1.mlp.router.weight",
    ),
}


def kept_by(engine: TorchNativeEngine) -> list[torch.Tensor]:
    state = (*engine.flat_parameters.stored_weights(), *engine._optimizer.state())
    return [tensor.clone() for tensor in state]


@contextmanager
def out_of_memory(place: tuple[type, str], passes: int, step: type = TorchNativeStep) -> Iterator[None]:
    """Let memory run out in one uncaptured pass, the one after ``passes``, in the fourth call of a method."""
    recompute, method = step.recompute, getattr(*place)  # type: ignore[attr-defined]
    left = iter(range(passes, -1, -1))

    def fail(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 3:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of"
            )
        return method(*arguments, **named)

    def recompute_once(self: Any, *arguments: Any) -> None:
        with mock.patch.object(*place, fail) if next(left, 1) == 0 else nullcontext():
            recompute(self, *arguments)

    calls = iter(range(1 << 30))
    with mock.patch.object(step, "recompute", recompute_once):
        yield


PLACES = {"forward": (Layer, "forward_attention"), "backward": (GradientReduction, "ready")}


def run_with_checks(spec: RunSpec, lacking: str = "") -> dict[str, Any]:
    """Return the results of a rank's run, with or without checks, and the findings of the checks. The first check lacks
    memory at ``lacking``."""
    if lacking == "rank 1":
        missing = [2**30] if dist.get_rank() == 1 else []
        with mock.patch.object(step_check, "missing_bytes", lambda *_: missing.pop() if missing else 0):
            return run_with_checks(spec)
    if lacking:
        with out_of_memory(PLACES[lacking], 0):
            return run_with_checks(spec)
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: list[StepCheck] = []
    results = []
    layers = set()
    with graphs_on_cpu():
        engine = engine_of(spec, rank)
        for step, batch in enumerate(batches(spec, spec.parallelism.rank_in("dp", rank))):
            if step in spec.checked_steps:
                found.append(check_step(engine.checkable_step(), step, batch))
                layers = {layer.name for layer in engine.checkable_step().layers()}
            result = engine.step(batch)
            results.append((result.loss.item(), result.grad_norm.item()))
        stats = engine.graph_stats()
        engine.close()
    weights = torch.cat([one.flatten().double() for one in kept_by(engine)])
    checks = [(one.step, one.tensors > 20, one.unequal, len(one.routing)) for one in found if not one.missing]
    return {"results": results, "weights": weights, "checks": checks, "proven": stats.proven, "layers": layers}


def layer_results(spec: RunSpec) -> set[str]:
    """Return the names of the outputs of layers in all micro-batches, and of their gradients."""
    numbers = range(spec.model.num_layers)
    layers = ["the embedding", *(f"decoder layer {number}" for number in numbers), "the final norm"]
    outputs = [f"output of {layer}, micro-batch {m}" for layer in layers for m in range(spec.num_microbatches)]
    return {*outputs, *(f"gradient of the {output}" for output in outputs)}


PIPELINE, ZERO = Parallelism(pp=2), Parallelism(dp=2, ep=2, distributed_optimizer=True)
