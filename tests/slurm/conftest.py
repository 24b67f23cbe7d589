"""One cluster for all tests that ask for it, brought up by the first: five seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Up and idle at first. A test that changes a node or a daemon puts it back."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.up(with_this_process=True)
    yield cluster
    cluster.down()
