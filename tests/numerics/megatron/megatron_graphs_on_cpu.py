"""Run Megatron-Core's CUDA graphs without a GPU: all of its code for capture and replay runs, but graphs are imitated.

The replay of a layer's graph computes the layer again, that of a whole step computes the step again, and that of the
optimizer's graph updates again. The first replay does not repeat what the capture has computed.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from launch.contract.spec import RunSpec
from tests.numerics.megatron.megatron_on_cpu import train_megatron


class Graph:
    """An imitated graph. ``alive`` holds the graphs that were neither reset nor dropped."""

    alive: list[Graph] = []  # noqa: RUF012 - of all of them
    capturing: Graph | None = None

    def __init__(self) -> None:
        self.alive.append(self)
        self.work: Callable[[], None] = lambda: None

    def register_generator_state(self, state: Any) -> None: ...

    def replay(self) -> None:
        assert self in self.alive
        self.work()

    def reset(self) -> None:
        self.alive.remove(self)


@contextmanager
def capture(graph: Graph, **settings: Any) -> Iterator[None]:
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None


class WrittenChoices:
    """The choices of the routers of ``layers`` that an imitated graph writes, always to the tensors of its capture."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._written: list[tuple[Any, torch.Tensor]] = []

    @contextmanager
    def again(self) -> Iterator[None]:
        from launch.engines.megatron.observed_router import routers_of

        routers = [router for layer in self._layers for router in routers_of(layer)]
        kept = [each for router in routers for each in (router.experts, router.kept, router.counted)]
        before = [len(each.captured) for each in kept]
        yield
        choices = [(each, choice) for each, count in zip(kept, before, strict=True) for choice in each.captured[count:]]
        if not self._written:
            self._written.extend(choices)
        for (each, static), (_, choice) in zip(self._written, choices, strict=True):
            if static is not choice:
                static.copy_(choice)
                each.captured.pop()


OF_CUDA = {
    "CUDAGraph": Graph,
    "graph": capture,
    "is_current_stream_capturing": lambda: Graph.capturing is not None,
    "graph_pool_handle": lambda: (0, 1),
    "memory_stats": lambda: defaultdict(int),
    "empty_cache": lambda: None,
    "set_stream": lambda stream: None,
    "get_device_capability": lambda: (9, 0),
}


def refuse_to_wait() -> None:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def repeating(forward_backward: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """Let the graph that captures ``forward_backward`` compute it again, on the static batch and into the static losses."""

    def run(*, data_iterator: list[Iterator[Any]], **named: Any) -> list[torch.Tensor]:
        static = [list(iterator) for iterator in data_iterator]
        written = WrittenChoices(named["model"] if isinstance(named["model"], list) else [named["model"]])

        def compute() -> list[torch.Tensor]:
            return forward_backward(data_iterator=[iter(given) for given in static], **named)

        graph = Graph.capturing
        if graph is None:
            return compute()
        with mock.patch.object(torch.cuda, "synchronize", refuse_to_wait), written.again():
            losses = compute()
        computed = [True]

        def work() -> None:
            if not (computed and computed.pop()):
                with capture(graph), written.again():
                    values = compute()
                for loss, value in zip(losses, values, strict=True):
                    loss.copy_(value)

        graph.work = work
        return losses

    return run


READING = ("item", "tolist", "__bool__", "__float__", "__int__")


def refuse_to_read(tensor: torch.Tensor) -> None:
    refuse_to_wait()


def repeating_update(step: Callable[[], Any]) -> Callable[[], Any]:
    """Let the graph that captures an optimizer's ``step`` compute it again. What the host gave it then stays as it was."""
    optimizer: Any = step.__self__  # type: ignore[attr-defined]

    def numbers() -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if isinstance(value, (float, tuple))}
            for group in optimizer.param_groups
        ]

    def give(values: list[dict[str, Any]]) -> None:
        for group, own in zip(optimizer.param_groups, values, strict=True):
            group |= own

    def run() -> Any:
        graph = Graph.capturing
        if graph is None:
            return step()
        with mock.patch.multiple(torch.Tensor, **dict.fromkeys(READING, refuse_to_read)):
            success, norm, zeros = step()
        captured, computed = numbers(), [True]

        def work() -> None:
            if computed and computed.pop():
                return
            given = numbers()
            give(captured)
            norm.copy_(step()[1])
            give(given)

        graph.work = work
        return success, norm, zeros

    return run


def recomputing(
    layers: Sequence[Any],
    samples: Sequence[Any],
    *,
    sample_kwargs: Sequence[dict[str, Any]] = (),
    _order: Sequence[int],
    _num_layers_per_chunk: Sequence[int],
    **settings: Any,
) -> list[Callable[..., Any]]:
    """Replace Transformer Engine's ``make_graphed_callables``: order by chunk, then by micro-batch."""
    micro_batches = len(_order) // len(_num_layers_per_chunk) // 2
    assert not any(layer._forward_pre_hooks for layer in layers), "Modules must not have hooks registered"
    given, remaining, calls = iter(sample_kwargs), iter(layers), []
    for count in _num_layers_per_chunk:
        of_chunk = [next(remaining) for _ in range(count)]
        calls += [_callable(layer, set(next(given))) for _ in range(micro_batches) for layer in of_chunk]
    assert len(calls) == len(samples)
    return calls


