"""Test a sweep from its recipe to its report, and later commands on its store."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from launch.contract.exit_codes import ExitCode
from launch.contract.plan import read_plan
from launch.contract.records.events import read_events
from tests.integration.fork_server import SERVER
from tests.integration.host import ROOT, SECRETS, Finished, Host, cpu_seconds_of_children, recipe, wait_until
from tests.records import read_metrics


@pytest.fixture
def copied(finished: Finished, host: Host) -> Host:
    """Return a host whose store holds the finished sweep, from now on without tracking. Tests may damage it."""
    shutil.copytree(finished.host.store, host.store)
    content = (finished.host.folder / "pairs.yaml").read_text()
    (host.folder / "pairs.yaml").write_text(content.replace("offline", "disabled"))
    plan = host.sweep("pairs").plan
    untracked = re.sub(r'"tracking": {.*?}', '"tracking": null', plan.read_text(), flags=re.DOTALL)
    plan.write_text(untracked.replace("offline", "disabled"))
    return host


def test_a_recipe_becomes_a_report(finished: Finished) -> None:
    assert finished.code == 0, finished.out
    host, sweep = finished.host, finished.host.sweep("pairs")
    states = host.states("pairs")
    assert set(states.values()) == {"COMPLETED"}
    kinds = [run_id.split("-")[0] for run_id in states]
    assert kinds == ["eager", "torch_compile", "torch_compile", "eager"], "every other repeat is reversed"
    assert {host.outcome("pairs", run_id).allocation for run_id in states} == {
        f"{read_plan(sweep).bundles[0].bundle_id}.1"
    }
    starts = [host.outcome("pairs", run_id).started for run_id in states]
    assert starts == sorted(starts), "in this order"
    report = json.loads((sweep.report / "report.json").read_text())
    assert report["exit_code"] == 0
    assert "| choices.attention_backend, full layers | sdpa |" in (sweep.report / "report.md").read_text()
    assert "EQUIVALENT" in finished.out and "\nreport: " in finished.out and "next:" not in finished.out
    assert re.search(r"\[ *\d+%, .*\] COMPLETED  torch_compile-", finished.out), "progress, in plain lines"


@pytest.mark.slow
def test_twins_that_are_compiled_alike_are_equal_to_the_bit(host: Host) -> None:
    content = recipe("alike", steps=100, graphed=True, training={"compile": "whole", "deterministic": True})
    done = host.run("sweep", host.write(content))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((host.sweep("alike").report / "report.json").read_text())
    (graphed,) = (cell for cell in report["cells"] if cell["impl"] == "torch_compile")
    assert graphed["verdict"]["verdict"] == "BITWISE", graphed["verdict"]
    for run_id in host.run_ids("alike"):
        (proof,) = (e for e in read_events(host.sweep("alike").run(run_id).attempts()[0], 0) if e["kind"] == "proof")
        assert proof["graphs"]["recompilations"] == 0


def test_a_divergence_from_equal_eager_repeats_needs_a_perturbed_run_that_is_run_by_itself(copied: Host) -> None:
    """Compiled kernels round differently, by more than this margin. So does an eager run after one harmless change."""
    command = ["sweep", str(copied.folder / "pairs.yaml"), "equivalence.loss=1e-9", "equivalence.grad_norm=1e-9"]
    done = copied.run(*command)
    assert done.returncode == ExitCode.INCONCLUSIVE, done.stdout + done.stderr
    (perturbed,) = read_plan(copied.sweep("pairs")).runs_if_needed
    assert f"{perturbed} has not run yet" in done.stdout and "1 run to start; 4 on disk" in done.stdout
    assert copied.states("pairs") == dict.fromkeys([*copied.run_ids("pairs"), perturbed], "COMPLETED")
    report = (copied.sweep("pairs").report / "report.md").read_text()
    assert "eager repeats and the perturbed run differ among themselves" in report
    again = copied.run(*command)
    assert again.returncode == ExitCode.INCONCLUSIVE and "to start" not in again.stdout and "5 on disk" in again.stdout


def test_records_are_whole(finished: Finished) -> None:
    sweep = finished.host.sweep("pairs")
    for run_id in finished.host.run_ids("pairs"):
        (attempt,) = sweep.run(run_id).attempts()
        assert [metrics.step for metrics in read_metrics(attempt)] == list(range(120))
        assert {path.name for path in attempt.root.parent.parent.rglob("*") if path.is_file()} == {
            "spec.json", "metrics.jsonl", "outcome.json", "records.pack"
        }  # fmt: skip
        first, last = (event for event in read_events(attempt, 0) if event["kind"] == "parameters")
        assert first["digest"] != last["digest"], "the optimizer steps"
        assert not first["sketches"] and all(one["change"] > 0 for one in last["sketches"])
        assert len(last["sketches"]) == 9, "each parameter has one"
    assert not list(sweep.root.rglob(".*.json.*")), "something written beside its place was left there"


def test_every_run_is_ready_for_an_upload(finished: Finished) -> None:
    sweep = finished.host.sweep("pairs")
    runs = list((sweep.tracking / "wandb").glob("offline-run-*"))
    assert len(runs) == 5, "four runs, and the report"
    assert all(len(list(run.glob("run-*.wandb"))) == 1 for run in runs)
    assert "Some runs have not been uploaded; they are in `tracking/wandb`." in (sweep.report / "report.md").read_text()
    assert "waiting for the tracking process, for at most" in finished.out
    assert "tracking pairs: offline; upload later with: wandb sync" in finished.out


def test_a_second_sweep_does_nothing(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    host, sweep = finished.host, finished.host.sweep("pairs")
    monkeypatch.delitem(host.environment, SERVER)  # The command's CPU seconds count, so it is a child of this process.
    wait_until(lambda: not host.processes(), 60, "the end of the first sweep's trackers, which run at a lower priority")
    written = {path: path.stat().st_mtime_ns for path in sweep.root.rglob("*") if path != sweep.order_lock}
    before = cpu_seconds_of_children()
    again = host.run("sweep", str(host.folder / "pairs.yaml"))
    assert cpu_seconds_of_children() - before < 3, "it answers at once"
    assert again.returncode == 0 and "4 on disk" in again.stdout and "to start" not in again.stdout
    assert {path: path.stat().st_mtime_ns for path in sweep.root.rglob("*") if path != sweep.order_lock} == written
    assert not host.processes()


def test_no_secret_and_no_private_path_is_recorded(finished: Finished) -> None:
    host = finished.host
    places = [str(host.folder), str(ROOT), sys.prefix, str(Path.home()) + "/"]
    for path in host.sweep("pairs").root.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [name for name, value in SECRETS.items() if value.encode() in content], path
            if path.suffix in (".json", ".jsonl", ".md"):
                assert not [place for place in places if place.encode() in content], path


def test_a_store_answers(finished: Finished) -> None:
    host = finished.host
    status = host.run("status", "pairs").stdout
    assert "pairs: 4 COMPLETED" in status and "120/120" in status
    assert "pairs" in host.run("status").stdout
    (listed,) = json.loads(host.run("status", "--json").stdout)["sweeps"]
    assert listed["bytes"] > 0 and (listed["sweep"], listed["runs"]) == ("pairs", {"COMPLETED": 4})
    assert host.run("status", "pairs", "--watch", seconds=120).returncode == 0
    json.loads(host.run("status", "pairs", "--watch", "--json", seconds=120).stdout)
    assert json.loads(host.run("cancel", "pairs", "--json").stdout) == {"format": 1, "cancelled": []}
    run_id = host.run_ids("pairs")[0]
    assert f"# {run_id}, attempt 1" in host.run("logs", run_id).stdout
    assert f"# {run_id}, attempt 1" in host.run("logs", f"pairs/{run_id}").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "pair"], "did you mean 'pairs'?"),
        (["logs", "eager"], "matches several runs"),
        (["logs", "no-such-run"], "begins with 'no-such-run'"),
        (["logs", "torch_compile", "--attempt", "2"], "matches several runs"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(finished: Finished, arguments: list[str], said: str) -> None:
    answer = finished.host.run(*arguments)
    assert answer.returncode == 1 and said in answer.stderr


def test_a_torn_last_line_is_a_missing_step(copied: Host) -> None:
    """A crash of the machine leaves such a line. The run's outcome remains, but its pair does not pass."""
    run_id = next(run_id for run_id in copied.run_ids("pairs") if run_id.startswith("torch_compile"))
    metrics = copied.sweep("pairs").run(run_id).attempt(1).metrics
    metrics.write_bytes(metrics.read_bytes()[:-20])
    assert copied.run("report", "pairs").returncode == 3
    assert "119" in (copied.sweep("pairs").report / "report.md").read_text()


