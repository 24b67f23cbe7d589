"""Test the tracker as a process, with the real wandb offline. wandb's own reader reads what it has delivered."""

from __future__ import annotations

import dataclasses
import http.server
import itertools
import json
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from analysis.curves.run_file import read_run
from analysis.report.write_report import write_report
from launch.common.atomic_files import JsonLines, parse_json, read_json, write_json
from launch.common.regular_file import AppendedLines
from launch.common.typed_json import from_json
from launch.contract.model_flops import flops_per_token
from launch.contract.outcomes import Outcome, OutcomeName, outcome_to_json
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.records.events import Phase
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.memory import Memory
from launch.contract.records.step_check import StepCheck, TensorDifference
from launch.contract.records.step_metrics import StepMetrics, step_from_json
from launch.contract.spec import CudaGraph, Device, Parallelism, Placement, RunSpec, spec_to_json
from launch.track.__main__ import deliver
from launch.track.attempt_content import median_step_time, step_row
from launch.track.settings import TrackSettings
from launch.track.weights_and_biases import sweep_token, why_offline
from tests.records import read_metrics, write_sweep

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = TrackSettings(project="graphs", group="tiny_moe", tags=("cpu", "smoke"))
KEY = "0123456789abcdef0123456789abcdef01234567"
UNREACHABLE = "http://127.0.0.1:9"
EAGER = RunSpec()
GRAPHED = RunSpec(cuda_graph=CudaGraph(impl="torch_compile"), step_checks=3)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    return begin(tmp_path / "sweep", GRAPHED)


def begin(sweep: Path, spec: RunSpec) -> AttemptPaths:
    run = SweepPaths(sweep).run(spec.run_id)
    write_json(run.spec, spec_to_json(spec))
    return run.attempt(1)


def step_metrics(step: int) -> StepMetrics:
    """Return metrics whose digits float32 or rounding would lose. The third step diverges."""
    loss, grad_norm = (math.nan, math.inf) if step == 2 else (5 - step / 3, 1.1 * step)
    phase: Phase = "warmup" if step == 0 else "measure"
    return StepMetrics(step=step, loss=loss, grad_norm=grad_norm, step_time_ms=10.0 + step, tokens=64, phase=phase)


def write_steps(attempt: AttemptPaths, steps: range) -> None:
    with JsonLines(attempt.metrics) as lines:
        for step in steps:
            lines.write(dataclasses.asdict(step_metrics(step)))


def write_outcome(attempt: AttemptPaths, name: OutcomeName = "COMPLETED", failure_class: str = "") -> None:
    outcome = Outcome(name, "teardown", "local", 0.0, 1.0, failure_class=failure_class)
    write_json(attempt.outcome, outcome_to_json(attempt, outcome))


def start(attempt: AttemptPaths, settings: TrackSettings = SETTINGS, **environ: str) -> subprocess.Popen[str]:
    return start_on(attempt.root, attempt.spec.parents[3], settings, **environ)


