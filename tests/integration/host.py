"""Run the command line, supervisors, ranks and torch as processes, on recipes that take seconds."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.common.file_lock import Owner
from launch.contract.outcomes import Outcome, read_outcome
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.plan import read_plan
from launch.contract.records.events import read_events
from tests.integration.fork_server import CAN_FORK, SERVER, ForkedPopen

ROOT = Path(__file__).resolve().parents[2]
SECRETS = {"WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567", "HF_TOKEN": "hf_not_to_be_written_anywhere"}

STEPS = 60
"""Two seconds of steps on slow ranks: long enough to act during a run, and short enough to wait for its end."""
SLOW_RANKS = Path(__file__).parent / "slow_ranks"
MODEL = {
    "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 8,
    "ffn_hidden_size": 32, "vocab_size": 256,
}  # fmt: skip


def recipe(name: str, *, steps: int = STEPS, graphed: bool = False, repeats: int = 1, **fields: Any) -> dict[str, Any]:
    """Return a recipe of eager runs of a very small model, and of compiled ones too if ``graphed``."""
    training = {
        "steps": steps, "sequence_length": 16, "micro_batch_size": 1, "global_batch_size": 2, "precision": "fp32",
        "learning_rate": 1e-3,
    } | fields.pop("training", {})  # fmt: skip
    return {
        "name": name,
        "model": MODEL,
        "training": training,
        "cuda_graph": {"impl": "torch_compile" if graphed else "none"},
        "wandb": {"mode": "disabled"},
        "repeats": repeats,
        **fields,
        "resources": {"device": "cpu", **fields.get("resources", {})},
    }


def program_recipe(name: str, run: str, graphs: Mapping[str, list[str]], **command: Any) -> dict[str, Any]:
    """Return a recipe of a user's own program: 110 steps by ``run``, eager and with each of ``graphs``."""
    return {
        "name": name,
        "engine": "command",
        "command": {"run": run, "graphs": dict(graphs), **command},
        "training": {"steps": 110},
        "repeats": 1,
        "resources": {"device": "cpu"},
        "wandb": {"mode": "disabled"},
    }


