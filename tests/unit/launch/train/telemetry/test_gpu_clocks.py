"""Test the clocks of a GPU with a library that has the layout of NVML."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.common.atomic_files import dumps
from launch.common.typed_json import from_json
from launch.contract.paths import AttemptPaths
from launch.contract.records.clocks import Clocks
from launch.train.telemetry import event_log, memory
from launch.train.telemetry import gpu_clocks as clocks
from launch.train.telemetry.gpu_clocks import Gpu, PhaseClocks, Reading, between, find_gpu

ADDRESS = "00000000:8d:00.0"
SECOND = 10**9
POWER, THERMAL, SYNC_BOOST = 74, 75, 76


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1")


def build(library: Path, *options: str) -> Path:
    source = Path(__file__).parent / "nvml.cpp"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", str(library), str(source)], check=True)
    return library


@pytest.fixture
def nvml(compiled: Path) -> Iterator[Any]:
    """Set the answers of the library, and restore them."""
    loaded = ctypes.CDLL(str(compiled))
    yield SimpleNamespace(path=str(compiled), set=functools.partial(_set, loaded))
    for name, value in (("init_code", 0), ("counter_type", 3), ("reasons_code", 0), ("limit_code", 0)):
        _set(loaded, name, value)
    for field in (POWER, THERMAL, SYNC_BOOST):
        _set(loaded, "counters", 0, field)
        _set(loaded, "counter_codes", 0, field)
    _set(loaded, "reasons", 0)
    _set(loaded, "limit_milliwatts", 700_000)


def _set(library: ctypes.CDLL, name: str, value: int, place: int | None = None) -> None:
    kind = ctypes.c_ulonglong if name in ("counters", "reasons") else ctypes.c_int
    if place is None:
        kind.in_dll(library, name).value = value
    else:
        (kind * 96).in_dll(library, name)[place] = value


def found(nvml: Any) -> Gpu:
    gpu = find_gpu(ADDRESS, nvml.path)
    assert isinstance(gpu, Gpu), gpu
    return gpu


def test_all_that_the_driver_says_is_read(nvml: Any) -> None:
    nvml.set("counters", 5 * SECOND, POWER)
    nvml.set("counters", 2**40, THERMAL)
    nvml.set("reasons", 0x01 | 0x02 | 0x04 | 0x40 | 0x100)
    reading = found(nvml).read()
    assert reading.counted == {"power_cap": 5 * SECOND, "thermal": 2**40, "sync_boost": 0}
    # Reasons for idle, application and display clocks do not count.
    assert reading.active == ("power_cap", "hardware_thermal")
    assert (reading.power_limit, reading.sm_mhz, reading.max_sm_mhz) == (700.0, 1755, 1980)


def test_what_it_does_not_say_is_left_out(nvml: Any) -> None:
    nvml.set("counter_codes", 3, THERMAL)
    nvml.set("reasons_code", 3)
    nvml.set("limit_code", 3)
    reading = found(nvml).read()
    assert reading.counted.keys() == {"power_cap", "sync_boost"}
    assert reading.active is None
    assert reading.power_limit is None


@pytest.mark.parametrize(("kind", "count"), [(1, 7), (3, 7), (0, None), (4, None)])
def test_a_counter_is_read_as_what_it_is(nvml: Any, kind: int, count: int | None) -> None:
    nvml.set("counters", 7, POWER)
    nvml.set("counter_type", kind)
    assert found(nvml).read().counted.get("power_cap") == count


def test_an_older_driver_is_asked_by_the_older_name(tmp_path: Path) -> None:
    library = build(tmp_path / "old.so", "-DBEFORE_535")
    _set(ctypes.CDLL(str(library)), "reasons", 0x20)
    gpu = find_gpu(ADDRESS, str(library))
    assert isinstance(gpu, Gpu)
    assert gpu.read().active == ("thermal",)


def test_it_is_said_why_nothing_is_known(nvml: Any, tmp_path: Path) -> None:
    assert find_gpu(ADDRESS, str(tmp_path / "none.so")) == (
        "libnvidia-ml.so.1, which is part of NVIDIA's driver, cannot be loaded"
    )
    assert find_gpu(ADDRESS, "libc.so.6") == "libnvidia-ml.so.1 is too old, or is another library"
    assert find_gpu("00000000:01:00.0", nvml.path) == "NVML says: Not Found"
    nvml.set("init_code", 4)
    assert find_gpu(ADDRESS, nvml.path) == "NVML says: Insufficient Permissions"


def reading(seconds: float, **said: Any) -> Reading:
    fields = {"counted": {}, "active": (), "power_limit": None, "sm_mhz": None, "max_sm_mhz": None} | said
    return Reading(at=int(seconds * SECOND), **fields)


def test_two_readings_say_what_lies_between_them() -> None:
    before = reading(10, counted={"power_cap": 3 * SECOND, "thermal": 0}, active=("thermal",), power_limit=700.0)
    after = reading(14, counted={"power_cap": 4 * SECOND, "sync_boost": 9}, active=("power_cap",), power_limit=500.0)
    passed = between(before, after)
    assert (passed.seconds, passed.throttled) == (4.0, {"power_cap": 1.0})
    assert passed.active == ("power_cap", "thermal")
    assert passed.power_limits == (500.0, 700.0)


def test_a_counter_that_went_back_and_flags_of_one_end_alone_say_nothing() -> None:
    before = reading(0, counted={"power_cap": 5}, active=None)
    passed = between(before, reading(1, counted={"power_cap": 4}, active=("thermal",)))
    assert passed.throttled == {}
    assert passed.active is None


class Rank:
    """A recorder of a rank on CUDA that measures the memory of this process. ``events`` are its records, as read back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
        self.events: list[dict[str, Any]] = []
        lines = SimpleNamespace(write=lambda event: self.events.append(json.loads(dumps(event))))
        cpu, sample = torch.device("cpu"), memory.sample
        monkeypatch.setattr(memory, "sample", lambda _: sample(cpu))
        monkeypatch.setattr(memory, "reset_peaks", lambda _: True)
        monkeypatch.setattr(clocks, "pci_address", lambda _: ADDRESS)
        monkeypatch.setattr(event_log, "PhaseClocks", functools.partial(PhaseClocks, library=library))
        monkeypatch.setattr(event_log, "JsonLines", lambda _: lines)
        self.recorder = event_log.Recorder(AttemptPaths(Path("run/attempts/1")), 0, torch.device("cuda", 0))

    @property
    def clocks(self) -> list[Any]:
        return [event["clocks"] for event in self.events if event["kind"] == "phase"]

    @property
    def notes(self) -> list[str]:
        return [event["message"] for event in self.events if event["kind"] == "note"]


