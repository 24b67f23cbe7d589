"""Test the checks that ``doctor`` makes from its findings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.main import main
from orchestrator.workflow.doctor import judge_node

NODE: dict[str, Any] = {
    "host": "node1",
    "time": 100.0,
    "sees_file": True,
    "write_error": "",
    "came_back": True,
    "python": "/usr/bin/python3",
    "missing": [],
    "driver": "580.1",
    "versions": {
        "python": "3.12.1",
        "torch": "2.11.0",
        "cuda": "13.0",
        "transformer-engine": "2.11",
        "megatron-core": "0.16.1",
    },
    "hardware": {"gpus": ["NVIDIA H200"], "gpu_memory_bytes": [150 << 30]},
    "foreign_bytes": [0, 0],
    "cudnn": 91900,
    "nccl": "2.28.3",
    "other_cudnn": [],
}
CPU = {"hardware": {"gpus": []}, "driver": None, "cudnn": None, "nccl": ""}


@pytest.mark.parametrize(("wants_gpu", "changes", "wrong"), [
    (True, {}, {}),
    (True, {"time": 94.9}, {"clock": "warn"}),
    (True, {"time": 116.0}, {"clock": "warn"}),
    (True, {"sees_file": False}, {"store": "fail"}),
    (True, {"write_error": "Read-only file system"}, {"store": "fail"}),
    (True, {"came_back": False}, {"store": "fail"}),
    (True, {"missing": ["torch>=2.11", "safetensors"]}, {"software": "fail"}),
    (True, {"versions": {"torch": "2.11.0"}}, {"software": "warn"}),
    (True, {"other_cudnn": ["/opt/libcudnn.so.9"]}, {"cuDNN": "warn"}),
    (True, {"nccl": ""}, {"NCCL": "fail"}),
    (True, {"foreign_bytes": [0, 40 << 30]}, {"GPU memory": "warn"}),
    (True, CPU, {"GPUs": "fail"}),
    (False, CPU, {"GPUs": "warn"}),
])  # fmt: skip
def test_whatever_is_wrong_has_a_fix(wants_gpu: bool, changes: dict[str, Any], wrong: dict[str, str]) -> None:
    checks = list(judge_node(NODE | changes, wants_gpu, begun=100.0, ended=110.0))
    assert {check.name: check.state for check in checks if check.state != "pass"} == wrong
    assert {check.name for check in checks if check.fix} == wrong.keys()


def test_doctor_describes_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    code = main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert code == 3 * any(check["state"] == "fail" for check in checks.values())
    assert (checks["store"]["state"], checks["W&B"]["state"]) == ("pass", "warn") and "torch" in checks["software"][
        "found"
    ]
    assert list((tmp_path / "sweeps").iterdir()) == []
