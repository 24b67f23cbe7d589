"""Write a sweep's folder as a finished sweep leaves it, with the product's own record functions.

Every number is a pure function of the spec, so two calls write the same bytes, and a process makes them once. Use
``edit`` to change an attempt before it is written::

    def late_nan(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.metrics[80]["loss"] = float("nan")

    sweep = write_sweep(tmp_path, edit=late_nan)
"""

from __future__ import annotations

import dataclasses
import marshal
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np

from launch.common.atomic_files import JsonLines, dumps, read_json_lines, write_json, write_text
from launch.contract.outcomes import Expectation, Outcome, outcome_to_json
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.plan import Cell, Margins, Plan, PlannedBundle, Reason
from launch.contract.records.clocks import Clocks
from launch.contract.records.events import Phase, StepPhase, read_events
from launch.contract.records.gpu_rates import GpuRates
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.identity import identity_of
from launch.contract.records.kernels import Kernels, KernelTime
from launch.contract.records.memory import Memory
from launch.contract.records.probe import Launches, Probe, Probed
from launch.contract.records.step_check import StepCheck
from launch.contract.records.step_metrics import StepMetrics, step_from_json
from launch.contract.spec import CudaGraph, Device, GraphImpl, Parallelism, Placement, RunSpec, Training, spec_to_json

STARTED = 1_760_000_000.0
"""The Unix time at which the first attempt of a bundle began. The others follow one after the other."""
RUN_SECONDS = 60.0
TIMED = "as its steps say"
"""A placeholder for the seconds of a phase, until its steps are written."""
SETTLE_STEPS = 2
GIB = 1 << 30
RECIPE = "name: written\nengine: torch_native\n"
SPEEDUP = 1.25
RATES = GpuRates("fp32", flops=5e13, bandwidth=4e12)
EAGER_PROBE = Probe(graph_launches=0.0, kernels=1200.0, busy_ms=16.0, computing_ms=15.5, host_ms=19.0)
"""The probe of an eager step of about 20 ms, on CUDA."""
EAGER_LAUNCHES, GRAPHED_LAUNCHES = Launches(0.0, 1200.0, 0.0), Launches(1100.0, 100.0, 0.0)
KERNELS = Kernels((0.0, 400.0, 500.0, 200.0, 60.0, 30.0, 10.0, 0.0), 7.5, (KernelTime("gemm<a|b>", 96.0, 4.25),))
GRAPHED_PROBE = Probe(graph_launches=8.0, kernels=1200.0, busy_ms=16.5, computing_ms=15.5, host_ms=2.0)
UNTHROTTLED = Clocks(
    seconds=2.0, throttled={"power_cap": 0.0, "thermal": 0.0, "sync_boost": 0.0}, active=(), power_limits=(700.0,),
    sm_mhz=1980, max_sm_mhz=1980,
)  # fmt: skip
"""The clocks of a phase on CUDA."""


@dataclass
class AttemptRecord:
    """One attempt before it is written.

    ``outcome`` is None for an attempt that has not ended. ``begun=False`` writes the run's spec and nothing else.
    """

    spec: RunSpec
    metrics: list[dict[str, Any]]
    events: dict[int, list[dict[str, Any]]]
    environment: dict[str, Any]
    outcome: Outcome | None
    number: int = 1
    begun: bool = True

    def end(self, **fields: Any) -> None:
        """Change fields of the outcome."""
        assert self.outcome is not None
        self.outcome = dataclasses.replace(self.outcome, **fields)


@dataclass(frozen=True)
class Extra:
    """A cell of the plan that does not run: rejected, or not runnable on this host."""

    spec: RunSpec
    reasons: tuple[Reason, ...]
    state: str = "rejected"


Edit = Callable[[AttemptRecord], None]
"""Changes an attempt before it is written."""


def unchanged(run: AttemptRecord) -> None:
    """Change nothing: the default ``edit``."""


