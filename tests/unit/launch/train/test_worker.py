"""Test one rank from its settings to its teardown."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch.common.atomic_files import encode
from launch.contract.errors import EnvironmentFault
from launch.contract.paths import AttemptPaths
from launch.contract.records.memory import Memory
from launch.contract.spec import Data, Model, Parallelism, RunSpec, Training
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.failures.diagnose import Evidence, RankException, diagnose
from launch.slurm.allocation import LOOPBACK, free_port
from launch.train import worker
from launch.train.telemetry import event_log, step_metrics

SPEC = RunSpec(
    model=Model(num_layers=1),
    training=Training(steps=7, sequence_length=8, global_batch_size=1),
    data=Data(kind="synthetic"),
)


def test_results_are_on_disk_before_graphs_are_released_and_these_before_communicators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph holds the communicators that it uses, and a teardown may hang. The measurements must count nevertheless."""
    attempt, device = AttemptPaths(tmp_path / "1"), torch.device("cpu")
    order: list[str] = []

    def of_file(path: Path) -> SimpleNamespace:
        return SimpleNamespace(
            write=lambda line: order.append(" ".join(str(encode(line).get(k)) for k in ("kind", "phase")))
        )

    monkeypatch.setattr(event_log, "JsonLines", of_file)
    monkeypatch.setattr(step_metrics, "JsonLines", of_file)
    monkeypatch.setattr(TorchNativeEngine, "close", lambda engine: order.append("graphs released"))
    leave = SimpleNamespace(
        is_initialized=lambda: True, destroy_process_group=lambda: order.append("communicators gone")
    )
    monkeypatch.setattr(worker, "dist", leave)
    worker.run(SPEC, RankPlace(0, 1, device), attempt, event_log.Recorder(attempt, 0, device))
    results, teardown = order[: order.index("enter teardown")], order[order.index("enter teardown") :]
    assert sum(line.startswith("None ") for line in results) == SPEC.training.steps and "proof probe" in results
    assert teardown == ["enter teardown", "graphs released", "communicators gone", "phase teardown"]


@pytest.mark.parametrize("held", [0, 40 * 2**30])
def test_memory_that_other_processes_fill_is_not_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """Both the run and the diagnosis of its end name the other processes."""
    attempt, device = AttemptPaths(tmp_path / "1"), torch.device("cpu")
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(event_log, "JsonLines", lambda path: SimpleNamespace(write=written.append))
    monkeypatch.setattr(step_metrics, "JsonLines", lambda path: None)
    sampled = Memory(0, 0, device_outside=2**30 + held)
    monkeypatch.setattr(worker.memory, "sample", lambda device: sampled)

    def lacks_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(worker, "train", lacks_memory)
    with pytest.raises((EnvironmentFault, torch.OutOfMemoryError)) as raised:
        worker.run(SPEC, RankPlace(0, 1, device), attempt, event_log.Recorder(attempt, 0, device))
    notes = [line["message"] for line in written if line["kind"] == "note"]
    assert any("other processes held about 40.00 GiB" in note for note in notes) == bool(held)
    exception = RankException(0, 0.0, "build", type(raised.value).__name__, str(raised.value))
    ended = diagnose(Evidence("itself", 1, {0: "build"}, (exception,)))
    assert ended.failure_class == ("GPU_SHARED" if held else "CUDA_OOM")


def test_no_other_host_reaches_where_the_ranks_of_one_host_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that torch opens by itself listens on all interfaces, and anybody may write to it."""
    port, stores = free_port(), []
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **options: stores.append(options["store"])
    )
    places = [RankPlace(rank, 2, torch.device("cpu")) for rank in range(2)]
    with ThreadPoolExecutor() as ranks:
        list(ranks.map(partial(worker._set_up, replace(SPEC, parallelism=Parallelism(dp=2))), places))
    assert set(listening(port)) == {"0100007F"}
    assert len(stores) == 2


def listening(port: int) -> list[str]:
    """Return the addresses on which somebody listens at ``port``, as the kernel writes them."""
    sockets = [line.split() for table in Path("/proc/net").glob("tcp*") for line in table.read_text().splitlines()]
    places = [local.split(":") for _, local, _, state, *_ in sockets if state == "0A"]
    return [address for address, at in places if int(at, 16) == port]
