"""Test what is computed from a trace: how long something ran, from intervals that may overlap, and whether the host
waited in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._autograd import DeviceType

import launch.train.telemetry.profiler
from launch.common.merged_duration import merged_duration
from launch.contract.records.probe import PROBED_STEPS, Probe
from launch.train.telemetry.profiler import probe

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))))


@given(INTERVALS)
def test_a_union_counts_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    assert merged_duration(intervals) == len({moment for begin, end in intervals for moment in range(begin, end)})


@dataclass(frozen=True)
class Event:
    """A call of the driver. Calls are in the order of their numbers."""

    number: int
    called: str

    def name(self) -> str:
        return self.called

    def start_ns(self) -> int:
        return self.number

    def device_type(self) -> DeviceType:
        return DeviceType.CPU


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
