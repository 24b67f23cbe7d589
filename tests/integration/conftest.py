"""Run the product without imitations. Each run of a test takes some seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.common.parent_death import PARENT
from tests.integration.host import ROOT, Finished, Host, recipe, wait_until


@pytest.fixture(scope="session")
def fork_server(compile_cache: Path) -> Iterator[Path]:
    """Start the server from which fork servers of ranks and reports are forked. Return its socket, whose path may have
    107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forks"
        settings = {"MPLCONFIGDIR": str(compile_cache / "matplotlib"), "OMP_NUM_THREADS": "1", PARENT: str(os.getpid())}
        command = [sys.executable, "-u", "-m", "tests.integration.fork_server", str(path)]
        server = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, start_new_session=True)
        wait_until(path.exists, 120, "the server of forks")
        yield path
        server.kill()
        server.wait()


@pytest.fixture
def host(tmp_path: Path, compile_cache: Path, fork_server: Path) -> Iterator[Host]:
    host = Host(tmp_path, compile_cache, fork_server)
    yield host
    host.clear()


@pytest.fixture
def another_host(tmp_path: Path, compile_cache: Path, fork_server: Path) -> Iterator[Host]:
    host = Host(tmp_path / "another", compile_cache, fork_server)
    yield host
    host.clear()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, compile_cache: Path) -> Iterator[Finished]:
    """Run a sweep of two pairs of an eager and a compiled run, tracked offline. None of its processes is a fork of the
    tests' server."""
    host = Host(tmp_path_factory.mktemp("pairs"), compile_cache)
    content = recipe("pairs", steps=120, graphed=True, repeats=2, wandb={"mode": "offline"})
    process = host.start("sweep", host.write(content))
    out, err = process.communicate(timeout=900)
    assert not err, err
    yield Finished(host, "pairs", out, process.returncode)
    host.clear()
