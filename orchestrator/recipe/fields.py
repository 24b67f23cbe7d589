"""The fields of a recipe and of a model preset."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, get_args

from launch.common.redact import is_secret_name
from launch.contract.graph_impls import GRAPH_SCOPES
from launch.contract.outcomes import Expectation
from launch.contract.plan import Margins
from launch.contract.spec import (
    CudaGraph,
    Data,
    EngineName,
    Fault,
    FrameworkName,
    Launcher,
    MegatronCore,
    Model,
    Parallelism,
    Profiler,
    Training,
)
from launch.frameworks.command_line import PLACEHOLDERS, PLACES, unknown_placeholders
from launch.track.settings import TrackMode
from orchestrator.recipe.field_check import (
    Check,
    FileSchema,
    Flaw,
    Schema,
    check_variable,
    checked_field,
    interval_check,
)
from orchestrator.recipe.ranges import ABOVE_ZERO, COUNT, POSITIVE, Interval, ranges_of
from orchestrator.recipe.source_fields import SECRET_FIX
from orchestrator.recipe.yaml_reader import NAME
from orchestrator.suggestion import suggestion


@dataclass(frozen=True)
class Resources:
    """The resources of a run. ``gpus_per_node`` 0 requests one device per rank, on one node."""

    nodes: int = checked_field(1, interval_check(POSITIVE))
    gpus_per_node: int = checked_field(0, interval_check(COUNT))
    device: Literal["auto", "cpu", "cuda"] = checked_field("auto", instead={"gpu": "write cuda"})
    threads_per_rank: int = checked_field(1, interval_check(POSITIVE))
    minutes_per_run: float = checked_field(30.0, interval_check(ABOVE_ZERO))
    hang_minutes: float = checked_field(10.0, interval_check(ABOVE_ZERO))


@dataclass(frozen=True)
class Tracking:
    """Weights & Biases. ``auto`` is online if there is a key and a network, otherwise offline."""

    project: str = "cuda-graphs"
    entity: str | None = None
    mode: TrackMode = "auto"
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class OtherTrackers:
    """Trackers besides Weights & Biases."""

    tensorboard: bool = False


def _check_sweep_name(name: str) -> Flaw | None:
    fix = "use up to 64 letters, digits, '.', '_', '-', a letter or digit first"
    return None if NAME.fullmatch(name) else Flaw("not usable as the name of a folder", fix)


AUTO_LOOKS = (2, 4, 6)
"""With ``repeats: auto``, the numbers of repeats after which verdicts are judged (docs/speed.md).

Each look then has equally many pairs of either order."""


def most_repeats(repeats: int | str) -> int:
    """Return how many repeats a cell gets at most."""
    return AUTO_LOOKS[-1] if isinstance(repeats, str) else repeats


def _number_or_auto(interval: Interval, automatic: str) -> Check:
    """Return a check that accepts numbers in ``interval`` and the word ``auto``. Its message explains ``auto`` by ``automatic``."""
    flaw = Flaw("not a whole number, or auto", f"write a whole number, or auto: {automatic}")

    def check(value: int | str) -> Flaw | None:
        return interval_check(interval)(value) if isinstance(value, int) else None if value == "auto" else flaw

    return check


@dataclass(frozen=True)
class TopLevel:
    """The fields at the top of a recipe that are in no section."""

    name: str = checked_field("", _check_sweep_name)
    engine: EngineName = checked_field(  # noqa: RUF009 (ruff does not see that the type is immutable)
        "torch_native",
        instead={name: f"write engine: command, and command.framework: {name}" for name in get_args(FrameworkName)},
    )
    megatron_core: MegatronCore = "0.16"
    profile: Profiler = "none"
    repeats: int | str = checked_field(
        3, _number_or_auto(POSITIVE, f"as many as verdicts need, up to {AUTO_LOOKS[-1]}")
    )
    perturbed: bool = False
    step_checks: int | str = checked_field(
        "auto", _number_or_auto(COUNT, "5 in runs on GPUs that are not deterministic")
    )
    cluster: str = ""


# A colon after the name makes it a key of YAML: {seed: {seed}}.
_UNCLOSED = re.compile(r"(?<!\{)\{(\w+)(?=[\s'\"]|$)[^{}]*(?=\{|$)")


def _check_placeholders(words: Any) -> Flaw | None:
    """Return what is wrong with the names in braces of ``words``, which are a text, or a value that is printed as one."""
    if any("\0" in str(word) for word in (words if isinstance(words, list) else [words])):
        return Flaw("a null character, which no command line can contain", "remove it")
    if (half := _UNCLOSED.search(str(words))) and half[1] in PLACEHOLDERS:
        return Flaw(f"{{{half[1]} has no closing brace", f"write {{{half[1]}}}")
    unknown = unknown_placeholders(str(words))
    if not unknown:
        return None
    name, known = unknown[0], "a field of training, parallelism or placement, or " + ", ".join((*PLACES, "world_size"))
    fix = f"write in braces {known}; for the characters {{{name}}} themselves write {{{{{name}}}}}"
    return Flaw(f"{{{name}}} is not a placeholder", suggestion(name, PLACEHOLDERS, fix))


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_NO_SHELL = "write the command line as in a shell. It runs without one: for variables and pipes write bash -c '...'"
_READ_BY_SHELLS = re.compile(r"\$[A-Za-z_(]|^(\d*[<>]+(&\d|/?[\w.]+[\w./-]*)?|&>.*|\|\|?|&&?|.*;)$")


def _check_command(run: str) -> Flaw | None:
    try:
        words = shlex.split(run)
    except ValueError as error:
        return Flaw(f"not the words of a command: {str(error).lower()}", f"close its quotes: {_NO_SHELL}")
    if words and _ASSIGNMENT.match(words[0]):
        return Flaw(f"{words[0]} is no program", "write it under environment, or write env before it")
    if flaw := check_words(words):
        return flaw
    if words and PurePath(words[0]).name in ("srun", "sbatch", "salloc"):
        # The run would be in another job or step, where nothing observes it, and which outlives it.
        inside = f"write the command that {words[0]} starts; resources and the cluster's profile give the job"
        return Flaw(f"{words[0]} asks for a job of its own", inside)
    return _check_placeholders(run) if words else Flaw("no command", _NO_SHELL)


def check_words(words: Sequence[str]) -> Flaw | None:
    """Return what is wrong with the words of a whole command if only a shell could read one, and none starts a shell."""
    return None if "-c" in words else _check_for_shell(words)


def _check_for_shell(words: Sequence[str]) -> Flaw | None:
    word = next((word for word in words if _READ_BY_SHELLS.search(word)), None)
    return Flaw(f"without a shell, the program would get {word} as an argument", _NO_SHELL) if word else None


def _check_pattern(pattern: str) -> Flaw | None:
    try:
        groups = re.compile(pattern).groupindex.keys()
    except re.error as error:
        return Flaw(f"not a regular expression: {error}", "docs.python.org/3/library/re.html describes them")
    if not pattern or "loss" in groups <= {"step", "loss", "grad_norm"}:
        return None
    fix = r"name the loss and, if it is there, step and grad_norm: 'it (?P<step>\d+) nll (?P<loss>\S+)'"
    return Flaw("groups other than step, loss and grad_norm, or none for the loss", fix)


@dataclass(frozen=True)
class CommandFields:
    """The user's own program. The section also has the mappings ``command.flags`` and ``command.graphs``."""

    framework: FrameworkName = "script"
    run: str = checked_field("", _check_command)
    workdir: str = ""
    launcher: Launcher = "torchrun"
    pattern: str = checked_field("", _check_pattern)


