"""One cluster for all tests of a process, brought up by the first: five seconds."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.site import Site


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Up and idle at first. A test that changes a node or a daemon puts it back."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    with (Path(tempfile.gettempdir()) / f"slurm-ports-{os.getuid()}").open("w") as ports:
        fcntl.flock(ports, fcntl.LOCK_EX)  # one at a time looks for free ports, until it listens on them
        cluster.up(with_this_process=True)
    yield cluster
    cluster.down()


@pytest.fixture
def site(tmp_path: Path, compile_cache: Path, cluster: Cluster) -> Iterator[Site]:
    """A login node with a store of its own; afterwards none of its jobs is left."""
    site = Site(tmp_path, compile_cache, cluster)
    yield site
    site.clear()
