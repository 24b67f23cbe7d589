"""Test the choice of the executor: Slurm if it answers, else this host, and never one that the plan was not made for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from launch.contract.plan import Margins, Plan
from orchestrator.errors import InputError
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


@pytest.mark.parametrize(
    ("printed", "said", "why"),
    [
        (AWAY, f"Slurm does not answer ({AWAY})", "connect failure"),
        (NONE_HERE, "", "Slurm is not configured on this host"),
    ],
)
def test_programs_of_a_cluster_that_does_not_answer_are_an_outage(
    programs: Path, printed: str, said: str, why: str
) -> None:
    install(programs, f"echo '{printed}' >&2; exit 1")
    assert resolve_executor("auto") == "local"
    assert outage() == said
    with pytest.raises(InputError, match=why):
        resolve_executor("slurm")


@pytest.mark.parametrize("name", ["local", "debug"])
def test_whoever_asks_for_this_host_gets_it(programs: Path, name: Any) -> None:
    install(programs, "exit 0")
    assert resolve_executor(name) == name


@pytest.mark.parametrize(("scheduler", "now", "way_out"), [
    ("host", "local", ""),
    ("host", "debug", ""),
    ("slurm", "slurm", ""),
    ("host", "slurm", "--executor local, or plan it again: sweep x.yaml --executor slurm"),
    ("slurm", "local", "--executor slurm, or plan it again: sweep x.yaml --executor local"),
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
        check_executor(plan, resolve_executor("auto"))
    assert "connect failure" in str(caught.value) and "resume it once Slurm answers" in str(caught.value)
