"""Share fixtures and settings among all tests, and group tests for pytest-xdist."""

from __future__ import annotations

import gc
import getpass
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from launch.common.parent_death import PARENT
from tests.integration.fork_server import CAN_FORK, OF_RANKS, PRELOADED, RANK_SERVER
from tests.integration.host import ROOT, wait_until

# Threads that wait for each other spin, and take CPU time from the other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests must not read the sweeps of the user who runs them.
os.environ.pop("ORCHESTRATOR_STORE", None)

# Let Inductor trust the processor's flags for vector instructions. Otherwise each process that compiles loads a library
# for each instruction set, and the first process compiles these libraries. Inductor still tries AMX, because some
# virtual machines advertise AMX but forbid it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Inductor's cache may find code with vector instructions that ATEN_CPU_CAPABILITY forbids. PyTorch 2.13 then fails to
# compile. So each capability has its own cache.
INDUCTOR = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
CAPABILITY = os.environ.get("ATEN_CPU_CAPABILITY", "native")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(INDUCTOR / f"tests-{CAPABILITY}"))

# Tests write, sync and delete tens of thousands of small files, a few hundred MB in all. Keep them in memory if it has
# room for many times as much, and if programs may run from there.
IN_MEMORY = Path("/dev/shm")
if IN_MEMORY.is_dir():
    room = os.statvfs(IN_MEMORY)
    if room.f_bavail * room.f_frsize > 4e9 and not room.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# An example may take long while other tests use the cores.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

ONE_BY_ONE = {"integration", "slurm"}
"""Folders whose tests wait more than they compute. Each of these tests may run in any process."""

OF_A_FOLDER = ("gpu", "slurm", "browser")
"""Marks of tests that belong in the folder of that name (Makefile)."""

OF_NAMED_FILES = ("slow", "exhaustive")
"""Marks by which the Makefile finds the files of such tests."""
EXHAUSTIVE = bool(os.environ.get("EXHAUSTIVE"))
"""Whether tests with the mark ``exhaustive`` run."""

FORK_SERVER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Start two fork servers for all processes of a session, because their imports take several CPU seconds each. They
    import at the first request."""
    if (given := getattr(config, "workerinput", None)) is not None:
        config.stash[FORK_SERVER] = Path(given["fork_server"])
        return
    folder = tempfile.TemporaryDirectory()  # A socket's path may have 107 characters.
    config.add_cleanup(folder.cleanup)
    path = config.stash[FORK_SERVER] = Path(folder.name) / "forks"
    ranks = Path(folder.name) / "ranks"
    os.environ[RANK_SERVER] = str(ranks)
    for socket, modules in ((path, PRELOADED), (ranks, OF_RANKS)):
        config.add_cleanup(start_server(socket, modules))
    for socket in (path, ranks):
        wait_until(socket.exists, 120, "the server of forks")


def start_server(path: Path, modules: tuple[str, ...]) -> Callable[[], None]:
    """Start a server, and return what ends it."""
    fonts = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "matplotlib")
    settings = {"MPLCONFIGDIR": str(fonts), "OMP_NUM_THREADS": "1", PARENT: str(os.getpid())}
    command = [sys.executable, "-u", "-m", "tests.integration.fork_server", str(path), *modules]
    server = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, start_new_session=True)

    def end() -> None:
        server.kill()
        server.wait()

    return end


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each process of pytest-xdist where the server is."""
    node.workerinput["fork_server"] = str(node.config.stash[FORK_SERVER])


def pytest_report_header() -> list[str]:
    why = "no rank is forked: tests/integration/fork_server.py does not fit this Python's subprocess"
    return [] if CAN_FORK else [why]


@cache
def names(path: Path, mark: str) -> bool:
    """Return whether the Makefile finds the file by this mark."""
    return f"pytest.mark.{mark}" in path.read_text()


@pytest.hookimpl(tryfirst=True)  # Run before xdist, which reads the marks in its own hook.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a module together, because they share imports and compiled code. Do the same for tests that
    share a sweep. Leave exhaustive ones out, unless they are asked for."""
    if not EXHAUSTIVE and (left := [item for item in items if item.get_closest_marker("exhaustive")]):
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    for item in items:
        astray = [m for m in OF_A_FOLDER if item.get_closest_marker(m) and item.path.parent.name != m]
        if astray:
            raise pytest.UsageError(f"{item.nodeid} is marked {astray[0]}: it runs in tests/{astray[0]} alone")
        for mark in OF_NAMED_FILES:
            if item.get_closest_marker(mark) and not names(item.path, mark):
                raise pytest.UsageError(
                    f"{item.nodeid} is {mark}, and its file does not name pytest.mark.{mark}: Makefile"
                )
        if item.path.parent.name not in ONE_BY_ONE:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        elif "finished" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("finished"))


# Imported modules are never freed. So garbage collections need not scan them, neither during the imports nor later.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


FOLDERS = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new folder. To number it, pytest's own fixture lists the folders of all tests before."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return tmp_path_factory.mktemp(f"{name}{next(FOLDERS)}", numbered=False)


@pytest.fixture(scope="session")
def compile_cache() -> Path:
    """Return the folder of Inductor's cache. All tests share it, in all their processes and in later sessions."""
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


@pytest.fixture(scope="session")
def fork_server(pytestconfig: pytest.Config) -> Path:
    """Return the socket of the server from which commands, ranks and reports are forked."""
    return pytestconfig.stash[FORK_SERVER]
