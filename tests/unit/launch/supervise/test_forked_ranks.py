"""Test ranks that are forks of a server: what they inherit, how they end, and that neither they nor the server leave
anything.

The server has no torch here (stub_fork_server.py). tests/integration/test_forked_ranks.py has real ones.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from launch.contract.paths import AttemptPaths
from launch.contract.spec import Placement, RunSpec
from launch.supervise import forked_ranks, local_ranks
from launch.supervise.child_process import start
from launch.supervise.forked_ranks import ForkedRank, ForkServer, ForkServers
from launch.supervise.local_ranks import LocalRanks

STUB = "tests.unit.launch.supervise.stub_fork_server"
ROOT = Path(__file__).parents[4]
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SECONDS = 120.0
ANY = RunSpec(engine="any")  # type: ignore[arg-type]


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServers]:
    """Make this process the parent of orphans. In a container, the usual parent may be a process that reaps none."""
    monkeypatch.setattr(forked_ranks, "SERVER", STUB)
    set_subreaper = functools.partial(ctypes.CDLL(None).prctl, 36)  # PR_SET_CHILD_SUBREAPER
    assert set_subreaper(1, 0, 0, 0) == 0
    servers, others = ForkServers(tmp_path / "server.log"), children()
    yield servers
    servers.close()
    left = children() - others
    running = [pid for pid in left if Path(f"/proc/{pid}/exe").exists()]
    for pid in left - set(running):
        os.waitpid(pid, 0)
    set_subreaper(0, 0, 0, 0)
    assert not running


def children() -> set[int]:
    """Return the children of this process, of the server, and so on. Include those that have ended but were not reaped."""
    found, new = set(), {os.getpid()}
    while new:
        lists = [path for pid in new for path in Path(f"/proc/{pid}/task").glob("*/children")]
        new = {int(pid) for path in lists for pid in path.read_text().split()}
        found |= new
    return found


def server_for(servers: ForkServers) -> ForkServer:
    server = servers.serve(ANY, ENVIRONMENT)
    assert server is not None
    return server


def fork(server: ForkServer, log: Path, *arguments: str, **place: str) -> ForkedRank:
    (rank,) = server.fork(arguments, [place], log)
    return rank


def wait_to_run(rank: ForkedRank, server: ForkServer) -> int:
    """Return the id of the rank's process. Before the rank is forked, this is the server's id."""
    deadline = time.monotonic() + SECONDS
    while rank.pid == server.pid:
        assert rank.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return rank.pid


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_fork_has_what_a_new_interpreter_has(servers: ForkServers, tmp_path: Path) -> None:
    log, place = tmp_path / "rank.log", {"RANK": "1", "MASTER_PORT": "29500"}
    arguments = ("describe", str(tmp_path / "seen.json"))
    server = server_for(servers)
    other = fork(server, log, "sleep")
    assert fork(server, log, *arguments, **place).wait(SECONDS) == 0
    os.killpg(other.pid, signal.SIGKILL)
    forked = json.loads((tmp_path / "seen.json").read_text())
    assert start(STUB, ("rank", *arguments), ENVIRONMENT | place, log, subprocess.DEVNULL).wait(SECONDS) == 0
    assert forked == json.loads((tmp_path / "seen.json").read_text())
    assert forked["standard"] == [os.devnull, str(log), str(log)]


@pytest.mark.parametrize(
    ("arguments", "code"), [(("exit", "0"), 0), (("exit", "3"), 3), (("raise",), 1), (("die",), -signal.SIGSEGV)]
)
def test_a_rank_ends_as_its_process_does(
    servers: ForkServers, tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    log = tmp_path / "rank.log"
    assert fork(server_for(servers), log, *arguments).wait(SECONDS) == code
    assert ("a rank's own error" in log.read_text()) == (arguments == ("raise",))


def test_a_rank_leaves_its_output_and_no_process(servers: ForkServers, tmp_path: Path) -> None:
    log, left = tmp_path / "rank.log", tmp_path / "left"
    assert fork(server_for(servers), log, "leave", str(left)).wait(SECONDS) == 0
    assert "Python's output" in log.read_text() and "C's output" in log.read_text()
    deadline = time.monotonic() + SECONDS
    while Path(f"/proc/{left.read_text()}/exe").exists():
        assert time.monotonic() < deadline, "the process that the rank left runs"
        time.sleep(0.01)


def test_signals_reach_a_rank_and_the_next_order_reaps_it(servers: ForkServers, tmp_path: Path) -> None:
    server = server_for(servers)
    first = fork(server, tmp_path / "log", "sleep")
    pid = wait_to_run(first, server)
    os.killpg(pid, signal.SIGTERM)
    assert first.wait(SECONDS) == -signal.SIGTERM
    assert not is_gone(pid), "as a zombie, so that a late signal reaches no other process"
    assert fork(server, tmp_path / "log", "exit", "0").wait(SECONDS) == 0
    assert is_gone(pid)


def test_ranks_die_with_their_server(servers: ForkServers, tmp_path: Path) -> None:
    server = server_for(servers)
    ranks = server.fork(["sleep"], [{"RANK": "0"}, {"RANK": "1"}], tmp_path / "log")
    pids = [wait_to_run(rank, server) for rank in ranks]
    os.kill(server.pid, signal.SIGKILL)
    assert [rank.wait(SECONDS) for rank in ranks] == [-signal.SIGKILL] * 2
    assert "was killed, because its fork server ended (exit code -9)" in (tmp_path / "log").read_text()
    assert not any(rank.is_lost() for rank in ranks), "they had begun, so they do not begin again"
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids), "a rank runs"
    again = server_for(servers)
    assert again is not server and fork(again, tmp_path / "log", "exit", "0").wait(SECONDS) == 0


def test_a_server_that_does_not_answer_is_killed(
    servers: ForkServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forked_ranks, "REPORT_SECONDS", 0.2)
    server = server_for(servers)
    rank = fork(server, tmp_path / "log", "sleep")
    pid = wait_to_run(rank, server)
    os.kill(server.pid, signal.SIGSTOP)
    os.killpg(pid, signal.SIGKILL)
    assert rank.wait(SECONDS) == -signal.SIGKILL
    assert f"fork server {server.pid} does not report that rank {pid} ended" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_of_a_server_that_does_not_answer_keeps_its_exit_code(
    servers: ForkServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(forked_ranks, "REPORT_SECONDS", 0.2)
    server, gate = server_for(servers), tmp_path / "gate"
    rank = fork(server, tmp_path / "log", "exit_after", str(gate), str(code))
    wait_to_run(rank, server)
    os.kill(server.pid, signal.SIGSTOP)
    gate.touch()
    assert rank.wait(SECONDS) == code


def test_a_server_that_ends_leaves_no_zombie(servers: ForkServers, tmp_path: Path) -> None:
    others, server = children(), server_for(servers)
    assert [fork(server, tmp_path / "log", "exit", "0").wait(SECONDS) for _ in range(2)] == [0, 0]
    servers.close()
    assert children() <= others


def test_another_environment_or_source_gets_another_server(
    servers: ForkServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server_for(servers)
    assert server_for(servers) is first
    other = servers.serve(ANY, ENVIRONMENT | {"NCCL_ALGO": "Ring"})
    assert other is not None and other is not first and is_gone(first.pid)
    monkeypatch.setattr(forked_ranks, "source_digest", lambda: "edited")
    edited = servers.serve(ANY, ENVIRONMENT | {"NCCL_ALGO": "Ring"})
    assert edited is not None and edited is not other and is_gone(other.pid)


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AttemptPaths:
    """Return an attempt whose ranks are stubs of this process. They run until they are killed."""
    monkeypatch.setattr(local_ranks, "rank_program", lambda spec: (local_ranks.WORKER, spec.placement.ranks_per_node))
    stub = functools.partial(start, STUB, ("rank", "sleep"), stdin=subprocess.DEVNULL)
    monkeypatch.setattr(local_ranks, "start", lambda _module, _arguments, *rest: stub(*rest))
    attempt = AttemptPaths(tmp_path / "run" / "attempts" / "1")
    attempt.logs.mkdir(parents=True)
    return attempt


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("missing", "No module named 'no_such_module'"),
        ("cuda", "an import used CUDA"),
        ("driver", "CUDA does not start in a fork"),
        ("thread", "an import started threads"),
        ("process", "an import started a process"),
        ("hang", ""),
        ("any", "CUDA does not start in a fork"),
    ],
)
def test_without_a_server_ranks_are_new_interpreters(
    servers: ForkServers, attempt: AttemptPaths, tmp_path: Path, engine: str, why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    spec = RunSpec(engine=engine, placement=Placement(ranks_per_node=2))  # type: ignore[arg-type]
    variables = ENVIRONMENT | ({"CUDA_VISIBLE_DEVICES": "0"} if engine == "any" else {})
    ranks = LocalRanks(attempt, spec, variables, servers)
    if engine == "hang":
        os.kill(ranks._ranks[0].pid, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS
    while not all(isinstance(rank, subprocess.Popen) for rank in ranks._ranks):
        assert ranks.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    assert "the fork server ended, so each rank is started as a new interpreter" in capsys.readouterr().err
    assert why in (tmp_path / "server.log").read_text()
    ranks.end()
    assert ranks.poll() == -signal.SIGTERM
    assert servers.serve(spec, ranks._shared) is None, "it is not tried again"


def test_the_variables_of_one_attempt_need_no_other_server(attempt: AttemptPaths) -> None:
    """A second server would import torch again: 10 s on a GPU host, for this attempt and for the next run."""
    servers = mock.Mock(spec=ForkServers)
    for added in ({}, {"THIS_ATTEMPT": "1"}):
        LocalRanks(attempt, ANY, ENVIRONMENT, servers, added)
        (_, (place,), _), _ = servers.serve.return_value.fork.call_args
        assert added.items() <= place.items()
    (first, second) = (call.args for call in servers.serve.call_args_list)
    assert first == second


def test_ranks_that_end_while_their_server_imports_do_not_begin(
    servers: ForkServers, attempt: AttemptPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    others = children()
    ranks = LocalRanks(attempt, RunSpec(engine="hang"), ENVIRONMENT, servers)  # type: ignore[arg-type]
    assert ranks.poll() is None
    ranks.end()
    assert ranks.poll() is not None and children() <= others
    assert capsys.readouterr().err == ""
