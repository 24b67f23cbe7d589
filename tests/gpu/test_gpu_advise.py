"""On a GPU, test that an inspection finds the lines of a step that break a capture, and none in a clean step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from inspect import getsourcelines
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launch.contract.records.inspection import KINDS, Inspection
from launch.contract.spec import CudaGraph, Model, RunSpec
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import build
from launch.train.data_loader import batch, open_source
from launch.train.inspection.capture_blockers import inspect
from tests.gpu.test_gpu_eager import GPT_OSS, MOE, PADDED
from tests.gpu.test_gpu_graphs import spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
]
ROOT = Path(__file__).resolve().parents[2]
MICRO_BATCHES = 3


def inspected(spec: RunSpec, hook: Callable[..., Any] | None = None) -> Inspection:
    """Inspect the two steps after the first three."""
    device = torch.device("cuda", 0)
    engine = build(spec, RankPlace(0, 1, device))
    if hook is not None:
        engine.chunks[0].register_forward_hook(hook)
    source = open_source(spec.data, spec.model.vocab_size, spec.training.seed)
    batches = [batch(source, spec, step, 0).to(device) for step in range(5)]
    for tokens in batches[:3]:
        engine.step(tokens)
    return inspect(engine.step, batches[3:])


@pytest.mark.parametrize("training", [{}, {"compile": "elementwise"}], ids=["plain", "compiled"])
@pytest.mark.parametrize("model", [Model(), MOE, PADDED, GPT_OSS], ids=["dense", "moe", "padded", "gpt-oss"])
def test_a_step_that_can_be_captured_whole_is_clean(model: Model, training: dict[str, Any]) -> None:
    """This includes the all-to-all dispatcher, which sends nothing if all experts are on one GPU."""
    found = inspected(spec_of(model, CudaGraph(), **training))
    assert (found.findings, found.waits, found.recompilations) == ((), 0.0, 0)
    assert found.kernels is not None and found.kernels.number > 100
    assert found.kernels.share_below(50.0) > 0.5 and 0 < found.kernels.median_us < 50
    assert all(kernel.name and kernel.milliseconds > 0 for kernel in found.kernels.longest)


def reads_a_value(_module: nn.Module, _tokens: Any, losses: Any) -> None:
    if losses.cross_entropy.item() < 0:
        raise AssertionError


def sizes_by_content(_module: nn.Module, tokens: tuple[torch.Tensor], _losses: Any) -> None:
    tokens[0].flatten().unique()


def draws_from_its_own(_module: nn.Module, _tokens: Any, _losses: Any) -> None:
    torch.rand(3, device="cuda", generator=_own())


def draws_on_the_host(_module: nn.Module, _tokens: Any, _losses: Any) -> None:
    torch.rand(3)


def drops_out(_module: nn.Module, _tokens: Any, losses: Any) -> None:
    nn.functional.dropout(losses.cross_entropy.detach(), 0.5)


GENERATORS: list[torch.Generator] = []


def _own() -> torch.Generator:
    if not GENERATORS:
        GENERATORS.append(torch.Generator("cuda").manual_seed(0))
    return GENERATORS[0]


@pytest.mark.parametrize(
    ("hook", "kinds"),
    [
        (reads_a_value, {"synchronisation"}),
        (sizes_by_content, {"synchronisation", "shape"}),
        (draws_from_its_own, {"generator"}),
        (draws_on_the_host, {"host generator"}),
        (drops_out, {"default generator"}),
    ],
)
def test_a_hook_is_found_with_its_line(hook: Callable[..., Any], kinds: set[str]) -> None:
    found = inspected(spec_of(MOE, CudaGraph()), hook)
    assert {finding.kind for finding in found.findings} == kinds
    _, first = getsourcelines(hook)
    for finding in found.findings:
        assert (finding.file, finding.function) == ("tests/gpu/test_gpu_advise.py", hook.__qualname__)
        assert finding.line == first + 1 and finding.code
        # Two steps may have chosen equal numbers of tokens.
        assert finding.count >= MICRO_BATCHES or finding.kind == "shape"
    if kinds == {"synchronisation"}:
        assert found.waits <= MICRO_BATCHES, "PyTorch reports every wait of the driver"


def test_a_wait_that_pytorch_tells_nothing_of_is_counted() -> None:
    def waits(_module: nn.Module, _tokens: Any, _losses: Any) -> None:
        event = torch.cuda.Event()
        event.record()
        event.synchronize()

    found = inspected(spec_of(MOE, CudaGraph()), waits)
    assert found.findings == () and found.waits >= MICRO_BATCHES


RECIPE = """\
name: gpu_advise
model: {preset: tiny_moe}
training: {steps: 130, sequence_length: 256, micro_batch_size: 1, global_batch_size: 4, precision: bf16}
repeats: 2
sweep: {grid: {cuda_graph: [{impl: full_iteration}, {impl: torch}]}}
resources: {device: cuda, minutes_per_run: 8, hang_minutes: 4}
"""


def advised(folder: Path, *overrides: str, recipe: str = RECIPE) -> dict[str, Any]:
    """Return the advice on the only workload. Every rank inspects every step."""
    (folder / "gpu_advise.yaml").write_text(recipe)
    command = [sys.executable, "-m", "orchestrator", "advise", str(folder / "gpu_advise.yaml"), *overrides]
    options = ["--executor", "local", "--store", str(folder / "sweeps"), "--json"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (workload,) = json.loads(done.stdout)["workloads"]
    return dict(workload)


def test_advice_on_a_model_of_tiny_kernels_is_to_capture_the_step(tmp_path: Path) -> None:
    workload = advised(tmp_path)
    assert (workload["worth"], workload["findings"], workload["unplaced_waits"]) == ("much", [], 0.0)
    assert workload["step"]["launch_bound"] > 0.5 and workload["kernels"]["share_below_50_us"] > 0.9
    assert workload["points"][0] == {"cuda_graph.impl": "full_iteration", "cuda_graph.optimizer": True}
    assert workload["rejected"] == []


PROGRAM = """
import sys
import torch
from launch.observe import step as end_step
torch.manual_seed(0)
torch.set_default_device("cuda")
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for step in range(int(sys.argv[1])):
    rows = 64 + 64 * (step % 2) * ("--grows" in sys.argv)
    loss = model(torch.ones(rows, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if "--waits" in sys.argv:
        loss.item()
    end_step(loss=loss, grad_norm=norm)
"""
OWN_RECIPE = """\
name: gpu_advise
engine: command
command: {run: "{python} train.py {steps}", graphs: {none: [], whole: [--graph]}}
training: {steps: 130}
resources: {device: cuda, minutes_per_run: 8, hang_minutes: 4}
"""


@pytest.mark.parametrize("flag", ["", "--waits", "--grows"])
def test_a_users_program_is_advised_by_its_lines(tmp_path: Path, flag: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    run = f"{{python}} train.py {{steps}} {flag}".strip()
    workload = advised(tmp_path, f"command.run='{run}'", recipe=OWN_RECIPE)
    assert workload["worth"] == "much" and workload["step"]["launch_bound"] > 0.5, workload
    assert workload["kernels"]["share_below_50_us"] > 0.9 and sum(workload["kernels"]["counts"]) > 100
    assert workload["sought"] == list(KINDS), "the trace has every launch"
    assert (workload["step"]["host_ms"] is None) == (flag == "--waits")
    assert workload["points"] == [{"command.graphs.whole": ["--graph"]}] and workload["own_graphs"] == 0
    forward = "loss = model(torch.ones(rows, 64)).square().mean()"
    expected = {
        "--waits": [("synchronisation", "train.py", "loss.item()")],
        "--grows": [("shape", "train.py", forward), ("kernels", "", "")],
    }
    found = [(one["kind"], one["file"], one["code"]) for one in workload["findings"]]
    assert found == expected.get(flag, []), workload["findings"]


def test_two_gpus_name_the_dispatcher_that_waits_with_its_line(tmp_path: Path) -> None:
    found = torch.cuda.device_count()
    assert found >= 2, f"2 GPUs are needed, and this host has {found}: deselect with -k 'not two_gpus'"
    workload = advised(tmp_path, "parallelism.dp=2", "parallelism.ep=2", "parallelism.dispatcher=alltoall")
    waits = [finding for finding in workload["findings"] if finding["kind"] == "synchronisation"]
    assert [finding["function"] for finding in waits] == ["AllToAllDispatcher.__call__"]
    assert waits[0]["code"].endswith(".tolist()")
    assert "capture.native_expert_sync" in [one["rule"] for one in workload["rejected"]]
    assert not [one for one in workload["points"] if one["cuda_graph.impl"] == "full_iteration"]
