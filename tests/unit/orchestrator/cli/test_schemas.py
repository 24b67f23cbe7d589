"""Test that the output of ``--json`` has the form of docs/schemas.json. The tests of bisect and advise check theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, ValidationError

from orchestrator.cli.main import main
from tests.records import AttemptRecord, write_sweep
from tests.schemas import SCHEMAS, validated

COMMANDS = {
    "plan tiny_moe": "plan",
    "plan launch_bound --explain memory torch.attn.mlp": "memory",
    "status mine": "status",
    "status": "sweeps",
    "report mine": "report",
    "report failed": "report",
    "compare mine mine": "compare",
    "cancel mine": "cancel",
    "prune mine --dry-run": "prune",
    "doctor": "doctor",
}


def diverge(run: AttemptRecord) -> None:
    if run.spec.graphed:
        for row in run.metrics[60:]:
            row["loss"] = float("nan")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    write_sweep(tmp_path / "sweeps" / "mine", device="cuda", impls=("full_iteration", "torch"))
    write_sweep(tmp_path / "sweeps" / "failed", repeats=1, edit=diverge)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_output_for_programs_has_its_schema(here: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    main([*command.split(), "--json"])
    content = validated(COMMANDS[command], capsys.readouterr().out)
    with pytest.raises(ValidationError, match="99"):
        validated(COMMANDS[command], json.dumps(content | {"format": 99}))


def test_the_schemas_are_schemas_and_each_names_its_format() -> None:
    Draft202012Validator.check_schema(SCHEMAS)
    assert all("const" in schema["properties"]["format"] for schema in SCHEMAS["$defs"].values())
