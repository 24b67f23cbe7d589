"""Test ``doctor`` on a real cluster."""

from __future__ import annotations

import json

import pytest

from tests.slurm.site import Site

pytestmark = pytest.mark.slurm


def test_doctor_looks_at_a_node_and_says_what_is_wrong(site: Site) -> None:
    site.profile("site", environment={"TMPDIR": "/tmp"}, setup=["echo a site prints"])
    done = site.run("doctor", "--cluster", "site", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    states = {name: check["state"] for name, check in checks.items()}
    assert states["Slurm"] == states["store"] == states["clock"] == "pass", checks
    assert states["software"] == "warn" and "no transformer-engine" in checks["software"]["found"], (
        "the cluster has GPUs"
    )
    assert "reads and writes it" in checks["store"]["found"]
    assert checks["partition gpu"]["found"].endswith("no time limit")
    site.profile("elsewhere", partition="nowhere")
    done = site.run("doctor", "--cluster", "elsewhere")
    assert done.returncode == 3 and "partition: the cluster has no partition 'nowhere'\nSlurm: known: " in done.stdout
    site.profile("broken", python="/nowhere/python")
    done = site.run("doctor", "--cluster", "broken")
    assert done.returncode == 3 and "fail  node" in done.stdout and "/nowhere/python" in done.stdout
