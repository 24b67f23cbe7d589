"""A cluster's profile: what a Slurm site requires of a job, with one row for each field. docs/clusters.md describes them.

A profile is clusters/NAME.yaml here, or in the user's own folder. All problems are reported together, with line and fix.
Interpolations are not resolved: ``${NAME}`` in a line of shell is for the shell.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from launch import ROOT
from orchestrator.errors import input_error
from orchestrator.recipe.field_check import (
    Check,
    FileSchema,
    Flaw,
    Schema,
    check_fields,
    check_variable,
    checked_field,
    interval_check,
)
from orchestrator.recipe.ranges import ABOVE_ZERO, COUNT, POSITIVE
from orchestrator.recipe.source_fields import SourceFields, Tree, read_fields
from orchestrator.recipe.yaml_reader import find_yaml, suggest_yaml
from orchestrator.targets.reserved_options import DEVICES, RESERVED, Command


class Option(NamedTuple):
    """How a field of a profile reaches Slurm."""

    to_sbatch: bool = False
    """Whether sbatch gets the field as its option of the same name."""
    shell_default: bool = False
    """Whether the shell's SBATCH_<NAME> applies if the profile omits the field."""
    replaces: tuple[str, ...] = ()
    """Options that a profile cannot add because of this field, besides the option of the same name."""


def _check_line(text: str) -> Flaw | None:
    is_line = text.strip() and text.isprintable()
    return None if is_line else Flaw("not a line of text", "write one line, or leave it out")


def _row(default: Any = None, check: Check | None = _check_line, **option: Any) -> Any:
    """Declare a field of :class:`Profile` with the check of its values and its :class:`Option`."""
    return checked_field(default, check, option=Option(**option))


def _matches(pattern: str, message: str, fix: str) -> Check:
    return lambda text: _check_line(text) or (None if re.fullmatch(pattern, text) else Flaw(message, fix))


def _check_srun(text: str) -> Flaw | None:
    name, _, value = text.partition("=")
    if name.startswith("--"):
        return _check_line(text) or check_option("srun", name[2:], value)
    return _check_line(text) or Flaw("not the long name of an option of srun", "write one --NAME or --NAME=VALUE each")


@dataclass(frozen=True)
class Profile:
    """A cluster's profile. Every default leaves the choice to Slurm, so an empty profile is valid."""

    name: str = ""
    """The name of its file, empty without one."""
    partition: str | None = _row(to_sbatch=True, shell_default=True)
    account: str | None = _row(to_sbatch=True, shell_default=True)
    qos: str | None = _row(to_sbatch=True, shell_default=True)
    constraint: str | None = _row(to_sbatch=True, shell_default=True)
    reservation: str | None = _row(to_sbatch=True, shell_default=True)
    wckey: str | None = _row(to_sbatch=True, shell_default=True)
    gpus: Literal["gres", "gpus_per_node", "none"] = _row("gres", replaces=("gpus-per-node", "gpus-per-socket", "gres"))
    """How jobs request GPUs. "none" is for sites that allocate whole nodes and reject both options."""
    gpu_type: str | None = _row(
        check=_matches(
            r"[\w.-]+", "not a type of GPU", "copy TYPE from Gres=gpu:TYPE:8 in the output of `scontrol show node`"
        )
    )
    gpu_memory_gib: float | None = _row(check=interval_check(ABOVE_ZERO))
    """Memory of one GPU. A cell that needs more by forecast is set aside."""
    exclusive: bool = _row(False, None, to_sbatch=True)
    mem: str | None = _row(
        to_sbatch=True,
        check=_matches(
            r"\d+[KMGTkmgt]?",
            "not memory as sbatch takes it",
            'write 500G, 64000 (megabytes), or "0" for all of a node',
        ),
    )
    """Memory per node, as sbatch takes it: "0" is all of it."""
    cpus_per_task: int = _row(0, interval_check(COUNT))
    """CPUs per rank. 0 asks for the run's threads_per_rank."""
    mpi: str = _row("none")
    """srun's --mpi for ranks. torch.distributed needs none."""
    container_image: str | None = _row()
    """For pyxis. Ranks run in it. The supervisor runs on the host."""
    container_mounts: tuple[str, ...] = _row(
        (),
        check=_matches(
            r"[^:,]+:[^:,]+(:[^:,]+)?", "not of the form FROM:TO[:FLAGS]", "write for example /data:/data:ro"
        ),
    )
    """Additional mounts. This checkout and the store are always mounted."""
    python: str | None = _row(
        check=_matches(
            r"\S+", "not the name or path of one program", "leave its options out, or write a script that adds them"
        )
    )
    """The interpreter of ranks. The default is this command's interpreter, or python3 in a container."""
    setup: tuple[str, ...] = _row((), lambda text: None if text.strip() else _check_line(text))
    """Shell lines at the start of the batch script."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """More options of sbatch, by their long names. An empty value means an option without a value."""
    srun: tuple[str, ...] = _row((), _check_srun)
    """More options of the srun that starts ranks."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for every rank."""
    max_nodes: int | None = _row(check=interval_check(POSITIVE))
    """The most nodes that one sweep may use at the same time."""
    max_jobs: int | None = _row(check=interval_check(POSITIVE))
    """The most jobs of one sweep that may run at the same time."""
    max_pending_minutes: float | None = _row(check=interval_check(ABOVE_ZERO))
    """A job that waits longer is cancelled."""