def test_a_damaged_plan_is_one_message_and_is_written_anew(copied: Host) -> None:
    plan = copied.sweep("pairs").plan
    whole = plan.read_text()
    commands = (["status", "pairs"], ["status"], ["report", "pairs"], ["cancel", "pairs"], ["resume", "pairs"])
    # All commands read the plan with one function, so each command is tested with one kind of damage.
    for damaged, command in zip((whole[:1000], "[]", "{}", "null", ""), commands, strict=True):
        plan.write_text(damaged)
        answer = copied.run(*command)
        assert answer.returncode == 2 and answer.stderr.startswith("error: "), command
        assert answer.stderr.count("\n") == 1 and "plan.json" in answer.stderr
    again = copied.run("sweep", str(copied.folder / "pairs.yaml"))
    assert again.returncode == 0 and plan.read_text() == whole


def test_another_recipe_does_not_take_the_name_of_results(copied: Host) -> None:
    sweep, path = copied.sweep("pairs"), str(copied.folder / "pairs.yaml")
    before = {path: path.read_bytes() for path in (sweep.plan, *sweep.report.rglob("*")) if path.is_file()}
    other = copied.run("sweep", path, "training.steps=60", "--no-wait")
    assert other.returncode == 1
    assert "sweep 'pairs' has 4 runs with results of pairs.yaml" in other.stderr and "name=pairs-2" in other.stderr
    assert {path: path.read_bytes() for path in before} == before
    # Nor does the same recipe, on a host that can run none of its cells.
    plan = json.loads(sweep.plan.read_bytes())
    sweep.plan.write_text(json.dumps(plan | {"recipe": plan["recipe"].replace("device: cpu", "device: cuda")}))
    other = copied.run("sweep", path, "resources.device=cuda", "--no-wait")
    assert other.returncode == 1 and "name=pairs-2" in other.stderr
    sweep.plan.write_bytes(before[sweep.plan])
    # A sweep may grow, and a recipe may be corrected if its runs gave no results.
    assert copied.run("sweep", path, "repeats=1").returncode in (0, 4)
    for outcome in sweep.root.glob("runs/*/attempts/*/outcome.json"):
        outcome.write_text(json.dumps(json.loads(outcome.read_bytes()) | {"outcome": "FAILED"}))
    assert copied.run("sweep", path, "training.steps=2", "repeats=1", "--no-wait").returncode == 0