class Host:
    """A host with its own store, slots and home, which no other test shares."""

    executor = "local"

    def __init__(self, folder: Path, cache: Path, fork_server: Path | None = None) -> None:
        """Create a host. With ``fork_server``, commands, fork servers and reports are forks of it, and runs of one rank
        first train slowly."""
        self.folder = folder
        self.store = folder / "store"
        for name in ("tmp", "home"):
            (folder / name).mkdir(parents=True)
        # Inductor looks for its precompiled C++ header only here. Building the header takes ten CPU seconds.
        headers = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        headers.mkdir(exist_ok=True)
        (folder / "tmp" / headers.name).symlink_to(headers)
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "ORCHESTRATOR_SLOTS": str(folder / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "MPLCONFIGDIR": str(cache / "matplotlib"),  # Matplotlib needs half a second to make its list of fonts.
            "TORCHINDUCTOR_VEC_ISA_OK": os.environ["TORCHINDUCTOR_VEC_ISA_OK"],
            **SECRETS,
        }
        if fork_server:
            self.fork_from(fork_server)
        if "ATEN_CPU_CAPABILITY" in os.environ:
            self.environment["ATEN_CPU_CAPABILITY"] = os.environ["ATEN_CPU_CAPABILITY"]

    def fork_from(self, server: Path) -> None:
        """From now on, fork commands, fork servers and reports from the tests' server."""
        self.environment |= {SERVER: str(server), "PYTHONPATH": f"{ROOT}{os.pathsep}{SLOW_RANKS}"}

    def end_fork_servers(self) -> None:
        """Let fork servers exit at their start, so that each rank is a new interpreter."""
        module = self.folder / "no_forks" / "sitecustomize.py"
        module.parent.mkdir()
        module.write_text("import sys\nif 'launch.train.fork_server' in sys.orig_argv: sys.exit('not on this host')")
        self.environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{module.parent}"
        self.environment.pop(SERVER, None)

    def write(self, content: dict[str, Any]) -> str:
        """Write a recipe from its content (JSON is YAML), and return its path."""
        path = self.folder / f"{content['name']}.yaml"
        path.write_text(json.dumps(content))
        return str(path)

    def start(self, *arguments: str, limit_bytes: int | None = None) -> subprocess.Popen[str]:
        """Start a command. No file may grow beyond ``limit_bytes``, as on a full disk."""
        command = [sys.executable, "-m", "orchestrator", *arguments, "--store", str(self.store)]
        if arguments[0] in ("sweep", "resume") and "--executor" not in arguments:
            command += ["--executor", self.executor]
        if arguments[0] in ("sweep", "resume", "report"):
            command += ["--allow-empty"]  # Most recipes of these tests are eager.
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if CAN_FORK and SERVER in self.environment and limit_bytes is None:
            return ForkedPopen(command, cwd=self.folder, env=self.environment, text=True, **pipes)
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, text=True, **pipes,
                                preexec_fn=lambda: _as_on_a_terminal(limit_bytes))  # fmt: skip

    def begin(self, content: dict[str, Any], *arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
        """Start a sweep. Return its process and its run ids, in order of execution."""
        process = self.start("sweep", self.write(content), *arguments)
        plan = self.sweep(content["name"]).plan
        wait_until(lambda: plan.exists() or process.poll() is not None, 120, "a plan")
        assert plan.exists(), process.communicate()
        return process, self.run_ids(content["name"])

    def begin_unwatched(self, content: dict[str, Any]) -> list[str]:
        """Start a sweep that no command watches, so that no report is written. Return its run ids, in order of
        execution."""
        assert self.run("sweep", self.write(content), "--no-wait").returncode == 0
        return self.run_ids(content["name"])

    def run(
        self, *arguments: str, seconds: float = 600, limit_bytes: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, limit_bytes=limit_bytes)
        out, err = process.communicate(timeout=seconds)
        assert "Traceback" not in out + err, out + err
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def sweep(self, name: str) -> SweepPaths:
        return SweepPaths(self.store / name)

    def run_ids(self, name: str) -> list[str]:
        """Return the runs of the plan, in order of execution."""
        return [run_id for bundle in read_plan(self.sweep(name)).bundles for run_id in bundle.run_ids]

    def states(self, name: str) -> dict[str, str]:
        """Return the state of each run by its id, in order of execution."""
        content = json.loads(self.run("status", name, "--json").stdout)
        return {row["run_id"]: row["state"] for row in content["runs"]}

    def attempts(self, name: str) -> dict[str, list[int]]:
        return {run: [a.number for a in self.sweep(name).run(run).attempts()] for run in self.run_ids(name)}

    def outcome(self, name: str, run_id: str) -> Outcome:
        outcome = read_outcome(self.sweep(name).run(run_id).attempts()[-1])
        assert outcome is not None
        return outcome

    # --- processes ---

    def processes(self) -> dict[int, str]:
        """Return the command line of everything that runs on this host, by process id."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and (
                    f"TMPDIR={self.folder / 'tmp'}".encode() in (folder / "environ").read_bytes().split(b"\0")
                    or (folder / "cwd").readlink() == self.folder  # In /proc, a fork has the environment of its server.
                ):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        # A process that has ended has no command line.
        return {pid: command for pid, command in found.items() if command}

    def process(self, module: str) -> int:
        """Return the id of the one process of ``python -m module``."""
        (pid,) = (pid for pid, command in self.processes().items() if f"-m {module} " in command)
        return pid

    def supervisor(self, name: str) -> int:
        """Return the id of the process that supervises the sweep's bundle."""
        (lock,) = self.sweep(name).root.glob("bundles/*/lock")
        return Owner(**json.loads(lock.read_text())).pid

    def wait_for_step(self, name: str, run_id: str, attempt: int = 1) -> AttemptPaths:
        """Wait until that attempt trains, and return its paths."""
        paths = self.sweep(name).run(run_id).attempt(attempt)
        wait_until(lambda: paths.metrics.exists() and paths.metrics.read_bytes().count(b"\n") > 5, 600, "a step")
        return paths

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold every rank of this host after six steps. It continues only after the block, however long the block
        takes. The block may end it. Ranks of runs with several ranks are not held."""
        hold = Path(self.environment["HOME"], "hold")
        hold.touch()
        yield
        hold.unlink()

    def wait_for_nobody(self, seconds: float = 120) -> None:
        wait_until(lambda: not self.processes(), seconds, "every process to end", self.processes)

    def clear(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _as_on_a_terminal(file_bytes: int | None) -> None:
    """Restore Ctrl-C in the child process, because a background shell may ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))


def cpu_seconds_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended. Unlike the clock, they do not depend on the
    load.
    """
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def rank_pid(attempt: AttemptPaths, rank: int = 0) -> int:
    return int(next(read_events(attempt, rank))["pid"])


def wait_until(
    condition: Callable[[], bool], seconds: float, what: str, found: Callable[[], object] | None = None
) -> None:
    deadline = time.monotonic() + seconds
    while not _holds(condition):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}{f': {found()}' if found else ''}"


def _holds(condition: Callable[[], bool]) -> bool:
    """Check the condition. If it fails, pause, so that checking takes a tenth of a core, unless one check takes long."""
    begun = time.monotonic()
    holds = condition()
    if not holds:
        took = time.monotonic() - begun
        time.sleep(max(0.02, min(9 * took, 1.0), 3 * took))
    return holds


@dataclass(frozen=True)
class Finished:
    """A sweep that has ended, with its command's output and exit code."""

    host: Host
    name: str
    out: str
    code: int