def _callable(layer: Any, names: set[str]) -> Callable[..., Any]:
    """Accept the keywords of the capture and ignore others, as Transformer Engine's callables do."""
    from megatron.core.transformer import cuda_graphs

    graph, written = Graph(), WrittenChoices([layer])

    def call(*inputs: torch.Tensor, **named: Any) -> Any:
        graph.replay()
        taken = {name: named[name] for name in names}
        if "attention_mask" in taken:
            taken["attention_mask"] = None  # Transformer Engine needs no mask for causal attention.
        cuda_graphs._set_capture_start()
        for module in layer.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True  # as Transformer Engine 2.11 does before it captures
        with capture(graph), written.again():
            outputs = layer._te_cuda_graph_capture(*inputs, **taken)
        cuda_graphs._set_capture_end()
        return outputs

    call.reset = graph.reset  # type: ignore[attr-defined]
    return call


def create_forward(runner: Any, args: Any, kwargs: Any, outputs: Any, clone_inputs: bool) -> None:
    runner.fwd_graph = Graph()
    torch.rand(7)  # Draw numbers, as dropout does in the warm-up passes.


def create_backward(runner: Any) -> None:
    runner.bwd_graph = Graph()


def replay(runner: Any, is_first_microbatch: bool, args: Any, kwargs: Any) -> Any:
    outputs = []
    written = vars(runner).setdefault("written", WrittenChoices([runner.base_module]))

    def work() -> None:
        with capture(runner.fwd_graph), written.again():
            outputs.append(runner.record_graph_capture(args, kwargs))

    runner.fwd_graph.work = work
    runner.fwd_graph.replay()
    return outputs.pop()


@contextmanager
def graphs_on_cpu(impl: str) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core warns about missing features without Transformer Engine.
        from megatron.core import full_cuda_graph
        from megatron.core.transformer import cuda_graphs, transformer_layer

        # Import this before Transformer Engine appears to exist.
        importlib.import_module("launch.engines.megatron.engine")
        from launch.engines.megatron.release import OptimizerCudaGraphWrapper
    runner = {"create_fwd_graph": create_forward, "create_bwd_graph": create_backward, "replay_graph_capture": replay}
    wrap = full_cuda_graph.FullCudaGraphWrapper.__init__
    tracker = SimpleNamespace(is_inference_rng_tracker=True, fork=nullcontext)
    package = ModuleType("transformer_engine")
    package.pytorch = ModuleType("transformer_engine.pytorch")  # type: ignore[attr-defined]
    with ExitStack() as replaced:
        for patch in (
            mock.patch.multiple(torch.cuda, **OF_CUDA),
            mock.patch.object(full_cuda_graph, "get_all_rng_states", dict),
            mock.patch.object(
                full_cuda_graph.FullCudaGraphWrapper,
                "__init__",
                lambda wrapper, run, warmup: wrap(wrapper, repeating(run), warmup),
            ),
            mock.patch.object(cuda_graphs, "get_cuda_rng_tracker", lambda: tracker),
            mock.patch.multiple(cuda_graphs._CudaGraphRunner, **runner),
        ):
            replaced.enter_context(patch)
        if OptimizerCudaGraphWrapper is not None:
            wrap_update = OptimizerCudaGraphWrapper.__init__
            replaced.enter_context(
                mock.patch.object(
                    OptimizerCudaGraphWrapper,
                    "__init__",
                    lambda wrapper, step, warmup: wrap_update(wrapper, repeating_update(step), warmup),
                )
            )
        if impl == "transformer_engine":
            modules = {"transformer_engine": package, "transformer_engine.pytorch": package.pytorch}
            for patch in (
                mock.patch.dict(sys.modules, modules),
                mock.patch.object(cuda_graphs, "HAVE_TE_GRAPHS", True),
                mock.patch.object(cuda_graphs, "make_graphed_callables", recomputing, create=True),
                mock.patch.object(cuda_graphs, "is_te_min_version", lambda version: True),
                mock.patch.object(transformer_layer, "is_te_min_version", lambda version: True),
            ):
                replaced.enter_context(patch)
        Graph.alive.clear()
        yield


@contextmanager
def buffers_of_local_graphs() -> Iterator[None]:
    """Let Megatron-Core's own code make the graphs of layers inside :func:`graphs_on_cpu`, with its accounts of shared buffers.
    Only replays are imitated then."""
    from megatron.core.transformer import cuda_graphs

    runner = cuda_graphs._CudaGraphRunner
    own = {name: getattr(runner, name) for name in ("create_fwd_graph", "create_bwd_graph")}
    pool = dict.fromkeys(("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"), lambda *given: None)
    with graphs_on_cpu("local"), ExitStack() as replaced:
        replaced.enter_context(mock.patch.multiple(runner, **own))
        replaced.enter_context(mock.patch.multiple(torch._C, create=True, **pool))
        replaced.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: "cpu"))
        replaced.enter_context(mock.patch.object(cuda_graphs, "get_all_rng_states", dict))
        replaced.enter_context(
            mock.patch.multiple(cuda_graphs, fwd_buffer_reuse_ref_count=0, bwd_buffer_reuse_ref_count=0)
        )
        yield


def train_with_own_local_graphs(spec: RunSpec) -> dict[str, Any]:
    with buffers_of_local_graphs():
        return train_megatron(spec)


def train_graphed(spec: RunSpec) -> dict[str, Any]:
    """Return what :func:`train_megatron` returns, and the number of graphs left after the engine is closed."""
    with graphs_on_cpu(spec.cuda_graph.impl):
        return {**train_megatron(spec), "left": len(Graph.alive)}