def test_a_damaged_order_is_one_message(copied: Host) -> None:
    (order,) = copied.sweep("pairs").root.glob("bundles/*/bundle.json")
    order.write_text('{"bundle_id": ')
    answer = copied.run("sweep", str(copied.folder / "pairs.yaml"))
    assert answer.returncode == 2 and "delete it, then resume" in answer.stderr
    order.unlink()
    assert copied.run("sweep", str(copied.folder / "pairs.yaml")).returncode == 0


def test_a_damaged_outcome_counts_again_once_its_attempt_has_been_moved_away(host: Host) -> None:
    (run_id,) = host.begin_unwatched(recipe("mini", steps=20))
    host.wait_for_nobody()
    attempt = host.sweep("mini").run(run_id).attempt(1)
    attempt.outcome.write_text("{")
    assert host.states("mini") == {run_id: "INTERRUPTED"}
    assert f"{run_id}/attempts/1/outcome.json: not JSON" in host.run("status", "mini").stdout
    assert host.run("logs", run_id).returncode == 0
    again = host.run("sweep", str(host.folder / "mini.yaml"))
    assert again.returncode == 3 and f"{run_id}/attempts/1/outcome.json cannot be read" in again.stdout
    resumed = host.run("resume", "mini")
    assert resumed.returncode == 3, "whatever the attempt after it came to"
    assert f"{run_id} runs again, as attempt 2: {attempt.outcome}: not JSON" in resumed.stdout
    assert f"No attempt of it counts until {attempt.root} is moved away" in resumed.stdout
    assert host.attempts("mini") == {run_id: [1, 2]}
    attempt.root.rename(host.folder / "away")
    assert host.run("resume", "mini").returncode == 0
    assert host.attempts("mini") == {run_id: [2]}


@pytest.mark.parametrize("store", ["a-file/sweeps", "/sys/kernel/sweeps"])
def test_a_store_that_cannot_be_made_is_one_message(host: Host, store: str) -> None:
    (host.folder / "a-file").write_text("")
    host.store = host.folder / store
    _says_that_it_cannot_write(host)


def test_a_full_store_is_one_message(host: Host) -> None:
    _says_that_it_cannot_write(host, limit_bytes=500)


def _says_that_it_cannot_write(host: Host, limit_bytes: int | None = None) -> None:
    answer = host.run("sweep", host.write(recipe("mini")), limit_bytes=limit_bytes)
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: ") and answer.stderr.count("\n") == 1
    assert "cannot be written" in answer.stderr and "--store" in answer.stderr
    assert not host.processes()


@pytest.mark.slow
def test_repeats_stop_once_the_verdicts_are_final_and_the_rest_can_be_asked_for(host: Host) -> None:
    """Compiled kernels round differently, and margins of 0 do not allow that. The verdict is DIVERGED, whatever more
    repeats show."""
    margins = {"loss": 0.0, "grad_norm": 0.0}
    content = recipe("auto", steps=12, graphed=True, equivalence=margins) | {"repeats": "auto"}
    file = host.write(content)
    done = host.run("sweep", file)
    assert done.returncode == ExitCode.FAILED, done.stdout + done.stderr
    assert "up to 12 runs to start" in done.stdout
    assert "Stopped after 2 of up to 6 pairs: speed and loss verdicts of " in done.stdout
    states = host.states("auto")
    made, rest = list(states)[:4], list(states)[4:]
    assert {states[run] for run in made} == {"COMPLETED"} and {states[run] for run in rest} == {"NOT_NEEDED"}
    status = host.run("status", "auto").stdout
    assert "auto: 4 COMPLETED, 8 NOT_NEEDED" in status and "its cell's verdicts are settled without it" in status
    report = json.loads((host.sweep("auto").report / "report.json").read_text())
    assert report["summary"]["unfinished_runs"] == 0 and [len(cell["runs"]) for cell in report["cells"]] == [2, 2]
    resumed = host.run("resume", "auto")
    assert resumed.returncode == ExitCode.FAILED and "4 on disk; left as they are: 8 NOT_NEEDED" in resumed.stdout
    assert "8 runs to start" in host.run("sweep", file, "repeats=6", "--no-wait").stdout
    assert "cancelled" in host.run("cancel", "auto").stdout