def test_a_phase_ends_with_the_clocks_over_it(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    nvml.set("counters", 100 * SECOND, POWER)
    rank = Rank(monkeypatch, nvml.path)
    rank.recorder.enter("warmup", 0)
    nvml.set("counters", 101 * SECOND, POWER)
    rank.recorder.enter("measure", 1)
    nvml.set("counters", 103 * SECOND, POWER)
    nvml.set("reasons", 0x80)
    rank.recorder.enter("probe", 2)
    init, warmup, measure = rank.clocks
    assert init is None  # The recorder finds devices only during this phase.
    assert from_json(Clocks, warmup).throttled == {"power_cap": 1.0, "thermal": 0.0, "sync_boost": 0.0}
    assert from_json(Clocks, measure).throttled["power_cap"] == 2.0
    assert from_json(Clocks, measure).active == ("power_brake",)
    assert not rank.notes


def test_that_nothing_is_known_is_remarked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rank = Rank(monkeypatch, str(tmp_path / "none.so"))
    rank.recorder.enter("warmup", 0)
    rank.recorder.enter("measure", 1)
    assert rank.clocks == [None, None]
    (note,) = rank.notes
    assert note.startswith("GPU throttling is unknown: libnvidia-ml.so.1, ")


def test_a_gpu_of_which_nothing_is_counted_is_remarked(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    for field in (POWER, THERMAL, SYNC_BOOST):
        nvml.set("counter_codes", 3, field)
    rank = Rank(monkeypatch, nvml.path)
    rank.recorder.enter("warmup", 0)
    assert rank.notes == ["GPU throttling is unknown: NVML counts no throttling of this GPU"]


@pytest.mark.parametrize(
    "damage",
    [
        {"seconds": -1.0},
        {"throttled": {"power_cap": "NaN"}},
        {"throttled": {"gremlins": 1.0}},
        {"active": ["gremlins"]},
        {"power_limits": [True]},
        {"fans": 3},
    ],
)
def test_damaged_clocks_are_refused(damage: dict[str, Any]) -> None:
    whole = {"seconds": 1.0, "throttled": {}, "active": None, "power_limits": [], "sm_mhz": None, "max_sm_mhz": None}
    from_json(Clocks, whole)
    with pytest.raises((TypeError, ValueError)):
        from_json(Clocks, whole | damage)