def unbegun(run: AttemptRecord) -> None:
    """Write the spec of the run and nothing else."""
    run.begun = False


def write_sweep(
    root: Path,
    *,
    workloads: int = 1,
    impls: Sequence[GraphImpl] = ("torch_compile",),
    repeats: int = 2,
    steps: int = 120,
    ranks: int = 1,
    device: Device = "cpu",
    deterministic: bool = False,
    perturbed: bool = False,
    if_needed: bool = False,
    step_checks: int = 0,
    expect: Expectation = Expectation(),  # noqa: B008 (frozen)
    extra: Sequence[Extra] = (),
    edit: Edit = unchanged,
) -> SweepPaths:
    """Write a sweep of ``workloads``, each with an eager baseline, ``impls`` and ``repeats`` repeats.

    Graphed runs agree with their baseline bit for bit. So does the ``perturbed`` run, which begins only ``if_needed``.
    Their ``step_checks`` find nothing. ``expect`` applies to graphed cells.
    """
    sweep = SweepPaths(root)
    cells, bundles, optional = [], [], []
    for workload in range(workloads):
        specs = [workload_spec(workload, impl, steps, ranks, device, deterministic) for impl in ("none", *impls)]
        specs = [dataclasses.replace(spec, step_checks=step_checks) for spec in specs]
        cells += [written_cell(spec, repeats, expect if spec.graphed else Expectation()) for spec in specs]
        run_ids = tuple(
            dataclasses.replace(s, repeat=r).run_id for r in range(repeats) for s in specs[:: -1 if r % 2 else 1]
        )
        if perturbed:
            moved = dataclasses.replace(specs[0], repeat=repeats, perturbed=True)
            baseline = cells[-len(specs)]
            cells[-len(specs)] = dataclasses.replace(
                baseline, run_ids=(*baseline.run_ids, moved.run_id), perturbed=True
            )
            record = attempt_record(moved, f"bundle{workload:03d}", STARTED + RUN_SECONDS * repeats * len(specs))
            edit(record)
            write_attempt(sweep, record)
            if if_needed:
                optional.append(PlannedBundle(f"perturbed{workload:03d}", specs[0].workload_id, (moved.run_id,)))
            else:
                run_ids = (*run_ids, moved.run_id)
        bundles.append(PlannedBundle(f"bundle{workload:03d}", specs[0].workload_id, run_ids))
        for repeat in range(repeats):
            for place, spec in enumerate(specs[:: -1 if repeat % 2 else 1]):
                began = STARTED + RUN_SECONDS * (repeat * len(specs) + place)
                record = attempt_record(dataclasses.replace(spec, repeat=repeat), bundles[-1].bundle_id, began)
                edit(record)
                write_attempt(sweep, record)
    cells += [_extra_cell(item) for item in extra]
    plan = Plan("written", RECIPE, "written.yaml", Margins(), tuple(cells), tuple(bundles))
    write_json(sweep.plan, dataclasses.replace(plan, bundles_if_needed=tuple(optional)))
    return sweep


def workload_spec(
    workload: int, impl: GraphImpl, steps: int, ranks: int = 1, device: Device = "cpu", deterministic: bool = False
) -> RunSpec:
    """Return the eager spec of a workload. Workloads differ in their learning rate."""
    rate = 1e-3 * (workload + 1)
    return RunSpec(
        training=Training(steps=steps, learning_rate=rate, global_batch_size=8 * ranks, deterministic=deterministic),
        parallelism=Parallelism(dp=ranks),
        placement=Placement(device=device, ranks_per_node=ranks),
        cuda_graph=CudaGraph(impl=impl),
    )


