"""Test training.compile=whole on a CPU: an eager run and torch_compile are the same compiled code, equal bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from launch.contract.errors import CaptureError, CompileError
from launch.contract.records.inspection import Inspection
from launch.contract.spec import CudaGraph, Model, RunSpec
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.compiled_model import compile_errors_as, forbid_compilation
from launch.engines.torch_native.engine import TorchNativeEngine, build
from launch.failures.classes import classify
from launch.train.inspection.capture_blockers import inspect
from tests.numerics.tiny import CPU, DENSE, MOE, batches, make_spec

# Dynamo asks tensors for gradients when it traces a torch.autograd.Function (PyTorch 2.13).
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

ALONE = RankPlace(0, 1, CPU)
SMALL = replace(MOE, num_layers=1)
DENSE_LAYER = replace(DENSE, num_layers=1)
WARMUP, STEPS, MICRO_BATCHES = 2, 8, 4
PLAIN = pytest.mark.usefixtures("plain_kernels")
COMPILED = CudaGraph("torch_compile", warmup_steps=WARMUP)


@pytest.fixture(autouse=True)
def compiled_afresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def whole(model: Model, graph: CudaGraph | None = None, **training: Any) -> RunSpec:
    return make_spec(model, graph=graph, **{"steps": STEPS, "compile": "whole", "deterministic": True} | training)


def compilations(engine: TorchNativeEngine, spec: RunSpec) -> list[int]:
    """Train, and count the functions that Dynamo compiles in each step."""
    counts = [counters["stats"]["unique_graphs"]]
    for tokens in batches(spec):
        engine.step(tokens)
        counts.append(counters["stats"]["unique_graphs"])
    return [after - before for before, after in pairwise(counts)]


@PLAIN
def test_an_eager_run_is_compiled_in_its_first_step_and_only_there() -> None:
    first, *later = compilations(build(whole(SMALL, steps=3), ALONE), whole(SMALL, steps=3))
    assert first > 0 and later == [0, 0]
    plain = whole(SMALL, steps=3, compile="none")
    assert compilations(build(plain, ALONE), plain) == [0, 0, 0]


@PLAIN
def test_another_shape_is_compiled_anew_and_counted() -> None:
    engine = build(whole(SMALL), ALONE)
    engine.step(torch.zeros(4, 1, 9, dtype=torch.int64))
    assert engine.graph_stats().recompilations == 0
    engine.step(torch.zeros(4, 2, 9, dtype=torch.int64))
    assert engine.graph_stats().recompilations == 1


@PLAIN
def test_nothing_is_compiled_within_a_capture() -> None:
    engine = build(whole(SMALL), ALONE)
    tokens = torch.zeros(4, 1, 9, dtype=torch.int64)
    with (
        pytest.raises(CaptureError, match="the capture needs code that the warm-up has not compiled"),
        forbid_compilation(),
    ):
        engine.step(tokens)
    engine.step(tokens)
    with forbid_compilation():
        engine.step(tokens)
    with (
        pytest.raises(CaptureError, match="the capture needs code that the warm-up has not compiled"),
        forbid_compilation(),
    ):
        engine.step(torch.zeros(4, 2, 9, dtype=torch.int64))


@PLAIN
def test_the_compiled_model_runs_compiled_while_it_is_inspected() -> None:
    engine = build(whole(SMALL), ALONE)
    batches = list(torch.randint(31, (2, MICRO_BATCHES, 1, 9)))
    engine.step(batches[0])
    assert inspect(engine.step, batches) == Inspection(())
    assert engine.graph_stats().recompilations == 0


@pytest.mark.parametrize(
    ("compile", "graph"), [("whole", CudaGraph()), ("whole", COMPILED), ("elementwise", CudaGraph())]
)
def test_failure_to_compile_names_the_setting(compile: str, graph: CudaGraph) -> None:
    engine = build(whole(DENSE_LAYER, graph, compile=compile), ALONE)
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}),
        torch._functorch.config.patch(enable_autograd_cache=False),
        pytest.raises(CompileError, match=rf"training\.compile='{compile}'.*no-such-compiler.*training\.compile=none"),
    ):
        engine.step(torch.zeros(4, 1, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    ("raised", "failure_class"),
    [
        (ImportError("/cache/ih/cihdf5.main.so: cannot read file data"), "COMPILE_CACHE"),
        (RuntimeError("C++ compile error\n\nOutput:\nfatal error: Python.h: No such file or directory"), "COMPILER"),
        (RuntimeError("something else"), "CAPTURE"),
    ],
)
def test_what_a_compiler_says_is_told_on(raised: Exception, failure_class: str) -> None:
    """Dynamo announces a backend's error in a separate line. The compiler's message follows below the command."""
    failure = torch._dynamo.exc.BackendCompilerFailed("inductor", raised, None)
    with pytest.raises(CaptureError) as told, compile_errors_as("cuda_graph.impl='torch_compile'", CaptureError):
        raise failure
    found = classify("CaptureError", str(told.value), "capture")
    assert found is not None and found.name == failure_class


def test_a_failure_in_the_capture_step_stays_the_captures() -> None:
    engine = build(whole(DENSE_LAYER, CudaGraph("torch_compile", warmup_steps=1)), ALONE)
    with torch.compiler.set_stance("force_eager"):
        engine.step(torch.zeros(4, 1, 9, dtype=torch.int64))
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}),
        torch._functorch.config.patch(enable_autograd_cache=False),
        pytest.raises(CaptureError, match=r"cuda_graph\.impl='torch_compile'.*no-such-compiler"),
    ):
        engine.step(torch.zeros(4, 1, 9, dtype=torch.int64))


def test_deterministic_compilation_times_no_kernels_against_each_other() -> None:
    build(whole(SMALL, deterministic=False), ALONE)
    assert not torch._inductor.config.deterministic
    build(whole(SMALL), ALONE)
    assert torch._inductor.config.deterministic
