"""Open the files that runs will read, before anything is submitted. Jobs would reject them one by one, hours later."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from launch.checkpoints.checkpoint import open_checkpoint
from launch.contract.errors import OrchestratorError
from launch.contract.plan import Plan
from launch.contract.spec import RunSpec
from launch.data.fields import check_length, text_files
from launch.data.tokenizer import load_tokenizer
from launch.frameworks.command_line import command_words, module_of, script_of
from orchestrator.errors import InputError, Problem
from orchestrator.suggestion import suggestion


def check_inputs(plan: Plan) -> None:
    """Open the files of all cells that will run. Read headers and tokenizers, but no tensors and no tokens.

    Raises:
        InputError: files are missing, damaged or do not fit the model; it lists all of them.
    """
    specs = [spec for cell in plan.cells if cell.state == "run" and (spec := cell.run_spec).engine != "command"]
    # Thousands of cells share few files.
    data = {(spec.data, spec.model.vocab_size, spec.training.sequence_length): spec for spec in specs}
    models = dict.fromkeys(spec.model for spec in specs if spec.model.weights != "random")
    checks: list[Callable[[], object]] = [partial(_open_data, spec) for spec in data.values()]
    checks += [partial(open_checkpoint, model) for model in models]
    messages = dict.fromkeys(message for check in checks if (message := _error_message(check)))
    if messages:
        raise InputError([Problem("", message) for message in messages])


def missing_programs(plan: Plan) -> list[Problem]:
    """Return which working folders, scripts, programs and modules of engine command are missing on this host."""
    specs = [cell.run_spec for cell in plan.cells if cell.state == "run" and cell.spec["engine"] == "command"]
    runs_here = plan.scheduler == "host"
    return list(dict.fromkeys(problem for spec in specs for problem in _missing_program(spec, runs_here)))


def _missing_program(spec: RunSpec, runs_here: bool) -> Iterator[Problem]:
    """Yield what the program of ``spec`` lacks. A job may have another PATH than this host."""
    words = command_words(spec, {})
    folder, script, program = Path(spec.command.workdir), script_of(words), words[0]
    found = shutil.which(folder / program if "/" in program else program, path=_folders(spec, "PATH", os.defpath))
    if not folder.is_dir():
        yield Problem(
            f"command.workdir = {folder}", "no such folder on this host", "name the folder in which command.run starts"
        )
    elif "{" not in script and not (folder / script).exists():
        fix = "correct the path of the script in command.run, or command.workdir, from which it counts"
        wanted = folder / script
        near = [path.name for path in wanted.parent.glob("*") if path.suffix == wanted.suffix]
        fix = suggestion(wanted.name, near, fix, cutoff=0.8)
        yield Problem(f"command.workdir = {folder}", f"no file {script} in it on this host", fix)
    elif "/" in program and (folder / program).is_file() and found is None:
        fix = "make it executable, or write its interpreter before it, such as python"
        yield Problem("command.run", f"{program} is not executable", fix)
    elif "{" not in program and found is None and (runs_here or "/" in program):
        fix = "correct the first word of command.run: it names a program on PATH, or has a path with a slash"
        yield Problem("command.run", f"no program {program} on this host", fix)
    elif (module := module_of(words)) and _is_ours(program, found) and not _has_package(module, spec):
        package = module.partition(".")[0]
        fix = f"correct the module in command.run, or install it, or start it from the folder that has {package}"
        yield Problem("command.run", f"no module {package} for {program} -m {module} on this host", fix)


def _is_ours(program: str, found: str | None) -> bool:
    """Return whether ``program`` is of the Python environment of this process. Others have other packages."""
    own, other = Path(sys.executable), Path(found or "")
    return program == "{python}" or (own.parent, own.resolve()) == (other.parent, other.resolve())


def _has_package(module: str, spec: RunSpec) -> bool:
    """Return whether this environment, the program's folder or its PYTHONPATH has the package of ``module``."""
    package = module.partition(".")[0]
    own = [spec.command.workdir, *_folders(spec, "PYTHONPATH").split(os.pathsep)]
    return not package.isidentifier() or bool(PathFinder.find_spec(package, own) or find_spec(package))


def _folders(spec: RunSpec, variable: str, default: str = "") -> str:
    """Return the folders in ``variable`` of the program, which starts in its working folder."""
    folders = spec.environment.get(variable, os.environ.get(variable, default)).split(os.pathsep)
    return os.pathsep.join(str(Path(spec.command.workdir) / folder) for folder in folders)


def _open_data(spec: RunSpec) -> None:
    data = spec.data
    if data.kind == "text":
        text_files(data)
    if data.kind == "indexed" and data.path is not None:
        from launch.data.indexed_dataset import open_pair  # It loads numpy.

        pair = open_pair(data.path)
        check_length(pair.name, len(pair.tokens), spec.training.sequence_length + 1)
    if data.tokenizer is not None:
        load_tokenizer(data.tokenizer, spec.model.vocab_size)


def _error_message(check: Callable[[], object]) -> str:
    try:
        check()
    except OrchestratorError as error:
        return str(error)
    return ""
