"""The command line of a run of engine command: words of the recipe and its framework, with placeholders filled in. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import dropwhile, pairwise
from pathlib import PurePath

from launch.common.flag_difference import read_flags
from launch.contract.records.inspection import INSPECTED_STEPS
from launch.contract.records.probe import HOST_STEPS, TRACED_STEPS
from launch.contract.spec import Command, Parallelism, Placement, RunSpec, Training
from launch.frameworks import FRAMEWORKS
from launch.frameworks.framework import Flags

PLACES = ("output", "python", "node_rank", "master_addr", "master_port")
"""Placeholders that are filled in when a run starts: its own folder, the supervisor's Python, and the ranks' rendezvous."""
STEPS = "{steps}"
"""The placeholder of the number of steps that the program must run."""
_SECTIONS = {"training": Training, "parallelism": Parallelism, "placement": Placement}
PLACEHOLDERS = frozenset(
    [*PLACES, "steps", "world_size", *(field.name for section in _SECTIONS.values() for field in fields(section))]
)
"""All placeholders: those of ``PLACES``, and the fields of these sections."""
_USED = ("steps", "deterministic", "global_batch_size", "sequence_length", "tp", "pp", "vpp", "ep", "etp", "cp", "dp")
"""Settings that need no placeholder: frameworks get flags for them, and reports count tokens and ranks."""
_PLACEHOLDER = re.compile(r"\{(\{[a-z_]+\})\}|\{([a-z_]+)\}")
"""``{name}``. A program that shall read these characters itself gets them by ``{{name}}``."""
_LAUNCHER = re.compile(r"(ba)?sh|torchrun|accelerate|deepspeed|(python|\{python\})[\d.]*")
_NUMBER = re.compile(r"((?:.*=)?)[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
"""A word that is a number, or ends with one after an equals sign."""
_PYTHON = re.compile(r"(python|\{python\})[\d.]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_NO_SCRIPT = re.compile(r"-[a-zA-Z]*c|-m(?! (torch\.distributed\.|accelerate\.))")


def command_words(spec: RunSpec, places: Mapping[str, str]) -> tuple[str, ...]:
    """Return the program of ``spec`` and its arguments. Placeholders of ``PLACES`` that ``places`` lacks stay as they are."""
    values = {**_values(spec), **places}
    return tuple(
        _PLACEHOLDER.sub(lambda found: found[1] or values.get(found[2], found[0]), word) for word in _words(spec)
    )


def shared_words(command: Command) -> tuple[str, ...]:
    """Return the words that a run and its eager baseline know of each other, without those of flags that a framework adds."""
    return (*shlex.split(command.run), *command.flags, *command.eager)


def command_but_for_numbers(spec: RunSpec) -> tuple[str, ...]:
    """Return the words of the program, its folder and its variables, with a # for each number among its arguments."""
    words = (_NUMBER.sub(r"\1#", word) if _NUMBER.fullmatch(word) else word for word in command_words(spec, {}))
    return (spec.command.workdir, *(f"{name}={value}" for name, value in sorted(spec.environment.items())), *words)


def unknown_placeholders(words: str) -> tuple[str, ...]:
    """Return the names in braces that are never filled in."""
    return tuple(dict.fromkeys(name for _, name in _PLACEHOLDER.findall(words) if name and name not in PLACEHOLDERS))


def unused_settings(spec: RunSpec) -> tuple[str, ...]:
    """Return the settings of ``spec`` that neither its program nor this project uses. Those at their defaults do not count."""
    used = {*_USED, *(name for _, name in _PLACEHOLDER.findall(" ".join(_words(spec))))}
    return tuple(
        f"{section}.{name}"
        for section, usual in (("training", Training()), ("parallelism", Parallelism()))
        for name, value in vars(getattr(spec, section)).items()
        if value != getattr(usual, name) and name not in used
    )


def flag_values(flags: Flags) -> Mapping[str, str]:
    """Return the value of each flag, as :func:`read_flags` finds it in a command."""
    return read_flags([word for name, words in flags.items() for word in (name, *words)])


def other_steps(spec: RunSpec) -> tuple[str, str] | None:
    """Return the flag by which the command sets another number of steps than its run needs, and that number; else None."""
    wanted, said = (
        flag_values(FRAMEWORKS[spec.command.framework].own_flags(spec)),
        read_flags(shared_words(spec.command)),
    )
    pairs = ((name, said.get(name, STEPS)) for name, value in wanted.items() if value == STEPS)
    return next((pair for pair in pairs if pair[1] not in (STEPS, str(observed_steps(spec)))), None)


def script_of(words: Sequence[str]) -> str:
    """Return the script that an interpreter or a launcher runs, or the program itself if it is a path; "" if neither."""
    program = words[0] if words else ""
    if PurePath(program).name == "env":
        return script_of([*dropwhile(lambda word: "=" in word or word.startswith("-"), words[1:])])
    if _VARIABLE.match(program):
        return script_of(words[1:])
    if not _LAUNCHER.fullmatch(PurePath(program).name):
        return program if "/" in program else ""
    for word, following in pairwise((*words[1:], "")):
        if _NO_SCRIPT.match(f"{word} {following}"):
            return ""
        if word.endswith((".py", ".sh")) and " " not in word:
            return word
    return ""


def module_of(words: Sequence[str]) -> str:
    """Return the module that ``python -m`` starts, or "" if the program is another one."""
    if not words or not _PYTHON.fullmatch(PurePath(words[0]).name):
        return ""
    options = iter(words[1:])
    for word in options:
        if word == "-m":
            return next(options, "")
        if not word.startswith("-") or _NO_SCRIPT.match(word):
            return ""
        if word in ("-W", "-X"):
            next(options, "")
    return ""


def observed_steps(spec: RunSpec) -> int:
    """Return the number of steps that the program must run: the recipe's steps, and on a GPU also those of the profiler.

    ``advise`` compares the operators of further steps, and on a GPU measures the host's time in others.
    """
    on_gpu = TRACED_STEPS + (HOST_STEPS if spec.inspect else 0)
    return (
        spec.training.steps
        + (on_gpu if spec.placement.device == "cuda" else 0)
        + (INSPECTED_STEPS if spec.inspect else 0)
    )


def _words(spec: RunSpec) -> tuple[str, ...]:
    command, framework = spec.command, FRAMEWORKS[spec.command.framework]
    said = (*shlex.split(command.run), *command.flags, *(spec.cuda_graph.arguments if spec.graphed else command.eager))
    flags = framework.own_flags(spec)
    if spec.graphed and spec.cuda_graph.impl != "command":
        flags = {**flags, **framework.graph_flags(spec)}
    return (*said, *_flag_words(flags, said))


def _flag_words(flags: Flags, said: Iterable[str]) -> Iterator[str]:
    """Yield the words of ``flags`` without flags that are already in ``said``. Hydra's overrides may begin with plus signs."""
    names = {word.partition("=")[0].lstrip("+") for word in said}
    for name, words in flags.items():
        if name.partition("=")[0] not in names:
            yield from (name, *words)


def _values(spec: RunSpec) -> dict[str, str]:
    values = {name: str(value) for section in _SECTIONS for name, value in vars(getattr(spec, section)).items()}
    return values | {"steps": str(observed_steps(spec)), "world_size": str(spec.parallelism.world_size)}
