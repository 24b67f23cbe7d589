"""What several kinds of tests share, and which of them may run beside each other (pytest-xdist)."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

# Inductor takes the processor's word for its vector instructions. Else each process that compiles has a library loaded for
# each set of them, and the first compiles these. For AMX, which some virtual machines advertise and forbid, it does so still.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

settings.register_profile("busy", deadline=None)  # an example may take long where other tests want the cores
settings.load_profile("busy")

ONE_BY_ONE = {"integration", "slurm"}
"""Their tests wait more than they compute, each for processes of its own."""

OF_A_FOLDER = ("slurm", "browser")
"""Marks of tests that are collected from the folder of that name alone (Makefile)."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one module share what it imports, compiles and keeps, and stay together; so do those of one sweep."""
    for item in items:
        astray = [m for m in OF_A_FOLDER if item.get_closest_marker(m) and item.path.parent.name != m]
        if astray:
            raise pytest.UsageError(f"{item.nodeid} is marked {astray[0]}: it runs in tests/{astray[0]} alone")
        if item.path.parent.name not in ONE_BY_ONE:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        elif "finished" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("finished"))


def pytest_collection_finish() -> None:
    gc.freeze()  # what has been imported stays: collections need not look through all of it each time


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's: what one test has compiled the others find, in whichever process they run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return folder / "inductor"
