"""Run the product without imitations. Each run of a test takes some seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.host import Finished, Host, recipe


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
def finished(tmp_path_factory: pytest.TempPathFactory, compile_cache: Path, fork_server: Path) -> Iterator[Finished]:
    """Run a sweep of two pairs of an eager and a compiled run, tracked offline. None of its processes is a fork of the
    tests' server, but later commands are."""
    host = Host(tmp_path_factory.mktemp("pairs"), compile_cache)
    content = recipe("pairs", steps=120, graphed=True, repeats=2, wandb={"mode": "offline"})
    process = host.start("sweep", host.write(content))
    out, err = process.communicate(timeout=900)
    assert not err, err
    host.fork_from(fork_server)
    yield Finished(host, "pairs", out, process.returncode)
    host.clear()
