"""Test what is computed from a trace: how long something ran, from intervals that may overlap, and whether the host
waited in a step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._autograd import DeviceType

import launch.train.telemetry.profiler
from launch.common.merged_duration import merged_duration
from launch.contract.records.probe import PROBED_STEPS, Launches, Probe
from launch.train.telemetry.profiler import launches_of, probe, summarise

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))))


@given(INTERVALS)
def test_a_union_counts_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    assert merged_duration(intervals) == len({moment for begin, end in intervals for moment in range(begin, end)})


@dataclass(frozen=True)
class Event:
    """An event of the profiler: a call of the driver, or work of the device. Events are in the order of their numbers.

    A launch and its kernels have the same ``id``. A graph's kernels have that of the graph's launch.
    """

    number: int
    called: str
    id: int = -1
    cuda: bool = False

    def name(self) -> str:
        return self.called

    def start_ns(self) -> int:
        return self.number

    def duration_ns(self) -> int:
        return 1

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.cuda else DeviceType.CPU

    def correlation_id(self) -> int:
        return self.id


def probed(monkeypatch: pytest.MonkeyPatch, calls: Sequence[str]) -> Probe:
    """Return a trace with ``calls`` of the driver in each step, between those that the profiler itself makes."""
    called: list[str] = []
    traced: list[str] = []

    def step(batch: torch.Tensor) -> None:
        called.extend(calls)

    def trace(work: Callable[[], object]) -> Sequence[Event]:
        called.clear()
        work()
        traced.extend(["cudaDeviceSynchronize", *called, "cudaDeviceSynchronize"])
        return [Event(number, name) for number, name in enumerate(traced)]

    monkeypatch.setattr(launch.train.telemetry.profiler, "trace", trace)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return probe(step, [torch.zeros(1)] * PROBED_STEPS).probe


def test_the_host_has_a_time_of_its_own_where_it_does_not_wait_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    free = probed(monkeypatch, ["cudaLaunchKernel", "cudaEventQuery", "cudaGraphLaunch"])
    assert free.host_ms is not None and free.host_ms >= 0 and free.graph_launches == 1
    assert probed(monkeypatch, ["cudaLaunchKernel", "cudaStreamSynchronize", "cudaGraphLaunch"]).host_ms is None


def traced(*calls: tuple[str, int]) -> list[Event]:
    """Return the trace of ``calls``, each with the number of its kernels. Kernels run after all calls."""
    made = [Event(number, name, id=number) for number, (name, _) in enumerate(calls)]
    ran = [(id, f"kernel_{id}") for id, (_, kernels) in enumerate(calls) for _ in range(kernels)]
    return [*made, *(Event(100 + place, name, id, cuda=True) for place, (id, name) in enumerate(ran))]


ONE_BY_ONE = [
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernelEx",
    "cudaLaunchCooperativeKernel",
]


def test_kernels_of_graphs_are_told_from_those_that_the_host_launches_one_by_one() -> None:
    calls = [*((name, 1) for name in ONE_BY_ONE), ("cudaGraphLaunch", 3), ("cudaMemcpyAsync", 0), ("cuGraphLaunch", 2)]
    copies = [Event(900, "Memcpy HtoD (Pinned -> Device)", 6, cuda=True), Event(901, "Memset (Device)", 5, cuda=True)]
    found = summarise([*traced(*calls), *copies], 1, None)
    assert found.launches == Launches(by_graphs=5, one_by_one=5, unknown=0)
    assert found.launches.kernels == found.probe.kernels == 10 and not found.launches.mostly_one_by_one


def test_kernels_whose_launch_was_not_traced_are_unknown() -> None:
    """The launch of a kernel may precede the trace. Such kernels do not show that most are launched one by one."""
    events = traced(("cudaGraphLaunch", 1), *[("cudaLaunchKernel", 1)] * 5)
    lost = [event for event in events if event.number not in (1, 2)]
    assert launches_of(events, 2) == Launches(0.5, 2.5, 0.0) and launches_of(events, 2).mostly_one_by_one
    assert launches_of(lost, 2) == Launches(0.5, 1.5, 1.0) and not launches_of(lost, 2).mostly_one_by_one
    assert launches_of([], 3) == Launches(0.0, 0.0, 0.0) and not launches_of([], 3).mostly_one_by_one


@pytest.mark.slow
def test_a_trace_imports_nothing() -> None:
    """``torch.profiler.profile`` imports Inductor, which would take seconds of every run."""
    program = """
import sys, torch
import launch.train.telemetry.profiler as module
torch.cuda.synchronize = lambda: None
real = module.profile
module.profile = lambda **_: real(use_cpu=True, use_kineto=True)
before = set(sys.modules)
names = {event.name() for event in module.trace(lambda: torch.ones(3) + 1)}
print("aten::add" in names, sorted(set(sys.modules) - before))
"""
    shown = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert "True []" in shown.stdout