def written_cell(spec: RunSpec, repeats: int, expect: Expectation = Expectation()) -> Cell:  # noqa: B008 (frozen)
    return Cell(
        cell_id=spec.cell_id,
        label=f"{spec.cuda_graph.label}, lr {spec.training.learning_rate:g}",
        workload_id=spec.workload_id,
        task_id=spec.task_id,
        spec=spec_to_json(spec),
        state="run",
        reasons=(),
        expect=expect,
        run_ids=tuple(dataclasses.replace(spec, repeat=repeat).run_id for repeat in range(repeats)),
    )


def _extra_cell(item: Extra) -> Cell:
    cell = written_cell(item.spec, repeats=0)
    return dataclasses.replace(cell, state=item.state, reasons=item.reasons)  # type: ignore[arg-type]


def read_metrics(attempt: AttemptPaths) -> Iterator[StepMetrics]:
    for line in read_json_lines(attempt.metrics):
        yield StepMetrics(**step_from_json(line))


def trained_bits(attempt: AttemptPaths) -> list[object]:
    """Return the losses, the gradient norms and the digests of the parameters of ``attempt``."""
    steps = [(step.loss, step.grad_norm) for step in read_metrics(attempt)]
    return [*steps, *(event["digest"] for event in read_events(attempt, 0) if event["kind"] == "parameters")]


