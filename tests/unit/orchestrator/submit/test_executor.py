"""Test the choice of the executor: Slurm where it is set up, else this host, and never one that the plan was not made for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from launch.contract.plan import Margins, Plan
from orchestrator.errors import InputError, SystemFault
from orchestrator.submit import executor
from orchestrator.submit.executor import check_executor, outage, resolve_executor


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """These programs are the whole PATH, so no Slurm is installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    executor._check_slurm.cache_clear()
    yield tmp_path
    executor._check_slurm.cache_clear()


def install(folder: Path, sinfo: str) -> None:
    for name, script in (("sbatch", ""), ("sinfo", sinfo)):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


def test_without_slurm_it_is_this_host_and_nobody_wonders() -> None:
    assert resolve_executor("auto") == "local"
    assert outage() == ""
    with pytest.raises(InputError, match="slurm: there is no sbatch on PATH"):
        resolve_executor("slurm")


def test_slurm_is_taken_where_it_answers(programs: Path) -> None:
    install(programs, "echo 'gpu* up infinite 4 idle node[1-4]'")
    assert resolve_executor("auto") == resolve_executor("slurm") == "slurm"
    assert outage() == ""


AWAY = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"
NONE_HERE = "sinfo: fatal: Could not establish a configuration source"


@pytest.mark.parametrize("name", ["auto", "slurm"])
def test_slurm_that_does_not_answer_is_an_outage_and_nothing_runs_here_instead(programs: Path, name: Any) -> None:
    install(programs, f"echo '{AWAY}' >&2; exit 1")
    with pytest.raises(SystemFault, match="connect failure") as caught:
        resolve_executor(name)
    assert "--executor local" in str(caught.value)
    assert outage() == f"Slurm is installed here, but does not answer ({AWAY})"


def test_slurm_that_hangs_is_an_outage(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(programs, "while :; do :; done")
    monkeypatch.setattr(executor, "ANSWER_SECONDS", 0.1)
    with pytest.raises(SystemFault, match=r"does not answer \(no answer within 0.1 s\)"):
        resolve_executor("auto")


def test_an_sbatch_without_sinfo_is_an_outage(programs: Path) -> None:
    install(programs, "")
    (programs / "sinfo").unlink()
    with pytest.raises(SystemFault, match="an sbatch on PATH, but no sinfo"):
        resolve_executor("auto")


def test_programs_without_a_cluster_are_no_outage(programs: Path) -> None:
    install(programs, f"echo '{NONE_HERE}' >&2; exit 1")
    assert resolve_executor("auto") == "local"
    assert outage() == ""
    with pytest.raises(InputError, match="Slurm is not configured on this host"):
        resolve_executor("slurm")


@pytest.mark.parametrize("name", ["local", "debug"])
def test_whoever_asks_for_this_host_gets_it(programs: Path, name: Any) -> None:
    install(programs, "exit 0")
    assert resolve_executor(name) == name


@pytest.mark.parametrize(("scheduler", "now", "way_out"), [
    ("host", "local", ""),
    ("host", "debug", ""),
    ("slurm", "slurm", ""),
    ("host", "slurm", "--executor local, or plan it again, with --executor slurm and the command"),
    ("slurm", "local", "--executor slurm, or plan it again, with --executor local and the command"),
])  # fmt: skip
def test_a_sweep_goes_on_where_it_was_planned(scheduler: Literal["host", "slurm"], now: Any, way_out: str) -> None:
    plan = Plan("x", "", "x.yaml", Margins(), (), (), scheduler=scheduler)
    if not way_out:
        check_executor(plan, now)
        return
    with pytest.raises(InputError) as caught:
        check_executor(plan, now)
    assert way_out in str(caught.value)


def test_a_sweep_of_slurm_waits_until_slurm_answers(programs: Path) -> None:
    install(programs, f"echo '{AWAY}' >&2; exit 1")
    plan = Plan("x", "", "x.yaml", Margins(), (), (), scheduler="slurm")
    with pytest.raises(InputError) as caught:
        check_executor(plan, resolve_executor("local"))
    assert "connect failure" in str(caught.value) and "resume it once Slurm answers" in str(caught.value)
