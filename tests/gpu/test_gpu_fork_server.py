"""On a GPU, test that the imports of the fork server leave CUDA to the ranks, and start neither threads nor processes."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from launch.contract.spec import EngineName, RunSpec, Training
from launch.supervise.forked_ranks import SERVER, imports

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("engine", ["torch_native", "megatron"])
def test_a_server_can_fork_ranks_after_its_imports(engine: EngineName) -> None:
    names = imports(RunSpec(engine=engine, training=Training(compile="elementwise")))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        # It ends at once, because nobody can order a rank. A server that cannot fork ranks is ended by a signal.
        server = [sys.executable, "-m", SERVER, *names]
        done = subprocess.run(
            server, stdin=theirs.fileno(), start_new_session=True, check=False, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
