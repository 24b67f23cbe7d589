"""Test the environment of a user's program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.contract.paths import AttemptPaths
from launch.contract.spec import Command, RunSpec, Training
from launch.supervise.user_command import program_variables


@pytest.mark.parametrize("framework", ["megatron_lm", "megatron_bridge"])
def test_deterministic_megatron_gets_its_variables_unless_the_user_sets_them(framework: str) -> None:
    """Without NCCL_ALGO, Megatron Bridge 0.6.2 ends at once."""
    command = Command(framework=framework, run="torchrun train.py")  # type: ignore[arg-type]
    spec = RunSpec(engine="command", command=command, training=Training(deterministic=True))
    attempt = AttemptPaths(Path("attempt"))
    variables = program_variables(spec, attempt, {"NCCL_ALGO": "CollnetChain"})
    assert variables["NCCL_ALGO"] == "CollnetChain" and variables["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert "NCCL_ALGO" not in program_variables(replace(spec, training=Training()), attempt, {})