def write_attempt(sweep: SweepPaths, record: AttemptRecord) -> None:
    """Write the files of one attempt, and its run's spec."""
    run, made = sweep.run(record.spec.run_id), _made(record.spec)
    write_text(run.spec, made.spec)
    if not record.begun:
        return
    attempt = run.attempt(record.number)
    identity = identity_of(attempt)
    for rank, events in record.events.items():
        timed = [
            {**event, "seconds": _seconds(record, event["phase"])} if event.get("seconds") == TIMED else event
            for event in events
        ]
        _write_lines(attempt.events(rank), map(dumps, [{**timed[0], "pid": record.number, **identity}, *timed[1:]]))
    _write_lines(attempt.metrics, _metrics_lines(record, made.steps))
    write_json(attempt.environment, identity | record.environment)
    if record.outcome is not None:
        write_json(attempt.outcome, outcome_to_json(attempt, record.outcome))


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write all lines at once, to what an earlier call wrote."""
    text = "\n".join(lines)
    with JsonLines(path) as file:
        if text:
            file.write_line(text)


def _metrics_lines(record: AttemptRecord, made: Sequence[_MadeStep]) -> Iterator[str]:
    """Yield the lines of the steps. Only what ``edit`` changed is turned into text again."""
    for place, step in enumerate(record.metrics):
        if place == 0:
            yield dumps(_timed_once(step, record))
        elif place < len(made) and _is_of(step, made[place].content):
            yield made[place].line
        else:
            yield dumps(step)


def _is_of(step: dict[str, Any], made: dict[str, Any]) -> bool:
    """Return whether ``step`` has the very objects of ``made``: 0.0 equals -0.0, and is another number."""
    return [*step] == [*made] and all(map(is_, step.values(), made.values()))


def _seconds(record: AttemptRecord, phase: Phase) -> float:
    """Return how long ``phase`` took according to its steps, or 1 s if it has no valid step times."""
    phases = ("measure", "check") if phase == "measure" else (phase,)
    times = (step["step_time_ms"] for step in record.metrics if step.get("phase") in phases)
    known = [time for time in times if type(time) in (int, float) and 0 < time < 1e12]
    return math.fsum(known) / 1e3 or 1.0


def _timed_once(step: dict[str, Any], record: AttemptRecord) -> dict[str, Any]:
    """Return ``step`` with a time that no other attempt has, as real clocks would give. Otherwise one attempt would be
    a copy."""
    own = record.number + zlib.crc32(record.spec.run_id.encode()) / 2**32
    timed = isinstance(step.get("step_time_ms"), float)
    return {**step, "step_time_ms": step["step_time_ms"] * (1 + 1e-9 * own)} if timed else step


def attempt_record(spec: RunSpec, allocation: str = "bundle000", began: float = STARTED) -> AttemptRecord:
    """Return a completed attempt of ``spec``."""
    ranks, made = range(spec.parallelism.world_size), _made(spec)
    return AttemptRecord(
        spec=spec,
        metrics=[dict(step.content) for step in made.steps],
        events={rank: made.copy_events() for rank in ranks},
        environment=environment(spec.placement.device),
        outcome=Outcome("COMPLETED", "teardown", allocation, began, began + RUN_SECONDS, exit_code=0),
    )


def phase_of(spec: RunSpec, step: int) -> StepPhase:
    since = step - spec.cuda_graph.warmup_steps
    if since < 0:
        return "warmup"
    if spec.graphed and since == 0:
        return "capture"
    if spec.step_checks and step in spec.steps_after_checks:
        return "check"
    return "settle" if since - spec.graphed < SETTLE_STEPS else "measure"


def step_metrics(spec: RunSpec) -> list[StepMetrics]:
    """Return metrics with a falling float32 loss, which varies by workload, and step times, which vary by run."""
    training = spec.training
    same = np.random.default_rng(int(spec.workload_id, 16))
    own = np.random.default_rng(int(spec.cell_id[-10:], 16) + spec.repeat)
    steps = np.arange(training.steps)
    loss = (1.5 + 4.0 * np.exp(-steps / 40) + same.normal(0, 0.02, training.steps)).astype(np.float32)
    norm = (0.8 + 2.0 * np.exp(-steps / 30) + same.normal(0, 0.03, training.steps)).astype(np.float32)
    times = 20.0 / (SPEEDUP if spec.graphed else 1.0) * (1 + own.gamma(2.0, 0.01, training.steps))
    tokens = training.global_batch_size * training.sequence_length
    rows = zip(steps.tolist(), loss.tolist(), norm.tolist(), times.tolist(), strict=True)
    return [StepMetrics(i, a, b, time if i else 10 * time, tokens, phase_of(spec, i)) for i, a, b, time in rows]


@dataclass(frozen=True)
class _Key:
    """Identify a spec, which has dicts and so no hash."""

    text: str
    spec: RunSpec = field(compare=False)


@dataclass(frozen=True)
class _MadeStep:
    content: dict[str, Any]
    line: str


@dataclass(frozen=True)
class _Made:
    """What all attempts of a spec have, before ``edit``."""

    spec: str
    steps: tuple[_MadeStep, ...]
    events: bytes

    def copy_events(self) -> list[dict[str, Any]]:
        """Copy them by marshal, which takes a tenth of the time of deepcopy."""
        events: list[dict[str, Any]] = marshal.loads(self.events)
        return events


@lru_cache(maxsize=128)
def _made_once(key: _Key) -> _Made:
    steps = [dict(vars(step)) for step in step_metrics(key.spec)]
    return _Made(
        spec=dumps(spec_to_json(key.spec), indent=1) + "\n",
        steps=tuple(_MadeStep(step, dumps(step)) for step in steps),
        events=marshal.dumps(_events(key.spec)),
    )


def _made(spec: RunSpec) -> _Made:
    return _made_once(_Key(repr(spec), spec))


def _events(spec: RunSpec) -> list[dict[str, Any]]:
    writer = _EventWriter(spec)
    warmup, steps = spec.cuda_graph.warmup_steps, spec.training.steps
    writer.phase("init", None, 0.2)
    writer.phase("build", None, 0.6)
    writer.phase("warmup", 0, 1.0)
    if spec.graphed:
        writer.phase("capture", warmup, 1.2, graphs=_stats(spec, replays=0))
    writer.write("parameters", "settle", warmup + spec.graphed, digest="first", sketches=[])
    writer.phase("settle", warmup + spec.graphed, 1.1)
    for step in spec.checked_steps:
        phase = "settle" if phase_of(spec, step) == "settle" else "measure"
        writer.write("step_check", phase, step, check=dataclasses.asdict(StepCheck(step, tensors=40)))
    writer.phase("measure", warmup + spec.graphed + SETTLE_STEPS, 1.1)
    writer.phase("probe", steps, 1.1)
    writer.write("parameters", "probe", steps, digest="last", sketches=[])
    if spec.graphed:
        writer.write("proof", "probe", steps, graphs=dataclasses.asdict(_stats(spec, steps - warmup - 1)))
    if spec.placement.device == "cuda":
        graphed = Probed(GRAPHED_PROBE, KERNELS, GRAPHED_LAUNCHES)
        found = graphed if spec.graphed else Probed(EAGER_PROBE, KERNELS, EAGER_LAUNCHES)
        writer.write("probe", "probe", steps, **dataclasses.asdict(found))
        writer.write("rates", "probe", steps, rates=dataclasses.asdict(RATES))
    return writer.events


def _stats(spec: RunSpec, replays: int) -> GraphStats:
    on_cpu = spec.placement.device == "cpu"
    return GraphStats(
        impl=spec.cuda_graph.impl,
        effective_scope=spec.cuda_graph.scope,
        mechanism="compiled without CUDA graphs (CPU)" if on_cpu else "CUDA graphs",
        graphs=4,
        replays=4 * replays,
        expected_replays=4 * replays,
        capture_seconds=2.5,
        launches_per_step=0 if on_cpu else 8,
    )


@dataclass
class _EventWriter:
    spec: RunSpec
    events: list[dict[str, Any]] = field(default_factory=list)

    def write(self, kind: str, phase: StepPhase, step: int | None, **content: Any) -> None:
        time = STARTED + len(self.events)
        self.events.append({"time": time, "kind": kind, "phase": phase, "step": step, **content})

    def phase(self, phase: Phase, step: int | None, share: float, graphs: GraphStats | None = None) -> None:
        self.write("enter", phase, step)
        if graphs is not None:
            self.write("capture", phase, step, graphs=dataclasses.asdict(graphs))
        memory = memory_of(self.spec, share, graphs_held=self.spec.graphed and phase in ("settle", "measure", "probe"))
        clocks = dataclasses.asdict(UNTHROTTLED) if self.spec.placement.device == "cuda" and phase != "init" else None
        self.write("phase", phase, step, memory=dataclasses.asdict(memory), clocks=clocks, seconds=TIMED)


def memory_of(spec: RunSpec, share: float, graphs_held: bool = False) -> Memory:
    """Return the memory of a process that uses ``share`` of 4 GiB, and 0.25 GiB more if it holds graphs."""
    held = math.floor(share * 4 * GIB) + (GIB // 4 if graphs_held else 0)
    if spec.placement.device == "cpu":
        return Memory(host_rss=held, host_peak_rss=held + GIB // 16)
    return Memory(
        host_rss=GIB, host_peak_rss=GIB, allocated=held - GIB // 8, peak_allocated=held, reserved=held + GIB // 8,
        peak_reserved=held + GIB // 8, graph_pool=GIB // 4 if graphs_held else 0, device_outside=GIB // 2,
    )  # fmt: skip


def environment(device: Device) -> dict[str, Any]:
    gpus = ["NVIDIA H200"] if device == "cuda" else []
    return {
        "versions": {"python": "3.11.9", "torch": "2.13.0", "numpy": "2.3.1"},
        "code": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False, "digest": "c0de000001"},
        "hardware": {
            "hosts": ["host0"], "cpu": "Example CPU", "cpus": 2, "memory_bytes": 8 * GIB, "gpus": gpus,
            "gpu_memory_bytes": [140 * GIB for _ in gpus], "gpu_ids": [f"id of GPU {i}" for i, _ in enumerate(gpus)],
            "driver": "580.1" if gpus else None,
        },
        "settings": {"OMP_NUM_THREADS": "1"},
        "data_digest": "da7a000001",
        "digests": {"code": "c0de000001", "libraries": "11b0000001"},
    }  # fmt: skip