def start_on(folder: Path, home: Path, settings: TrackSettings = SETTINGS, **environ: str) -> subprocess.Popen[str]:
    """Start a tracker whose environment has no W&B setting or key except ``environ``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NETRC"))}
    words = [str(folder), "--settings", json.dumps(dataclasses.asdict(settings))]
    return subprocess.Popen(
        [sys.executable, "-m", "launch.track", *words],
        env=inherited | {"HOME": str(home), "PYTHONPATH": str(ROOT)} | environ,
        cwd=home,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(tracker: subprocess.Popen[str]) -> list[str]:
    """Wait until a tracker ends with exit code 0, and return the lines of its output."""
    said = tracker.stdout.read() if tracker.stdout else ""
    assert tracker.wait(timeout=120) == 0, said
    if tracker.stdin:
        tracker.stdin.close()
    if tracker.stdout:
        tracker.stdout.close()
    return said.splitlines()


def offline_files(attempt: AttemptPaths) -> list[Path]:
    return sorted(SweepPaths(attempt.root.parents[3]).tracking.glob("wandb/offline-run-*/run-*.wandb"))


def wandb_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of an offline file, as wandb's own reader prints them for ``wandb leet inspect --json``."""
    wandb = find_spec("wandb")
    assert wandb and wandb.origin
    reader = [Path(wandb.origin).parent / "bin" / "wandb-core", "leet", "inspect", "--no-observability", "--json"]
    where = ["--run-file", file, file.parent.parent]
    printed = subprocess.run([*reader, *where], capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def history(records: list[dict[str, Any]]) -> dict[int, StepMetrics]:
    """Return the steps of ``records`` by W&B's own step. Its reader returns non-finite numbers as strings."""
    names = [field.name for field in dataclasses.fields(StepMetrics)]
    steps = {}
    for item in (record["history"]["item"] for record in records if record["type"] == "history"):
        milliseconds = item["step_time_ms" if item["phase"] == "measure" else f"{item['phase']}_step_time_ms"]
        numbers = {key: float(item[key]) for key in ("loss", "grad_norm")} | {"step_time_ms": float(milliseconds)}
        steps[item["_step"]] = StepMetrics(**{name: item[name] for name in names if name in item} | numbers)
    return steps


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for record in records:
        if record["type"] == "summary":
            merged |= record["summary"]["update"]
    return merged


def write_checks(attempt: AttemptPaths) -> None:
    """Write three checks: one that finds rounding, one without memory, and one that finds a fault."""
    rounding = TensorDifference("gradient of head.weight", 1e-6, noise=1e-6)
    fault = dataclasses.replace(rounding, difference=8e-6)
    checks = (StepCheck(4, 40, 1, (rounding,)), StepCheck(5, missing=1), StepCheck(6, 40, 2, (fault, rounding)))
    stats = GraphStats("torch_compile", graphs=2, replays=40, capture_seconds=7.5)
    memory = {"build": Memory(0, 2 << 30), "measure": Memory(0, 0, peak_reserved=3 << 30, device_outside=1 << 29)}
    with JsonLines(attempt.events(0)) as lines:
        for check in checks:
            lines.write({"kind": "step_check", "step": check.step, "check": check})
        for phase, sample in memory.items():
            lines.write({"kind": "phase", "phase": phase, "memory": dataclasses.asdict(sample)})
        lines.write({"kind": "proof", "graphs": dataclasses.asdict(stats)})


def test_a_finished_attempt_is_delivered_whole(attempt: AttemptPaths) -> None:
    write_steps(attempt, range(6))
    write_checks(attempt)
    write_json(attempt.environment, {"hardware": {"gpus": ["GPU of the test"] * 2}})
    write_outcome(attempt)
    said = finish(start(attempt))

    assert [line for line in said if "offline" in line] == said and len(said) == 1
    [file] = offline_files(attempt)
    tracking = SweepPaths(attempt.root.parents[3]).tracking
    assert {path for path in tracking.rglob("*") if path.is_file()} == {file, tracking / "id"}, "its logs are gone"
    records = wandb_records(file)
    assert repr(history(records)) == repr({step.step: step for step in read_metrics(attempt)})
    curve = read_run(file).steps
    shown = list(zip(curve.step.tolist(), curve.loss.tolist(), curve.grad_norm.tolist(), strict=True))
    assert repr(shown) == repr([(one.step, one.loss, one.grad_norm) for one in read_metrics(attempt)])

    run = next(record["run"] for record in records if record["type"] == "run")
    config = run["config"]["update"]
    assert {key: config[key] for key in spec_to_json(GRAPHED)} == spec_to_json(GRAPHED)
    assert (config["run_id"], config["workload_id"], config["attempt"]) == (GRAPHED.run_id, GRAPHED.workload_id, 1)
    assert (run["run_group"], run["job_type"], run["project"]) == ("tiny_moe", "graphed", "graphs")
    last = [record["run"] for record in records if record["type"] == "run"][-1]
    assert last["tags"] == ["cpu", "smoke", "torch_native", "one rank", "torch_compile", "GPU of the test"]
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    assert {metric.get("glob_name"): metric.get("step_metric") for metric in metrics}["*"] == "step"

    ended = summary(records)
    assert (ended["outcome"], ended["phase"], ended["failure_class"]) == ("COMPLETED", "teardown", "")
    assert ended["median_step_time_ms"] == 13.0
    assert (ended["step_checks"], ended["step_check_faults"]) == (2, 1)
    assert ended["step_check_largest_difference"] == pytest.approx(8.0)
    assert (ended["peak_memory_gib/build"], ended["peak_memory_gib/measure"]) == (2.0, 3.5)
    assert (ended["graphs"], ended["replays"], ended["capture_seconds"]) == (2, 40, 7.5)
    assert records[-1]["exit"]["exit_code"] == 0


def test_a_failed_eager_run_is_shown_as_failed(tmp_path: Path) -> None:
    attempt = begin(tmp_path / "sweep", EAGER)
    write_outcome(attempt, "CUDA_OOM", failure_class="cuda_out_of_memory")
    finish(start(attempt))

    [file] = offline_files(attempt)
    records = wandb_records(file)
    assert summary(records)["failure_class"] == "cuda_out_of_memory"
    assert next(record["run"]["job_type"] for record in records if record["type"] == "run") == "eager"
    assert records[-1]["exit"]["exit_code"] == 1


def test_only_timed_steps_have_a_step_time() -> None:
    """A capture takes a thousand times as long. On a common axis, all other steps would be a flat line."""
    step = {"step": 4, "loss": 1.0, "grad_norm": 1.0, "step_time_ms": 2000.0, "tokens": 64, "phase": "capture"}
    capture, timed = (step_row(step | {"phase": phase}, ranks=4, flops=0) for phase in ("capture", "measure"))
    assert (capture["capture_step_time_ms"], timed["step_time_ms"]) == (2000.0, 2000.0)
    assert "step_time_ms" not in capture and timed["tokens_per_second_per_rank"] == 8.0


@pytest.mark.parametrize(("device", "shown"), [("cuda", True), ("cpu", False)])
def test_a_gpu_has_model_operations_per_second(tmp_path: Path, device: Device, shown: bool) -> None:
    attempt = begin(
        tmp_path, RunSpec(parallelism=Parallelism(dp=2), placement=Placement(device=device, ranks_per_node=2))
    )
    write_steps(attempt, range(3))
    write_outcome(attempt)
    sink = Mock()
    deliver(attempt, [sink])
    rows = [call.args[0] for call in sink.log.call_args_list]
    name = "model_tflops_per_second_per_gpu"
    assert [name in row for row in rows] == [False, shown, shown]
    if shown:
        tokens = EAGER.training.global_batch_size * EAGER.training.sequence_length
        operations = flops_per_token(EAGER.model, EAGER.training.sequence_length) * tokens
        assert rows[1][name] == pytest.approx(operations / 2 / 11e-3 / 1e12), "two ranks share a step of 11 ms"


def test_a_resumed_run_continues_its_run(attempt: AttemptPaths) -> None:
    write_steps(attempt, range(2))
    write_outcome(attempt, "PREEMPTED")
    finish(start(attempt))
    again = SweepPaths(attempt.root.parents[3]).run(GRAPHED.run_id).attempt(2)
    write_steps(again, range(5))
    write_outcome(again)
    finish(start(again))
    [file] = offline_files(attempt)
    records = wandb_records(file)
    assert list(history(records)) == [0, 1, 2, 3, 4]
    assert {record["history"]["item"]["attempt"] for record in records if record["type"] == "history"} == {2}


def test_the_report_becomes_a_run_of_its_own(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "sweeps" / "mine", steps=120)
    write_report(sweep)
    for _ in range(2):
        said = finish(start_on(sweep.root, tmp_path))
        assert len(said) == 2 and "wandb sync" in said[0] and "run report again after the upload" in said[1]
    [file] = sweep.tracking.glob("wandb/offline-run-*/run-analysis-*.wandb")
    records = wandb_records(file)
    assert next(record["run"] for record in records if record["type"] == "run")["job_type"] == "analysis"
    report = read_json(sweep.report / "report.json")
    (table,) = file.parent.glob("files/media/table/verdicts*.json")
    rows = {row[0]: row for row in read_json(table)["data"]}
    found = summary(records)
    assert found["headline"] == report["summary"]["headline"]
    for cell in report["cells"]:
        name = cell["name"]
        assert rows[name][2:4] == [cell["outcome"], cell["verdict"] and cell["verdict"]["verdict"]]
        assert found[f"{name}/outcome"] == cell["outcome"]
        if cell["speed"]:
            assert found[f"{name}/speedup"] == pytest.approx(cell["speed"]["ratio"])
    assert any(cell["speed"] and cell["verdict"] for cell in report["cells"])
    artifacts = [record["artifact"] for record in records if record["type"] == "artifact"]
    contents = {item["path"]: Path(item["local_path"]) for found in artifacts for item in found["manifest"]["contents"]}
    assert contents["report.html"].read_bytes() == (sweep.report / "report.html").read_bytes()
    assert all(path.is_relative_to(sweep.tracking) for path in contents.values()), "an upload finds them there"


class Graphql(http.server.BaseHTTPRequestHandler):
    """Answer wandb's API. It knows every run except those with "gone" in their name, and each has a loss in its
    summary."""

    summaries: ClassVar[dict[str, Any]] = {}

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        query, variables = asked["query"], asked.get("variables") or {}
        answer: dict[str, Any] = {"viewer": {"id": "me", "entity": "me", "username": "me", "flags": "{}"}}
        if "upsertBucket" in query:
            self.summaries[variables["id"]] = json.loads(variables["summaryMetrics"])
            answer = {"upsertBucket": {"bucket": {"id": variables["id"]}}}
        elif "query Run(" in query:
            name = variables["name"]
            run = {"projectId": 1, "id": name, "name": name, "state": "finished", "tags": [], "config": "{}"}
            run |= {"systemMetrics": "{}", "summaryMetrics": '{"loss": 1.5}'}
            answer = {"project": {"run": None if "gone" in name else run}}
        content = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


ADD_VERDICTS = """
import json, sys
from launch.track.published_report import add_verdicts
add_verdicts("me/graphs", "token", json.load(sys.stdin), print)
"""


@pytest.mark.parametrize("server", [Graphql], indirect=True)
def test_what_the_report_says_of_a_cell_joins_the_summary_of_its_runs(server: str, tmp_path: Path) -> None:
    verdict, speed = {"verdict": "BITWISE"}, {"ratio": 1.25, "low": 1.2, "high": 1.3, "verdict": "FASTER"}
    cell = {"name": "A1", "label": "torch", "outcome": "COMPLETED", "verdict": verdict, "speed": speed}
    runs = {"memory": {"peak": 3 << 30}, "runs": [{"run_id": "one"}, {"run_id": "gone"}]}
    names = {"WANDB_BASE_URL": server, "WANDB_API_KEY": KEY, "HOME": str(tmp_path), "WANDB_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ADD_VERDICTS],
        input=json.dumps({"cells": [cell | runs]}),
        env=os.environ | names | {"WANDB_ERROR_REPORTING": "false"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    said = "1 of 2 runs have their verdict in W&B (Could not find run"
    assert done.stdout.startswith(said) and "the W&B run named analysis has all verdicts" in done.stdout, done.stderr
    assert Graphql.summaries == {
        "one-token": {
            "loss": 1.5, "report/cell": "A1", "report/label": "torch", "report/outcome": "COMPLETED",
            "report/verdict": "BITWISE", "report/speedup": 1.25, "report/speedup_low": 1.2, "report/speedup_high": 1.3,
            "report/speed_verdict": "FASTER", "report/peak_memory_gib": 3.0,
        }
    }  # fmt: skip


def test_event_files_of_tensorboard_hold_every_step(attempt: AttemptPaths) -> None:
    write_steps(attempt, range(6))
    write_outcome(attempt)
    for _ in range(2):
        finish(start(attempt, dataclasses.replace(SETTINGS, tensorboard=True, mode="disabled")))
    folder = SweepPaths(attempt.root.parents[3]).tracking / "tensorboard" / GRAPHED.run_id / "1"
    found = EventAccumulator(str(folder)).Reload()
    losses = [(scalar.step, scalar.value) for scalar in found.Scalars("loss")]
    assert repr(losses) == repr(
        [(s.step, struct.unpack("f", struct.pack("f", s.loss))[0]) for s in map(step_metrics, range(6))]
    )
    assert [scalar.step for scalar in found.Scalars("step_time_ms")] == [1, 2, 3, 4, 5]
    assert found.Scalars("summary/median_step_time_ms")[0].value == 13.0


def test_a_killed_tracker_harms_nothing_and_a_second_one_delivers_all(attempt: AttemptPaths) -> None:
    killed = threading.Event()

    def grow() -> None:
        for step in itertools.count():
            write_steps(attempt, range(step, step + 1))
            if killed.wait(0.05):
                break
        write_steps(attempt, range(step + 1, step + 20))
        write_outcome(attempt)

    writer = threading.Thread(target=grow)
    writer.start()
    first = start(attempt)
    wait_for(lambda: bool(offline_files(attempt)))
    time.sleep(1.3)  # The tracker reads once a second. Now it holds steps that wandb has not written yet.
    first.send_signal(signal.SIGKILL)
    first.communicate()
    [cut_short] = offline_files(attempt)

    second = start(attempt)
    killed.set()
    writer.join()
    finish(second)
    [file] = offline_files(attempt)
    assert file.name == cut_short.name and file != cut_short
    written = [metrics.step for metrics in read_metrics(attempt)]
    assert written == list(range(len(written)))
    assert list(history(wandb_records(file))) == written
    assert sorted(path.name for path in attempt.root.iterdir()) == ["metrics.jsonl", "outcome.json"]


def test_a_dead_supervisor_ends_the_tracker_with_what_is_on_disk(attempt: AttemptPaths) -> None:
    write_steps(attempt, range(4))
    tracker = start(attempt)
    wait_for(lambda: bool(offline_files(attempt)))
    assert tracker.poll() is None and tracker.stdin is not None
    tracker.stdin.close()
    finish(tracker)

    [file] = offline_files(attempt)
    records = wandb_records(file)
    assert list(history(records)) == [0, 1, 2, 3]
    assert "outcome" not in summary(records)


def test_an_unreachable_server_means_offline_and_the_key_reaches_no_file(attempt: AttemptPaths) -> None:
    write_steps(attempt, range(2))
    write_outcome(attempt)
    said = finish(start(attempt, WANDB_API_KEY=KEY, WANDB_BASE_URL=UNREACHABLE))

    assert len(said) == 1 and "offline" in said[0] and UNREACHABLE in said[0] and KEY not in said[0]
    assert len(offline_files(attempt)) == 1
    files = [path for path in attempt.spec.parents[3].rglob("*") if path.is_file()]
    assert files and not [path for path in files if KEY.encode() in path.read_bytes()]


def test_a_secret_in_a_variable_of_wandb_reaches_no_file(attempt: AttemptPaths) -> None:
    (said,) = finish(start(attempt, HF_TOKEN=KEY, WANDB_TAGS=f"x,{KEY}"))
    assert "WANDB_TAGS holds the value of $HF_TOKEN; set it to another value" in said and KEY not in said
    assert not SweepPaths(attempt.root.parents[3]).tracking.exists()


def test_without_wandb_there_is_one_line(attempt: AttemptPaths, tmp_path: Path) -> None:
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "wandb.py").write_text("raise ModuleNotFoundError(\"No module named 'wandb'\", name='wandb')\n")
    said = finish(start(attempt, PYTHONPATH=f"{shadow}{os.pathsep}{ROOT}"))
    assert said == [
        f"tracking {GRAPHED.run_id}-a1: wandb is not installed; metrics stay in metrics.jsonl (pip install wandb)"
    ]


def test_an_error_of_wandb_is_one_line(attempt: AttemptPaths) -> None:
    said = finish(start(attempt, dataclasses.replace(SETTINGS, mode="online")))
    assert len(said) == 1 and "ended early" in said[0] and "No API key" in said[0]


def test_importing_the_tracker_imports_neither_wandb_nor_torch() -> None:
    question = "import sys, launch.track; sys.exit(bool({'wandb', 'torch'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", question], cwd=ROOT, check=True)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Start a server. Unless a handler is given, it answers every request with an error, which shows that it can be
    reached."""
    handler = getattr(request, "param", http.server.BaseHTTPRequestHandler)
    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    thread.join()
    listening.server_close()


def test_online_takes_a_key_and_a_server(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert "no API key" in (why_offline(server) or "")
    (tmp_path / "netrc").write_text(f"machine {server.removeprefix('http://')} login user password {KEY}\n")
    assert why_offline(server) is None
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert "cannot be reached" in (why_offline(UNREACHABLE) or "")


def test_an_attempt_keeps_its_id_and_shares_it_with_no_other_sweep(tmp_path: Path) -> None:
    first, second = (begin(tmp_path / name, GRAPHED) for name in ("mine", "yours"))
    ids = {sweep_token(attempt.root.parents[3] / "tracking") for attempt in (first, second, first)}
    assert len(ids) == 2


@given(cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_appended_lines_are_read_once_wherever_the_writer_was(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    attempt = AttemptPaths(tmp_path_factory.mktemp("attempt"))
    write_steps(attempt, range(12))
    content = attempt.metrics.read_bytes()
    attempt.metrics.unlink()
    lines = AppendedLines(attempt.metrics)
    seen: list[bytes] = []
    for end in [*sorted(cuts), len(content)]:
        seen += lines.read()
        attempt.metrics.write_bytes(content[:end])
    seen += lines.read()
    steps = [step_from_json(parse_json(line)) for line in seen]
    assert repr(steps) == repr([dataclasses.asdict(step_metrics(step)) for step in range(12)])


def test_a_median_among_nans_is_nan() -> None:
    assert math.isnan(median_step_time([1.0, math.nan, 3.0])["median_step_time_ms"])
    assert median_step_time([]) == {}


def test_settings_survive_json_and_refuse_an_unknown_mode() -> None:
    settings = json.loads(json.dumps(dataclasses.asdict(SETTINGS)))
    assert from_json(TrackSettings, settings) == SETTINGS
    with pytest.raises(TypeError, match=r"mode is 'sometimes'.*offline"):
        from_json(TrackSettings, settings | {"mode": "sometimes"})


def wait_for(condition: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
