"""On a GPU, test that ranks are forks of a server whose imports left the GPU alone, and train as new interpreters do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from launch.contract.paths import SweepPaths
from tests.records import trained_bits

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
NO_FORKS = "import sys\nif 'launch.train.fork_server' in sys.orig_argv: sys.exit('not on this host')"
RECIPE: dict[str, Any] = {
    "name": "alike",
    "model": {
        "num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 64,
        "ffn_hidden_size": 512, "vocab_size": 1024,
    },
    "training": {
        "steps": 16, "sequence_length": 128, "micro_batch_size": 1, "global_batch_size": 2, "precision": "bf16",
        "deterministic": True,
    },
    "repeats": 1,
    "resources": {"device": "cuda", "nodes": 1, "gpus_per_node": 1},
}  # fmt: skip
CASES = [
    pytest.param("torch_native", {}, {"impl": "full_iteration"}, id="native"),
    pytest.param("torch_native", {"compile": "elementwise"}, {"impl": "full_iteration"}, id="native-elementwise"),
    pytest.param("torch_native", {"compile": "whole"}, {"impl": "torch_compile"}, id="native-whole"),
    pytest.param(
        "megatron", {}, {"impl": "transformer_engine", "scope": ["attn"]}, id="megatron",
        marks=pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
    ),
]  # fmt: skip


def run(folder: Path, recipe: dict[str, Any], *path: str) -> SweepPaths:
    """Run ``recipe`` with ``path`` before the other folders of PYTHONPATH."""
    folder.mkdir()
    (folder / "alike.yaml").write_text(json.dumps(recipe))
    inherited = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    command = [
        sys.executable,
        "-m",
        "orchestrator",
        "sweep",
        str(folder / "alike.yaml"),
        "--executor",
        "local",
        "--allow-empty",
    ]
    done = subprocess.run(
        [*command, "--store", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*path, *inherited])},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return SweepPaths(folder / "alike")


def all_were_forks(sweep: SweepPaths) -> bool:
    """Print why not."""
    (log,) = sweep.root.glob("bundles/*/supervisor.log")
    print(log.read_text())
    return "the fork server ended, so each rank is started as a new interpreter" not in log.read_text()


@pytest.mark.parametrize(("engine", "training", "graph"), CASES)
def test_forks_train_as_new_interpreters_do(
    tmp_path: Path, engine: str, training: dict[str, Any], graph: dict[str, Any]
) -> None:
    recipe = RECIPE | {
        "engine": engine,
        "training": RECIPE["training"] | training,
        "sweep": {"grid": {"cuda_graph": [graph]}},
    }
    (tmp_path / "no_forks").mkdir()
    (tmp_path / "no_forks" / "sitecustomize.py").write_text(NO_FORKS)
    forked = run(tmp_path / "forked", recipe)
    started = run(tmp_path / "started", recipe, str(tmp_path / "no_forks"))
    assert all_were_forks(forked) and not all_were_forks(started)
    runs = sorted(path.name for path in (forked.root / "runs").iterdir())
    assert len(runs) == 2
    for run_id in runs:
        one, other = (sweep.run(run_id).attempt(1) for sweep in (forked, started))
        assert trained_bits(one) == trained_bits(other)
        assert one.read(one.environment) == other.read(other.environment)


def test_ranks_on_the_cpus_of_a_gpu_host_are_forks_too(tmp_path: Path) -> None:
    """Inductor asks for GPUs while it is imported, also if the run uses none."""
    training = RECIPE["training"] | {"steps": 8, "precision": "fp32", "compile": "elementwise"}
    recipe = RECIPE | {"training": training, "cuda_graph": {"impl": "none"}, "resources": {"device": "cpu"}}
    sweep = run(tmp_path / "forked", recipe)
    assert all_were_forks(sweep)
