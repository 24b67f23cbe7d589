"""Test what the observer's hooks do to a program's captures, optimizers and loggers, with a stand-in for a GPU."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analysis.curves.run_file import read_run
from launch import ROOT
from launch.common.atomic_files import write_json
from launch.contract.paths import OBSERVED, AttemptPaths
from launch.contract.records.events import read_events
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import Parallelism, spec_to_json
from tests.records import read_metrics
from tests.unit.launch.observe.observed import PROGRAM, STEPS, observe, spec_of
from tests.unit.launch.observe.test_observer import BY_HAND, CLIP, NESTED, SHOW, TWO

CLIPPED = "    torch.nn.utils.clip_grad_norm_([model.weight, model.bias], 1.0)\n"
LATER = """
broken = torch.cuda.CUDAGraph()
broken.breaks = "BREAKS"
for number"""
RECAPTURE = """    if number == 9:
        try:
            broken.capture_begin()
            broken.capture_end()
        except RuntimeError:
            pass
    loss = compute"""


@pytest.mark.parametrize("breaks", ["begin", "end"])
def test_a_failed_capture_hides_no_later_step(tmp_path: Path, breaks: str) -> None:
    program = BY_HAND.replace("EAGER", "()").replace("\nfor number", LATER.replace("BREAKS", breaks), 1)
    program = program.replace("    loss = compute", RECAPTURE)
    seen = observe(tmp_path, program, spec_of(graphed=True, steps=STEPS - 3, device="cuda"))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.step for one in seen.steps] == list(range(STEPS - 3))
    (proof,) = seen.events("proof")
    assert GraphStats(**proof["graphs"]).graphs == 1, "a failed capture makes no graph"


CONTAINER = NESTED.replace("    container.step()", f"{CLIPPED}    container.step()")
CHAINED = TWO.replace("    optimizer.step()", f"{CLIPPED}    optimizer.step()")


@pytest.mark.parametrize("program", [CHAINED, CONTAINER], ids=["chained", "nested"])
def test_a_timed_step_sets_one_mark_on_the_gpu(tmp_path: Path, program: str) -> None:
    steps = 40
    told = "    if number in (20, 30): print('marks', torch.cuda.Event.set)\n"
    text = program.replace("STEPS", str(steps)).replace(SHOW, f"{told}{SHOW}")
    seen = observe(tmp_path, text, spec_of(steps=steps - 3, device="cuda"))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    first, second = (int(line.split()[1]) for line in seen.log.splitlines() if line.startswith("marks"))
    assert second - first == 10
    assert all(one.step_time_ms > 0 for one in seen.steps[1:])


def test_a_step_that_ends_before_its_last_optimizer_has_a_time(tmp_path: Path) -> None:
    """The second optimizer skips two steps, whose ends then show only in the steps after them."""
    shows = SHOW.replace("}", ', "grad_norm": 1.0}')
    plain = TWO.replace("STEPS", "40").replace(SHOW, shows)
    skips = plain.replace("    second.step()", "    if number not in (20, 25): second.step()")
    seen, other = (
        observe(tmp_path / name, text, spec_of(steps=37, device="cuda")) for name, text in (("a", skips), ("b", plain))
    )
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.step for one in seen.steps] == list(range(37))
    assert [one.loss for one in seen.steps[:21]] == [one.loss for one in other.steps[:21]]
    assert all(0 < one.step_time_ms < 10_000 for one in seen.steps[1:])


def test_the_last_step_counts_although_an_optimizer_skips_it(tmp_path: Path) -> None:
    skips = TWO.replace("    second.step()", "    if number != STEPS - 1: second.step()")
    seen = observe(tmp_path, skips, spec_of())
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.step for one in seen.steps] == list(range(STEPS))
    assert f"'loss': {seen.steps[-1].loss}}}" in seen.log.splitlines()[-1]


def test_an_optimizer_that_steps_alone_and_within_another_is_counted_as_before(tmp_path: Path) -> None:
    """Whether its step counts depends on the step in which it runs, so this is asked at each one."""
    text = CONTAINER.replace("    container.step()", "    container.step() if number % 2 else optimizer.step()")
    seen = observe(tmp_path, text, spec_of(steps=STEPS))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.step for one in seen.steps] == list(range(STEPS))


COMPILED = """
import warnings
import torch
warnings.simplefilter("ignore", DeprecationWarning)  # Dynamo imports torch.jit.
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.compile(backend="eager")
def train(batch):
    loss = model(batch).square().mean()
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss
for number, batch in enumerate(torch.randn(STEPS, 8, 4)):
    print({"step": number, "loss": train(batch).item()})
