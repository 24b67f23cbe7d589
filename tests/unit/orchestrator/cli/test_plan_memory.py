"""Test what ``plan`` says about GPU memory, and which cells it sets aside."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.memory.forecast import fullest_rank
from analysis.memory.measured_constants import MEASURED, Constants
from launch.contract.outcomes import OutcomeName
from launch.contract.paths import SweepPaths
from launch.contract.plan import Reason
from orchestrator.cli import planning
from orchestrator.cli.main import main
from orchestrator.cli.verbs import sweep
from orchestrator.plan import memory_check
from orchestrator.plan.planner import make_plan
from orchestrator.plan.sound_fixes import alternatives
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load
from orchestrator.targets import host
from orchestrator.targets.profile import Profile
from orchestrator.targets.slurm_cluster import read_cluster
from tests.planned import cluster
from tests.planned import plan as planned
from tests.records import AttemptRecord, Edit, attempt_record, write_attempt, write_sweep
from tests.schemas import validated


@pytest.fixture
def plan_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Plan on a cluster whose GPUs have ``gib`` GiB. Return the content, and the warnings of ``sweep``."""

    def run(gib: float | None, *words: str) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(
            planning, "find_target", lambda *_: read_cluster(Profile("site", gpu_memory_gib=gib), tmp_path)
        )
        monkeypatch.setattr(sweep, "run_sweep", lambda *words, **options: 0)
        assert main(["plan", *words, "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert main(["sweep", *words]) == 0
        return content, capsys.readouterr().err

    return run


def states(content: dict[str, Any]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the state and the reasons of each cell that no other rule rejects."""
    cells = [cell for cell in content["cells"] if cell["state"] != "rejected"]
    return {cell["label"]: (cell["state"], tuple(reason["rule"] for reason in cell["reasons"])) for cell in cells}


RUNS, ASIDE = ("run", ()), ("not_runnable", ("cluster.gpu_memory",))
MAY = "may run out of memory: it needs at least"


@pytest.mark.parametrize(
    ("gib", "words", "state", "warned"),
    [
        (None, (), RUNS, False),
        (141, (), RUNS, False),
        (90, (), RUNS, True),  # 93 GiB are needed. The stated error may explain the excess.
        (80, (), ASIDE, False),
        (80, ("--even-if-oom",), RUNS, True),
        (60, ("--even-if-oom",), RUNS, True),  # Weights, gradients and optimizer state alone take 63.5 GiB.
        (80, ("expect.outcome=CUDA_OOM", "expect.phase=warmup"), RUNS, False),
        (60, ("expect.outcome=CUDA_OOM", "expect.phase=warmup"), RUNS, False),
        (80, ("megatron_core='0.19'",), ASIDE, False),
        (80, ("training.fp8=delayed",), RUNS, True),  # No run measured a forecast of fp8.
        (60, ("training.fp8=delayed",), ASIDE, False),
    ],
)
def test_cells_that_do_not_fit_by_more_than_the_error_are_set_aside(
    plan_on: Any, gib: float | None, words: tuple[str, ...], state: tuple[str, tuple[str, ...]], warned: bool
) -> None:
    content, warnings = plan_on(gib, "gpt_oss_120b", *words)
    found = states(content)
    assert len(found) >= 3 and set(found.values()) == {state}
    assert warnings.count(MAY) == (len(found) if warned else 0)
    assert bool(content["gpu_hours"]) == (state == RUNS)


CHECK = "may lack memory for its step checks: they need at least"


@pytest.mark.parametrize(("gib", "words", "warned"), [(141, (), 0), (120, (), 1), (120, ("step_checks=0",), 0)])
def test_step_checks_that_do_not_fit_are_known_before_the_run(
    plan_on: Any, gib: float, words: tuple[str, ...], warned: int
) -> None:
    """Its whole step needs 115 GiB. A check needs 128 GiB, as it computes an eager step beside the graph."""
    recipe = str(Path(__file__).parents[4] / "recipes" / "gpt_oss_5l_megatron_padded.yaml")
    _, warnings = plan_on(gib, recipe, "--only", "cuda_graph.impl=full_iteration", *words)
    assert (warnings.count(CHECK), warnings.count(MAY)) == (warned, 0)


def test_a_cell_set_aside_names_the_forecast_the_gpu_and_the_fix(plan_on: Any) -> None:
    content, _ = plan_on(
        80, "gpt_oss_120b", "--only", "cuda_graph.scope=[attn]", "--only", "cuda_graph.mend=[yarn_positions]"
    )
    (cell,) = content["cells"]
    (reason,) = (Reason(**reason) for reason in cell["reasons"])
    assert "needs at least 93.04 GiB by forecast" in reason.message and "off by 10%" in reason.message
    assert reason.message.endswith("gpu_memory_gib of the profile is 80") and "--even-if-oom" in reason.remedy
    assert content["memory"][cell["cell_id"]]["peak"] > 93 << 30, "the forecast stays in the table"


def test_state_that_does_not_fit_gets_the_settings_with_which_it_does(plan_on: Any) -> None:
    words = ("gpt_oss_120b", "sweep=null", "cuda_graph.impl=none")
    (cell,) = plan_on(60, *words)[0]["cells"]
    (reason,) = (Reason(**reason) for reason in cell["reasons"])
    assert "before the first step" in reason.message
    fixes = [settings for _, settings in alternatives(reason.remedy) if settings]
    assert fixes
    for settings in fixes:
        (fixed,) = plan_on(60, *words, *settings)[0]["cells"]
        assert not fixed["reasons"] or "before the first step" not in fixed["reasons"][0]["message"], settings


NVIDIA_SMI = "#!/bin/sh\necho {mib}\necho 4096\n"


@pytest.mark.parametrize(
    ("answer", "gib"),
    [
        (NVIDIA_SMI.format(mib=81559), 81559 / 1024),
        (NVIDIA_SMI.format(mib="[N/A]"), None),
        (NVIDIA_SMI.format(mib="no GPU"), None),
        ("#!/bin/sh\necho 0\n", None),
        ("#!/bin/sh\nexit 9\n", None),
    ],
)
def test_a_host_knows_the_memory_of_its_largest_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    gib: float | None,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(answer)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(host, "_visible_gpus", lambda: ("0", "1"))
    target = planning.find_target(argparse.Namespace(cluster=None, executor="local"), "local", "")
    assert target.gpu_memory_gib == gib
    assert ("nvidia-smi does not tell the memory" in capsys.readouterr().err) == (gib is None)


@pytest.mark.parametrize(("gib", "state"), [(79.6, "not_runnable"), (140.4, "run"), (None, "run")])
def test_a_host_sets_aside_cells_that_do_not_fit(tmp_path: Path, gib: float | None, state: str) -> None:
    target = host.Host(("0", "1"), frozenset(), True, gib)
    recipe = load(Path("gpt_oss_20b_2gpu"))
    plan = make_plan(recipe, expand(recipe, "cuda"), target, memory_check.MemoryCheck(target))
    (cell,) = (cell for cell in plan.cells if cell.label == "full_iteration.optimizer")
    assert cell.state == state
    for reason in cell.reasons:
        assert reason.rule == "host.gpu_memory" and reason.message.endswith(
            "no GPU of this host has more than 79.6 GiB"
        )


@pytest.mark.parametrize(("compile", "state"), [("whole", RUNS), ("none", ASIDE)])
def test_what_was_never_measured_is_not_set_aside_by_its_forecast(
    plan_on: Any, compile: str, state: tuple[str, tuple[str, ...]]
) -> None:
    """A GPU of 6 GiB can hold the state of 5.8 GiB, but 6.9 to 7.1 GiB are needed."""
    words = ("launch_bound_compiled", f"training.compile={compile}", "--only", "cuda_graph.impl=full_iteration")
    content, warnings = plan_on(6, *words)
    assert set(states(content).values()) == {state}
    assert (MAY in warnings) == (state == RUNS)


@pytest.mark.parametrize("large", ["eager", "full_iteration"])
def test_no_graphed_cell_runs_without_its_eager_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: str
) -> None:
    ranks = {"eager": 1 << 30, "full_iteration": 1 << 30, large: 90 << 30}
    forecast = lambda spec, constants: SimpleNamespace(needed=ranks[spec.cuda_graph.label])  # noqa: E731
    monkeypatch.setattr(memory_check, "fullest_rank", forecast)
    grid = {"cuda_graph.impl": ["none", "full_iteration"]}
    target = replace(cluster(gpu_memory_gib=80), partitions=())
    fields = {"resources": {"device": "cuda"}, "training": {"precision": "bf16"}}
    plan = planned(tmp_path, host=target, sweep={"grid": grid}, **fields)
    runs = {cell.label: cell.state == "run" for cell in plan.cells}
    assert runs == {"eager": large != "eager", "full_iteration": False}
    message = next(cell for cell in plan.cells if cell.graphed).reasons[0].message
    assert message.startswith("its eager baseline does not fit: ") == (large == "eager")


def explain(capsys: pytest.CaptureFixture[str], cell: str, recipe: str = "qwen3_8l_parallel", *words: str) -> str:
    code = main(["plan", recipe, *words, "--explain", "memory", cell])
    found = capsys.readouterr()
    return found.err if code else found.out


def test_plan_explains_the_memory_of_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, "torch.attn, ep=4")
    assert text.startswith("torch.attn, ep=4: ") and "\n  optimizer state " in text
    terms = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(terms) > 12 and all(line.endswith("]") for line in terms)
    assert explain(capsys, "torch.attn", "qwen3_8l_parallel", "--only", "parallelism.ep=4") == text


def test_what_cannot_be_explained_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'nothing' matches 0 cells of the recipe" in explain(capsys, "nothing")
    several = explain(capsys, "torch.attn")
    assert "'torch.attn' matches 2 cells" in several and "label or id: torch.attn, ep=4; torch.attn, tp=2" in several
    assert "its ranks are on CPUs" in explain(capsys, "eager, dp=1", "tiny_moe", "resources.device=cpu")
    assert "cannot work: " in explain(capsys, "transformer_engine", "tiny_moe", "--only", "parallelism.dp=1")
    assert main(["plan", "tiny_moe", "--explain", "time", "eager"]) == 1
    assert "write --explain memory CELL" in capsys.readouterr().err


# --- a user's program -----------------------------------------------------------------------------------------------

PROGRAM = """
name: mine
engine: command
command: {run: train.py, workdir: ., flags: {layers: 32, seed: 7}, graphs: {none: [], whole: [--graph]}}
training: {steps: 20}
resources: {device: cuda}
repeats: 2
"""


def run_with_layers(folder: Path, layers: Mapping[int, int], outcome: OutcomeName = "COMPLETED") -> Path:
    """Write a recipe and its runs. Return the recipe's file.

    With n layers, tensors take ``layers[n]`` MiB, and 1 GiB more with graphs.
    """
    recipe, sweep_paths = folder / "mine.yaml", SweepPaths(folder / "sweeps" / "mine")
    recipe.write_text(PROGRAM)
    (folder / "train.py").touch()
    for number, tensors in layers.items():
        for cell in expand(load(recipe, [f"command.flags.layers={number}"]), "cuda"):
            for repeat in range(2):
                record = attempt_record(replace(cell.spec, repeat=repeat))
                record.end(outcome=outcome)
                held = tensors + 1024 * cell.spec.graphed
                for event in record.events[0]:
                    if "memory" in event:
                        event["memory"] |= {
                            "peak_allocated": held << 20,
                            "peak_reserved": held + 100 << 20,
                            "device_outside": 500 << 20,
                            "graph_pool": 0,
                        }
                write_attempt(sweep_paths, record)
    return recipe


def table(capsys: pytest.CaptureFixture[str], recipe: Path) -> list[str]:
    assert main(["plan", str(recipe), "--store", str(recipe.parent / "sweeps")]) == 0
    return [line.strip() for line in capsys.readouterr().out.splitlines() if "iB  " in line]


def test_two_observed_points_of_a_program_are_extrapolated_linearly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plan_on: Any
) -> None:
    """A run takes 3000 MiB, 1000 MiB per layer, and 600 MiB that do not grow."""
    recipe = run_with_layers(tmp_path, {2: 5000, 4: 7000})
    where = ("--store", str(tmp_path / "sweeps"))
    assert table(capsys, recipe) == ["35.77 GiB  whole  (extrapolated from 4 runs)"]
    assert main(["plan", str(recipe), *where, "--explain", "memory", "eager"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("eager: 34.77 GiB of GPU memory on a rank, in phase ") and "docs/results" not in text
    assert "3000 MiB + --layers 32 x 1000.0 MiB  [extrapolated from 4 runs with --layers 2 and 4]" in text
    content, warnings = plan_on(20, str(recipe), *where)
    assert set(states(content).values()) == {RUNS}, "no cell is set aside by an extrapolation"
    assert "it needs at least 34.67 GiB, extrapolated from 4 runs, and gpu_memory_gib of the profile is 20" in warnings


@pytest.mark.parametrize(
    ("layers", "outcome"),
    [({4: 7000}, "COMPLETED"), ({2: 7000, 4: 5000}, "COMPLETED"), ({2: 5000, 4: 7000}, "CUDA_OOM")],
    ids=["one point", "memory falls", "runs failed"],
)
def test_without_two_points_nothing_is_known_of_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layers: dict[int, int], outcome: OutcomeName
) -> None:
    recipe = run_with_layers(tmp_path, layers, outcome)
    assert table(capsys, recipe) == []
    assert main(["plan", str(recipe), "--store", str(tmp_path / "sweeps"), "--explain", "memory", "eager"]) == 1
    assert "with two other numbers of one of its command.flags" in capsys.readouterr().err


def test_the_nearest_points_count_and_other_settings_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = run_with_layers(tmp_path, {1: 9000, 8: 11000, 16: 19000, 64: 99000})
    assert [line.split("  ")[0] for line in table(capsys, recipe)] == ["35.77 GiB"]
    recipe.write_text(PROGRAM.replace("seed: 7", "seed: 8"))
    assert table(capsys, recipe) == []


# --- a site's own constants -----------------------------------------------------------------------------------------


def held_by(constants: Constants) -> Edit:
    """Return an edit of records: in each phase, the run holds the memory that the forecast with ``constants`` gives for
    phase measure."""

    def edit(record: AttemptRecord) -> None:
        rank = fullest_rank(record.spec, constants)
        assert rank is not None
        for event in (event for event in record.events[0] if "memory" in event):
            terms = rank.phases.get(event["phase"], rank.phases["measure"])
            held = {
                kind: sum(term.bytes for term in terms if term.held == kind)
                for kind in ("allocated", "pool", "outside")
            }
            reserved = sum(term.bytes for term in terms) - held["outside"]
            event["memory"] |= {
                "peak_allocated": held["allocated"],
                "peak_reserved": reserved,
                "device_outside": held["outside"],
                "graph_pool": held["pool"],
            }

    return edit


def site(**changes: float) -> Constants:
    return replace(MEASURED, **{name: replace(getattr(MEASURED, name), value=value) for name, value in changes.items()})


def peaks(capsys: pytest.CaptureFixture[str], *where: str) -> dict[str, int]:
    assert main(["plan", "launch_bound", *where, "--json"]) == 0
    return {cell_id: rank["peak"] for cell_id, rank in json.loads(capsys.readouterr().out)["memory"].items()}


def test_calibration_learns_what_a_sweep_shows_and_plans_use_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = site(context=900 << 20, native_kernels=410 << 20, graph_executables=160 << 20)
    where = ("--store", str(tmp_path))
    write_sweep(tmp_path / "seen", device="cuda", impls=("full_iteration", "torch"), edit=held_by(other))
    explained = ("plan", "launch_bound", *where, "--explain", "memory", "full_iteration")
    assert main([*explained]) == 0
    built_in = capsys.readouterr().out
    before = peaks(capsys, *where)
    assert main(["plan", "--calibrate", "seen", *where]) == 0
    said = capsys.readouterr().out
    assert main(["plan", "--calibrate", "seen", *where, "--json"]) == 0
    content = validated("calibration", capsys.readouterr().out)
    learned = {name: one["value"] for name, one in content["site"]["constants"].items()}
    # Every run has both the context and the kernels, so only their sum can be found.
    assert learned["context"] + learned["native_kernels"] == pytest.approx(1310 << 20, rel=0.02)
    assert learned["graph_executables"] == pytest.approx(160 << 20, rel=0.05)
    assert "communicator" not in learned and content["site"]["constants"]["graph_executables"]["runs"] == 4
    assert content["cells"] == 3 and abs(content["after"][1]) < 0.01 < 0.1 < abs(content["before"][1])
    assert "error of 3 cells" in said and str(tmp_path / "memory_constants.json") in said
    assert main([*explained]) == 0
    text = capsys.readouterr().out
    assert text != built_in and "[6 runs of sweep written]" in text
    assert all(peak > before[cell_id] for cell_id, peak in peaks(capsys, *where).items())


def test_what_a_sweep_cannot_improve_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path / "same", device="cuda", impls=("torch",), edit=held_by(MEASURED))
    write_sweep(tmp_path / "cpu", device="cpu")
    assert main(["plan", "--calibrate", "same", "--store", str(tmp_path)]) == 0
    assert "No file is written" in capsys.readouterr().out and not list(tmp_path.glob("*.json"))
    assert main(["plan", "--calibrate", "cpu", "--store", str(tmp_path)]) == 1
    assert "no complete run on GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "constants", ['{"context": {"value": -1, "runs": 2}}', '{"of_mars": {"value": 1, "runs": 2}}', "7"]
)
def test_damaged_constants_are_named_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], constants: str
) -> None:
    (tmp_path / "memory_constants.json").write_text(f'{{"sweep": "x", "constants": {constants}}}')
    assert main(["plan", "launch_bound", "--store", str(tmp_path), "--executor", "local"]) == 1
    assert "memory_constants.json" in (said := capsys.readouterr().err) and "plan --calibrate SWEEP" in said
