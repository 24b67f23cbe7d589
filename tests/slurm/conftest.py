"""One cluster for all tests that ask for it, brought up by the first: five seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.site import Site


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Up and idle at first. A test that changes a node or a daemon puts it back."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.up(with_this_process=True)
    yield cluster
    cluster.down()


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's: what one test has compiled the others find."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def site(tmp_path: Path, compile_cache: Path, cluster: Cluster) -> Iterator[Site]:
    """A login node with a store of its own; afterwards none of its jobs is left."""
    site = Site(tmp_path, compile_cache, cluster)
    yield site
    site.clear()
