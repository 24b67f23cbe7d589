"""A cluster's profile as the user wrote it: clusters/NAME.yaml here, or in the user's own folder.

It is read whole, as a recipe is: every problem at once, with its line and the way out. Nothing in it is interpolated:
``${NAME}`` in a line of shell is the shell's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.common.redact import is_secret_name
from orchestrator.errors import InputError, Problem, input_error, suggestion
from orchestrator.recipe.field_check import NAME, check_variable
from orchestrator.recipe.fields import way_out
from orchestrator.recipe.section_schema import Schema
from orchestrator.recipe.source_fields import Source, flatten
from orchestrator.recipe.yaml_reader import read_page
from orchestrator.rules.bounds import ABOVE_ZERO, COUNT, POSITIVE
from orchestrator.slurm.reserved_options import flaw_of_option
from orchestrator.targets.profile import Profile

DEFAULT = "default"
"""The profile of the user's own folder that is taken where none is named."""

SCHEMA = Schema(
    Profile,
    {
        "cpus_per_task": COUNT,
        "max_nodes": POSITIVE,
        "max_jobs": POSITIVE,
        "max_pending_minutes": ABOVE_ZERO,
        "gpu_memory_gib": ABOVE_ZERO,
    },
)
FIELDS = tuple(name for name in SCHEMA.fields if name != "name")
"""What a profile's file may hold."""

_FORMS: Mapping[str, tuple[str, str, str]] = {
    "mem": (r"\d+[KMGTkmgt]?", "not memory as sbatch takes it", 'write 500G, 64000 (megabytes), or "0" for all of a node'),
    "gpu_type": (r"[\w.-]+", "not a type of GPU", "write it as Gres=gpu:TYPE:8 of `scontrol show node` does"),
    "python": (r"\S+", "not the name or path of one program", "write it without options: a script of your own may add them"),
    "container_mounts": (r"[^:,]+:[^:,]+(:[^:,]+)?", "not of the form FROM:TO[:FLAGS]", "write for example /data:/data:ro"),
}  # fmt: skip
"""Fields whose text has a form of its own: the expression, what is wrong otherwise, and the way out."""
_GIVEN = re.compile(r"\b(\w+)=[\"']?[^\s\"'$]")
"""A variable whose value is written out in a line of shell, not fetched by it: ``X=abc``, but not ``X=$(cat file)``."""


def load_profile(name: str = "") -> Profile:
    """The profile called ``name``: the user's own, else one that ships. Without a name, the user's ``default`` where
    there is one, else one that leaves every choice to Slurm.

    Raises:
        InputError: there is no such profile, or with every problem of it.
    """
    if not name and not (_folders()[0] / f"{DEFAULT}.yaml").is_file():
        return Profile()
    path = _find(name or DEFAULT)
    page = read_page(path)
    fields, twice = flatten(page.values)
    checker = _Checker(Source(str(path), page.lines))
    for clash in twice:
        checker.problem(*clash)
    for place, value in fields.items():
        checker.take(place, value)
    checker.check_together()
    if problems := (*page.problems, *checker.problems):
        raise InputError(problems)
    return Profile(name=path.stem, **checker.values)


def _folders() -> tuple[Path, Path]:
    """Where profiles stand, the user's own first."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    return home / "cuda-graph-orchestrator" / "clusters", Path(__file__).resolve().parents[2] / "clusters"


def _find(name: str) -> Path:
    folders = _folders()
    if NAME.fullmatch(name):
        for folder in folders:
            if (path := folder / f"{name}.yaml").is_file():
                return path
    known = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    otherwise = f"known: {', '.join(sorted(known))}; your own stand in {folders[0]}"
    raise input_error("cluster", f"no profile {name!r}", suggestion(name, known, otherwise))


class _Checker:
    """Checks the fields of one profile and gathers what is wrong with them."""

    def __init__(self, source: Source) -> None:
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self._source = source

    def problem(self, place: str, value: Any, message: str, remedy: str) -> None:
        self.problems.append(self._source.problem(place, value, message, remedy))

    def take(self, place: str, value: Any) -> None:
        name, _, key = place.partition(".")
        if name in ("sbatch", "environment") and key:
            self._entry(place, name, key, value)
        elif name not in FIELDS:
            own = "leave it out: a profile is called as its file is"
            self.problem(place, value, "no such field", own if place == "name" else suggestion(place, FIELDS))
        elif key:
            self.problem(place, value, f"{name} is no mapping", f"write {SCHEMA.describe_type(name)}")
        elif name in ("sbatch", "environment"):
            if value != {}:
                self.problem(
                    place, value, "not a mapping of names to text", f"{name}: {{NAME: 'text'}}, or leave it out"
                )
        elif SCHEMA.is_list(name) and not isinstance(value, list):
            self.problem(place, value, "not a list", f"write {name}: [first, second], or leave it out")
        else:
            self._leaf(name, value)

    def check_together(self) -> None:
        """What each is right alone, and not beside another."""
        if self.values.get("gpus") == "none" and self.values.get("gpu_type") is not None:
            remedy = "leave gpu_type out, or set gpus to gres or gpus_per_node"
            self.problem("gpu_type", self.values["gpu_type"], "no GPUs are asked for where gpus is none", remedy)
        if self.values.get("container_mounts") and self.values.get("container_image") is None:
            remedy = "name a container_image, or leave container_mounts out"
            self.problem("container_mounts", list(self.values["container_mounts"]), "there is no container", remedy)

    def _leaf(self, name: str, value: Any) -> None:
        try:
            converted = SCHEMA.convert(name, value)
        except ValueError as error:
            self.problem(name, value, str(error), way_out(SCHEMA, name, value))
            return
        if isinstance(converted, tuple):
            for index, line in enumerate(converted):
                self._text(name, f"{name}[{index}]", line)
        elif isinstance(converted, str):
            self._text(name, name, converted)
        self.values[name] = converted

    def _text(self, name: str, place: str, text: str) -> None:
        form, message, remedy = _FORMS.get(name, (".*", "", ""))
        if not text.strip() or (name != "setup" and not text.isprintable()):
            self.problem(place, text, "not a line of text", "write one line, or leave it out")
        elif not re.fullmatch(form, text, re.DOTALL):
            self.problem(place, text, message, remedy)
        elif name == "srun":
            self._srun_option(place, text)
        elif name == "setup" and any(is_secret_name(variable) for variable in _GIVEN.findall(text)):
            remedy = "set it in the shell that runs the orchestrator, or have the line read it from a file: $(cat FILE)"
            self.problem(place, "***", "looks like a secret, and batch scripts are kept", remedy)

    def _srun_option(self, place: str, text: str) -> None:
        name, _, value = text.partition("=")
        if not name.startswith("--"):
            self.problem(
                place, text, "not an option of srun by its long name", "write --NAME or --NAME=VALUE, each apart"
            )
        elif flaw := flaw_of_option("srun", name[2:], value):
            self.problem(place, text, *flaw)

    def _entry(self, place: str, name: str, key: str, value: Any) -> None:
        flaw = check_variable(key, value) if name == "environment" else _flaw_of_sbatch(key, value)
        if flaw:
            self.problem(place, *flaw)
        else:
            self.values.setdefault(name, {})[key] = "" if value is None else str(value)


def _flaw_of_sbatch(name: str, value: Any) -> tuple[Any, str, str] | None:
    if isinstance(value, (bool, list, dict)) or not str(value).isprintable():
        return value, "not the text of an option", "write text, or nothing for an option without a value"
    flaw = flaw_of_option("sbatch", name, str(value))
    return (value, *flaw) if flaw else None
