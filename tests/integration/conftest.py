"""The real thing: nothing here is imitated, so that each test costs some seconds for each run that it makes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import pytest

from tests.integration.host import Finished, Host, recipe


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's: what one test has compiled the others find."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def host(tmp_path: Path, compile_cache: Path) -> Iterator[Host]:
    host = Host(tmp_path, compile_cache)
    yield host
    host.clear()


@pytest.fixture(scope="session", autouse=True)
def _pairs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: Path
) -> Iterator[Optional[tuple[Host, subprocess.Popen[str]]]]:
    """Two pairs of an eager and a compiled run, tracked offline. Begun before the first test and awaited by those that
    ask for it: the first compilation takes longer than all the rest."""
    if not any("finished" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    host = Host(tmp_path_factory.mktemp("pairs"), compile_cache)
    content = recipe("pairs", steps=120, graphed=True, repeats=2, wandb={"mode": "offline"})
    yield host, host.start("sweep", host.write(content))
    host.clear()


@pytest.fixture(scope="session")
def finished(_pairs: tuple[Host, subprocess.Popen[str]]) -> Finished:
    host, process = _pairs
    out, err = process.communicate(timeout=300)
    assert not err, err
    return Finished(host, "pairs", out, process.returncode)
