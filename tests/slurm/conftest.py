"""Start one cluster for all tests of a process, with the first test that needs it. This takes five seconds."""

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
    """Start a cluster with all nodes idle. A test that changes a node or a daemon must restore it."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    with (Path(tempfile.gettempdir()) / f"slurm-ports-{os.getuid()}").open("w") as ports:
        # Only one process at a time looks for free ports, until its daemons listen on them.
        fcntl.flock(ports, fcntl.LOCK_EX)
        cluster.up(with_this_process=True)
    yield cluster
    cluster.down()


@pytest.fixture
def site(tmp_path: Path, compile_cache: Path, cluster: Cluster, fork_server: Path) -> Iterator[Site]:
    """Make a login node with a store of its own, and end its jobs afterwards."""
    site = Site(tmp_path, compile_cache, cluster, fork_server)
    yield site
    site.clear()