def _check_flag(name: str, value: Any) -> Flaw | None:
    if is_secret_name(name):
        return Flaw("looks like a secret, and the orchestrator records this value", SECRET_FIX)
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)):
        return Flaw(
            "not the value of a flag",
            "write text, a number or a list of these; true for a bare flag, null to leave it out",
        )
    return _check_placeholders(value)


def _check_published(name: str, value: Any) -> Flaw | None:
    fix = "write one line of text, with its unit: 467 to 520 ms"
    return None if isinstance(value, str) and value.isprintable() and value else Flaw("not a published figure", fix)


def _check_graph(name: str, value: Any) -> Flaw | None:
    if not NAME.fullmatch(name) or name == "eager":
        return Flaw("not usable as the name of graphs", "use letters, digits, '.', '_', '-', and not 'eager'")
    if not isinstance(value, list) or any(isinstance(item, (dict, list)) for item in value):
        return Flaw("not a list of words", f"write {name}: [--flag, value], or {name}: [] for no word")
    if any(item is None or isinstance(item, bool) for item in value):
        return Flaw("true, false and null are not words", "write 'true' in quotation marks, or leave it out")
    return _check_for_shell([str(word) for word in value]) or _check_placeholders(value)


SECTIONS: Mapping[str, type] = {
    "model": Model,
    "parallelism": Parallelism,
    "training": Training,
    "data": Data,
    "cuda_graph": CudaGraph,
    "fault": Fault,
    "command": CommandFields,
    "expect": Expectation,
    "equivalence": Margins,
    "resources": Resources,
    "wandb": Tracking,
    "tracking": OtherTrackers,
}


def _check_scope(name: str) -> Flaw | None:
    # Megatron's names of the whole layer and the whole step are translated, or a rule rejects them.
    if name in (*GRAPH_SCOPES, "full", "full_iteration"):
        return None
    fix = "write one of them, or [] for the whole layer"
    return Flaw(f"not one of {', '.join(GRAPH_SCOPES)}", suggestion(name, GRAPH_SCOPES, fix))


def _section(name: str) -> Schema:
    checks = {field: interval_check(interval) for field, interval in ranges_of(name).items()}
    if name != "cuda_graph":
        return Schema(SECTIONS[name], checks)
    # Megatron's flag separates scopes by blanks.
    return Schema(SECTIONS[name], {**checks, "scope": _check_scope}, separator=r"[,\s]+")


RECIPE = FileSchema(
    Schema(TopLevel),
    {name: _section(name) for name in SECTIONS},
    {
        "environment": check_variable,
        "command.flags": _check_flag,
        "command.graphs": _check_graph,
        "published": _check_published,
    },
    other_names=("sweep",),
)
_OF_THE_SWEEP = (
    "name", "repeats", "perturbed", "step_checks", "cluster", "equivalence", "wandb", "tracking", "published", "sweep",
)  # fmt: skip
PATCH = replace(RECIPE, rejections={**RECIPE.rejections, **{
    name: Flaw(f"{name} belongs to the whole sweep, so it cannot be an axis", "write another recipe") for name in _OF_THE_SWEEP
}})  # fmt: skip
"""The fields that one point of an axis may set."""
PRESET = FileSchema(
    RECIPE.sections["model"],
    rejections={"preset": Flaw("a preset cannot name another preset", "write the fields of that preset out")},
)
