"""Test that runs made elsewhere become a sweep, whose verdicts rest on their logs and say so."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from analysis.curves.curve import CurveError
from analysis.curves.curve_files import read_curves
from analysis.report.headline import headline
from analysis.report.summary import summarise
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_sweep import judge_sweep
from launch.contract.exit_codes import ExitCode
from launch.contract.paths import SweepPaths
from launch.contract.plan import Margins
from orchestrator.cli.main import main
from orchestrator.cli.verbs import wrap
from orchestrator.plan.logged_runs import plan_logs
from orchestrator.sweeps.logged_runs import write_logged_runs

STEPS = 130


def log(path: Path, seed: int, *, offset: float = 0.0, digits: int = 9, norms: bool = True, first: int = 1) -> Path:
    """Write a curve that differs from others by noise of its ``seed``, and by ``offset``."""
    noise = random.Random(seed)
    with path.open("w") as file:
        for step in range(STEPS):
            loss = 2 + math.exp(-step / 40) + 0.1 * math.sin(step * step) + noise.gauss(0, 1e-5) + offset
            row = {"step": first + step, "loss": float(f"{loss:.{digits}f}")}
            file.write(json.dumps(row | ({"grad_norm": 1 + loss / 7} if norms else {})) + "\n")
    return path


def judged(
    folder: Path,
    eager: Sequence[Path],
    graphed: Sequence[Path],
    capture: int | None = None,
    margins: Margins | None = None,
) -> CellResult:
    files = read_curves(eager, graphed)
    plan = plan_logs(files, capture, margins)
    sweep = SweepPaths(folder / plan.name)
    for _ in range(2):
        write_logged_runs(sweep, plan, files, files.first_after(capture))
    (result,) = (one for one in judge_sweep(sweep, lambda *_: None).results if one.cell.graphed)
    return result


CASES = {
    "noise": ([1, 2], [{"seed": 3}, {"seed": 4}], "EQUIVALENT", ""),
    "an offset": ([1, 2], [{"seed": 3, "offset": 0.01}], "DIVERGED", ""),
    "four digits": ([1, 2], [{"seed": 3, "digits": 3}], "INCONCLUSIVE", "in units of 0.001"),
    "equal numbers": ([1, 1], [{"seed": 1}], "EQUIVALENT", "all printed digits are equal.*so it may be a copied log"),
    "a copy": ([1, 2], [{"seed": 2}], "EQUIVALENT", "graphed repeat 0 has the same numbers as eager repeat 1"),
    "a copy among eager logs": (
        [1, 1, 2],
        [{"seed": 3}],
        "EQUIVALENT",
        "eager repeat 1 has the same numbers as eager repeat 0",
    ),
    "no norms": ([1, 2], [{"seed": 3}], "EQUIVALENT", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_verdicts_rest_on_digits_and_never_on_bits(tmp_path: Path, name: str) -> None:
    before, after, verdict, reason = CASES[name]
    norms = name != "no norms"
    eager = [log(tmp_path / f"e{place}.jsonl", seed, norms=norms) for place, seed in enumerate(before)]
    graphed = [log(tmp_path / f"g{place}.jsonl", norms=norms, **each) for place, each in enumerate(after)]  # type: ignore[arg-type]
    found = judged(tmp_path, eager, graphed, capture=4)
    assert found.verdict is not None and found.verdict.verdict == verdict, found.verdict
    assert re.search(reason, found.verdict.reason), found.verdict.reason
    assert "replay is unproven" in found.verdict.reason
    assert found.verdict.evidence is None or found.verdict.evidence.first_step == 4, "step 4 of the logs is step 3 here"
    assert found.graphs.replay is not None and not found.graphs.replay.proven
    assert not found.integrity.unsound_records
    assert "replay is unproven" in headline([found])
    copied = (
        "Perhaps a copied log instead of a graphed run: `graphed` (graphed repeat 0 has the same numbers as eager "
        in summarise([found]).text
    )
    assert copied is bool(found.verdict.copied_logs) is (name in ("equal numbers", "a copy"))


@pytest.mark.parametrize(("capture", "first"), [(None, 0), (0, 0), (1, 1), (7, 7)])
def test_steps_after_the_capture_are_compared(tmp_path: Path, capture: int | None, first: int) -> None:
    eager, graphed = (log(tmp_path / f"{seed}.jsonl", seed) for seed in (1, 2))
    found = judged(tmp_path, [eager], [graphed], capture).verdict
    assert found and found.evidence and found.evidence.first_step == first


@pytest.mark.parametrize("record", ["outcome.json", "metrics.jsonl"])
@pytest.mark.parametrize("side", ["eager-*-r0", "graphed-*-r0", "eager-*-r2"])
def test_a_damaged_record_passes_nowhere(tmp_path: Path, record: str, side: str) -> None:
    logs = [log(tmp_path / f"{seed}.jsonl", seed) for seed in range(5)]
    judged(tmp_path, logs[:3], logs[3:])
    (path,) = tmp_path.glob(f"wrap_*/runs/{side}/attempts/1/{record}")
    path.write_text("{broken\n" * 2)
    found = judged(tmp_path, logs[:3], logs[3:]).verdict
    assert found and found.verdict == ("EQUIVALENT" if side.endswith("r2") else "INCOMPARABLE"), found


def test_a_capture_step_behind_the_last_one_is_refused(tmp_path: Path) -> None:
    eager, graphed = (log(tmp_path / f"{seed}.jsonl", seed) for seed in (1, 2))
    with pytest.raises(CurveError, match="no step is after 130"):
        judged(tmp_path, [eager], [graphed], STEPS)


def test_a_report_is_written_and_what_nothing_can_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in range(3):
        log(tmp_path / f"{place}.jsonl", place)
    monkeypatch.setattr(wrap, "write_report", lambda paths: None)
    monkeypatch.setattr(wrap, "print_report", lambda paths: print(paths.root))
    monkeypatch.setattr(wrap, "read_exit_code", lambda *_, **__: 0)
    assert main(["wrap", "--from-logs", "--eager", "0.jsonl", "1.jsonl", "--graphed", "2.jsonl"]) == 0
    sweep = capsys.readouterr().out.strip()
    assert main(["resume", Path(sweep).name]) == 0, "there is nothing to run"
    shutil.copy("0.jsonl", "copy.jsonl")
    for words, message in (
        (
            ["--eager", "0.jsonl", "--graphed", "copy.jsonl"],
            "copy.jsonl: it equals 0.jsonl byte for byte, so one may be a copy",
        ),
        (["--eager", "0.jsonl", "--graphed", "1.jsonl", "2.jsonl"], "name an eager log for each"),
        (["--eager", "none.jsonl", "--graphed", "1.jsonl"], "none.jsonl: No such file"),
    ):
        assert main(["wrap", "--from-logs", *words]) == ExitCode.WRONG_INPUT
        assert message in capsys.readouterr().err
    assert main(["wrap", "--eager", "a", "b", "--graphed", "c"]) == ExitCode.WRONG_INPUT
    assert "in quotes" in capsys.readouterr().err


HEADER = " seed ............................... {seed}\n'global_batch_size': 8, max_seq_length=64 lr 1e-3\n"
STEP = "step {} | loss: {} | grad norm: {} | learning rate: {:.3e} | batch size: 8\n"


def header_log(path: Path, noise: int, seed: int = 1, rate: float = 1e-3) -> Path:
    """Write a log with a header, whose curve has noise and whose learning rate falls from ``rate``."""
    rows = (json.loads(line) for line in log(path, noise).read_text().splitlines())
    lines = (STEP.format(row["step"], row["loss"], row["grad_norm"], rate / row["step"]) for row in rows)
    path.write_text("loading, seeded\n" + HEADER.format(seed=seed) + "".join(lines))
    return path


@pytest.mark.parametrize(
    ("unlike", "allowed", "reason"),
    [
        ({}, (), "replay is unproven"),
        ({"seed": 2}, (), r"settings.seed: 1 \(eager repeat 0\), 2 \(graphed repeat 0\)"),
        ({"seed": 2}, ("settings.seed",), "replay is unproven"),
        ({"rate": 2e-3}, (), r"settings.learning_rate.steps: 0.001 to .* \(130 values"),
        ({"rate": 2e-3}, ("settings",), "replay is unproven"),
    ],
)
def test_logs_that_contradict_each_other_are_incomparable(
    tmp_path: Path, unlike: dict[str, float], allowed: tuple[str, ...], reason: str
) -> None:
    eager = [header_log(tmp_path / f"{seed}.log", seed) for seed in (1, 2)]
    graphed = header_log(tmp_path / "3.log", 3, **unlike)  # type: ignore[arg-type]
    margins = Margins(allow_differences=allowed)
    found = judged(tmp_path, eager, [graphed], margins=margins).verdict
    assert found and re.search(reason, found.reason), found
    assert found.verdict == ("EQUIVALENT" if reason == "replay is unproven" else "INCOMPARABLE")
    silent = log(tmp_path / "silent.jsonl", 3)
    assert (other := judged(tmp_path, eager, [silent]).verdict) and other.verdict == "EQUIVALENT", (
        "it says nothing of these"
    )


def test_eager_logs_of_another_seed_are_no_noise(tmp_path: Path) -> None:
    logs = [header_log(tmp_path / f"{place}.log", place, seed) for place, seed in enumerate((1, 2, 1))]
    found = judged(tmp_path, logs[:2], logs[2:]).verdict
    assert found and found.verdict == "INCOMPARABLE" and "1 (eager repeat 0), 2 (eager repeat 1)" in found.reason
    assert found.fix and "--allow-difference settings.seed" in found.fix


def test_margins_of_logs_are_chosen(tmp_path: Path) -> None:
    eager, graphed = (
        [log(tmp_path / f"{seed}.jsonl", seed) for seed in (1, 2)],
        log(tmp_path / "g.jsonl", 3, offset=0.01),
    )
    for margin, verdict in ((1e-3, "DIVERGED"), (0.1, "EQUIVALENT")):
        found = judged(tmp_path, eager, [graphed], margins=Margins(loss=margin, grad_norm=1.0)).verdict
        assert found and found.verdict == verdict


def test_a_log_that_lacks_another_step_than_the_eager_ones_is_incomparable(tmp_path: Path) -> None:
    """As in analysis.loss: loss scaling skipped another step."""
    eager, graphed = [log(tmp_path / f"{seed}.jsonl", seed) for seed in (1, 2)], log(tmp_path / "g.jsonl", 3)
    for path, missing in zip((*eager, graphed), (50, 50, 51), strict=True):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:missing] + lines[missing + 1 :]))
    found = judged(tmp_path, eager, [graphed]).verdict
    assert found and found.verdict == "INCOMPARABLE" and f"step 50 missing of {STEPS}" in found.reason


def test_a_norm_that_graphs_turn_into_nan_is_judged(tmp_path: Path) -> None:
    eager = [log(tmp_path / f"{seed}.jsonl", seed) for seed in (1, 2)]
    broken = tmp_path / "broken.jsonl"
    rows = [json.loads(line) for line in log(tmp_path / "3.jsonl", 3).read_text().splitlines()]
    broken.write_text("".join(json.dumps(row | {"grad_norm": math.nan}) + "\n" for row in rows))
    found = judged(tmp_path, eager, [broken]).verdict
    assert found and found.verdict == "DIVERGED" and "nan" in found.reason


def test_a_sweep_is_named_by_steps_and_sides(tmp_path: Path) -> None:
    one, two, three = (log(tmp_path / f"{seed}.jsonl", seed) for seed in (1, 2, 3))
    later = log(tmp_path / "later.jsonl", 3, first=5)
    sides = [((one, two), (three,)), ((one, two), (later,)), ((one,), (two, three)), ((two, one), (three,))]
    assert len({plan_logs(read_curves(*each), None).name for each in sides}) == len(sides)


def test_no_name_of_a_file_brings_a_secret_into_a_record(tmp_path: Path) -> None:
    folder = tmp_path / "hf_abcdefghijklmnopqrstuvwxyzABCDEF12"
    folder.mkdir()
    judged(tmp_path, [log(folder / "1.jsonl", 1)], [log(folder / "2.jsonl", 2)])
    records = [file for file in tmp_path.rglob("*.json*") if file.parent != folder]
    assert records and not any(folder.name in file.read_text() for file in records)


def test_a_file_is_given_once_however_it_is_named(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in log(tmp_path / "1.jsonl", 1).read_text().splitlines()]
    (tmp_path / "metrics.csv").write_text("step,loss\n" + "".join(f"{row['step']},{row['loss']}\n" for row in rows))
    with pytest.raises(CurveError, match="given twice"):
        read_curves([tmp_path], [tmp_path / "metrics.csv"])


def test_lines_of_several_ranks_are_no_steps(tmp_path: Path) -> None:
    file = tmp_path / "all.log"
    file.write_text("".join(f"[rank{rank}]: loss {2 + step / 7}\n" for step in range(9) for rank in (0, 1)))
    with pytest.raises(CurveError, match=r"lines of \[?rank0.*rank1.* without step numbers"):
        read_curves([file], [file])


@pytest.mark.parametrize(("option", "value"), [("--repeats", "2"), ("--ranks", "2")])
def test_options_of_commands_are_refused_for_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    files = [str(log(tmp_path / f"{seed}.jsonl", seed)) for seed in (1, 2)]
    arguments = ["wrap", "--from-logs", "--eager", files[0], "--graphed", files[1], option, value]
    assert main(arguments) == ExitCode.WRONG_INPUT and f"{option}: it is for commands" in " ".join(
        capsys.readouterr().err.split()
    )
