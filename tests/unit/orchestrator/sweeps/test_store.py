"""Test the folder of a sweep: who else can write to it, and what a plan on disk must contain."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from launch.common.atomic_files import read_json, write_json
from orchestrator.errors import InputError, SystemFault
from orchestrator.output.progress import warn_shared_store
from orchestrator.sweeps.store import VARIABLE, Store, default_store, read_plan, runs_of_other_plans
from tests.records import write_sweep

NOBODY = 65534


@pytest.mark.parametrize(
    ("mode", "owner", "group", "named"),
    [
        (0o755, -1, -1, ""),
        (0o757, -1, -1, "everybody can write here"),
        pytest.param(
            0o775, -1, NOBODY, "its group", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can")
        ),
        pytest.param(
            0o755, NOBODY, -1, "its owner", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can")
        ),
    ],
)
def test_others_who_can_write_a_store_are_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, owner: int, group: int, named: str
) -> None:
    os.chown(tmp_path, owner, group)
    tmp_path.chmod(mode)
    for _ in range(2):
        warn_shared_store(tmp_path)
    warning = capsys.readouterr().err
    assert warning.count("can write here") == bool(named) and named in warning


@pytest.mark.parametrize(
    ("value", "said"), [(True, "True"), ("x", "'x'"), ("0.1", "'0.1'"), (-1, "-1"), (None, "None")]
)
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_a_margin_that_is_no_number_is_refused_by_name(tmp_path: Path, metric: str, value: object, said: str) -> None:
    sweep = write_sweep(tmp_path, repeats=1, steps=4)
    content = read_json(sweep.plan)
    write_json(sweep.plan, content | {"margins": content["margins"] | {metric: value}})
    with pytest.raises(SystemFault, match=rf"margins.{metric} is {said}, not a number of at least 0"):
        read_plan(sweep)


def test_an_empty_variable_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert default_store() == Path("sweeps")


def test_an_unknown_sweep_is_looked_up_among_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sweep RECIPE makes one"):
        Store(tmp_path).find("other")
    write_sweep(tmp_path / "one", repeats=1, steps=4)
    with pytest.raises(InputError, match="status lists the sweeps"):
        Store(tmp_path).find("other")


def test_runs_of_earlier_plans_count_once_they_began(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    plan = read_plan(sweep)
    assert runs_of_other_plans(sweep, plan) == 0
    assert runs_of_other_plans(sweep, replace(plan, cells=plan.cells[:1])) == 2
    for run_id in plan.cells[1].run_ids:
        shutil.rmtree(sweep.run(run_id).root / "attempts")
    assert runs_of_other_plans(sweep, replace(plan, cells=plan.cells[:1])) == 0