"""


def test_a_compiled_step_with_its_optimizer_is_observed(tmp_path: Path) -> None:
    seen = observe(tmp_path, COMPILED, spec_of(graphed=True))
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.step for one in seen.steps] == list(range(STEPS))
    (choices,) = seen.events("choices")
    assert choices["choices"]["grad_norm"] == "the program's own functions"


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_tensorboard_logs_what_the_observer_reads(tmp_path: Path, kind: str) -> None:
    """Its writer rounds bfloat16 to float16, so the observer reads such a tensor itself."""
    begin = f"from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter({str(tmp_path / 'tb')!r})\nfor number"
    logged = f"    small = loss.detach().to(torch.{kind}) * 1e-9\n    writer.add_scalar('lm loss', small, number)\n"
    logged += "    print('exact', small.item())"
    text = CLIP.replace("for number", begin, 1).replace(SHOW, logged) + "\nwriter.close()\n"
    seen = observe(tmp_path, text, spec_of())
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    exact = [float(line.split()[1]) for line in seen.log.splitlines() if line.startswith("exact")]
    assert [one.loss for one in seen.steps] == exact and min(exact) > 0
    logged_losses = list(read_run(tmp_path / "tb").steps.loss)
    assert logged_losses == [
        0.0 if kind == "bfloat16" else struct.unpack("f", struct.pack("f", one))[0] for one in exact
    ]


@pytest.mark.parametrize(
    ("words", "places"), [(["train.py"], [ROOT]), (["-m", "train"], [ROOT / "launch" / "observe" / "path", ROOT])]
)
def test_a_program_started_by_the_observer_is_observed_once(
    tmp_path: Path, words: list[str], places: list[Path]
) -> None:
    """PYTHONPATH may be cleared, as in some containers, or load the observer too."""
    spec = spec_of()
    attempt = AttemptPaths(tmp_path / "runs" / spec.run_id / "attempts" / "1")
    attempt.root.mkdir(parents=True)
    write_json(attempt.spec, spec_to_json(spec))
    text = CLIP.replace("STEPS", str(STEPS)).replace("COMPILE", "False")
    (tmp_path / "train.py").write_text(text)
    variables = {**os.environ, OBSERVED: str(attempt.root), "PYTHONPATH": os.pathsep.join(map(str, places))}
    command = [sys.executable, "-m", "launch.observe", *words]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [one.step for one in read_metrics(attempt)] == list(range(STEPS))
    assert not [event for event in read_events(attempt, 0) if event["kind"] == "exception"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_program_has_as_many_ranks_as_the_run(tmp_path: Path, ranks: int) -> None:
    """A launcher may catch the error, as torch.multiprocessing.spawn does, so it is recorded where it is raised."""
    program = f"import os\nos.environ['WORLD_SIZE'] = '{ranks}'\n{CLIP}"
    caught = program.replace("    optimizer.step()", "    try: optimizer.step()\n    except Exception: os._exit(1)")
    seen = observe(tmp_path, caught, replace(spec_of(), parallelism=Parallelism(dp=2)))
    if ranks == 2:
        assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    else:
        assert (seen.diagnosis.outcome, seen.diagnosis.failure_class) == ("CONFIG", "RANKS"), seen.diagnosis
        assert re.search(f"trains with {ranks} ranks?, and the run has 2", seen.diagnosis.message)


def test_a_program_without_a_gpu_ends_at_its_first_step(tmp_path: Path) -> None:
    """A release of PyTorch for CPUs trains on the CPU, but the run is planned for a GPU."""
    program = CLIP.replace("import torch\n", "import torch\ntorch.cuda.is_available = lambda: False\n", 1)
    seen = observe(tmp_path, program, spec_of(device="cuda"), gpu=False)
    assert (seen.diagnosis.outcome, seen.diagnosis.failure_class) == ("ENVIRONMENT", "NO_GPU"), seen.diagnosis
    assert f"PyTorch {torch.__version__}" in seen.diagnosis.message and "resources.device=cpu" in seen.diagnosis.remedy
    assert seen.steps == []


SCALED = PROGRAM.replace(
    "data = ", "from launch.observe import step\nscaler = torch.amp.GradScaler('cpu')\ndata = "
).replace(
    "    loss.backward()\n    optimizer.step()",
    """    (scaler.scale(loss) * (float('inf') if number in (0, 8) else 1.0)).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()""",
)
FUSED = SCALED.replace("lr=0.1", "lr=0.1, fused=True")
ANNOUNCED = SCALED.replace(SHOW, "    step(loss=loss, grad_norm=norm)")


@pytest.mark.parametrize("program", [FUSED, ANNOUNCED], ids=["fused", "announced"])
def test_a_step_that_a_gradient_scaler_skips_has_a_norm_of_0(tmp_path: Path, program: str) -> None:
    """A fused optimizer steps although its gradients are not finite, and a program may announce any step."""
    seen = observe(tmp_path, program, spec_of())
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.step for one in seen.steps if one.grad_norm == 0] == [0, 8]
    assert [note["message"][:22] for note in seen.events("note") if "scaler" in note["message"]] == [
        "the gradient of step 0"
    ]


def test_a_norm_is_that_of_unscaled_gradients(tmp_path: Path) -> None:
    clips = "    scaler.unscale_(optimizer)\n    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    scaled = FUSED.replace(clips, "").replace("(0, 8)", "()")
    seen, plain = (observe(tmp_path / name, text, spec_of()) for name, text in (("a", scaled), ("b", PROGRAM)))
    assert [one.grad_norm for one in seen.steps] == pytest.approx([one.grad_norm for one in plain.steps])


def test_a_gradient_that_no_scaler_skips_ends_the_run(tmp_path: Path) -> None:
    off = FUSED.replace("GradScaler('cpu')", "GradScaler('cpu', enabled=False)")
    found = observe(tmp_path, off, spec_of()).diagnosis
    assert found.outcome == "NUMERIC" and "norm is" in found.message, found