OPTIONS: Mapping[str, Option] = {f.name: f.metadata["option"] for f in dataclasses.fields(Profile) if f.metadata}
SHELL_DEFAULTS = tuple(name for name, option in OPTIONS.items() if option.shell_default)


def sbatch_options(profile: Profile) -> dict[str, Any]:
    """Return the options that ``profile`` passes to sbatch, in submitit's spelling. True means an option without a value."""
    rows = {name: getattr(profile, name) for name, option in OPTIONS.items() if option.to_sbatch}
    present = {name: value for name, value in rows.items() if value is not None and value is not False}
    return present | {name.replace("-", "_"): value or True for name, value in profile.sbatch.items()}


_LONG_NAME = re.compile(r"[a-z][a-z0-9]+(-[a-z0-9]+)*")
_FIELD_OF = {name: key for key, option in OPTIONS.items() for name in (key.replace("_", "-"), *option.replaces)}
"""The field that replaces an option of sbatch or srun, by the option's long name."""


def check_option(command: Command, name: str, value: Any) -> Flaw | None:
    """Return why a profile cannot add option ``name`` of ``command``."""
    if isinstance(value, (bool, list, dict)) or not str(value).isprintable():
        return Flaw("not the text of an option", "write text, or nothing for an option without a value")
    if not _LONG_NAME.fullmatch(name):
        return Flaw(
            f"not the long name of an option of {command}", f"write it as `{command} --help` does, without dashes"
        )
    if name in RESERVED[command]:
        return Flaw("the orchestrator sets this option itself", f"leave it out: {RESERVED[command][name]}")
    if name in _FIELD_OF:
        return Flaw(
            "the profile has a field for this option", f"write it as {_FIELD_OF[name]}, at the top of the profile"
        )
    if name == "gpu-bind" and value != "none":
        return Flaw("hides GPUs from ranks", f"leave it out, or write none: {DEVICES}")
    return None


DEFAULT = "default"
"""The profile of the user's own folder that applies if none is named."""

# A line of shell contains commas.
SCHEMA = Schema(Profile, separator="")
_FILE = FileSchema(
    SCHEMA,
    mappings={"sbatch": partial(check_option, "sbatch"), "environment": check_variable},
    rejections={
        name: Flaw("no such field", fix)
        for name, fix in {
            "name": "leave it out: the name of a profile is the name of its file",
            "modules": "write setup: [module load NAME]",
            "gres": "write gpus: gres, and gpu_type for GPUs of one type",
            "time": "write resources.minutes_per_run in the recipe",
        }.items()
    },
)


def find_profile(name: str) -> Path:
    """Return the file of profile ``name``.

    Raises:
        InputError: there is no such profile.
    """
    folders = _folders()
    if (path := find_yaml(name, folders)) is None:
        fix = f"{suggest_yaml(name, folders)}; put your own profile into the first of these folders"
        raise input_error("cluster", f"no profile {name!r}", fix)
    return path


def load_profile(name: str = "") -> Profile:
    """Load the profile ``name``: the user's own, else one of this repository.

    Without a name, load the user's ``default``. If there is none, return a profile that leaves every choice to Slurm.

    Raises:
        InputError: there is no such profile, or it has problems; the error lists all.
    """
    if not name and find_yaml(DEFAULT, _folders()[:1]) is None:
        return Profile()
    path = find_profile(name or DEFAULT)
    source = read_fields(path, interpolate=False)
    values = check_fields(source, _FILE)
    _check_combinations(values, source)
    source.raise_problems()
    return Profile(name=path.stem, **values)


def _folders() -> tuple[Path, Path]:
    """Return the folders of profiles, the user's own first."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return home / "cuda-graph-orchestrator" / "clusters", ROOT / "clusters"


def _check_combinations(values: Tree, source: SourceFields) -> None:
    """Reject fields that have no effect without another."""
    if values.get("gpus") == "none" and values.get("gpu_type") is not None:
        fix = "leave gpu_type out, or set gpus to gres or gpus_per_node"
        source.problem("gpu_type", values["gpu_type"], "no job requests GPUs if gpus is none", fix)
    if values.get("container_mounts") and values.get("container_image") is None:
        fix = "name a container_image, or leave container_mounts out"
        source.problem("container_mounts", list(values["container_mounts"]), "there is no container", fix)
