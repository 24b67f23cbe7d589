"""Read the flags of Megatron-LM's training scripts as a recipe. This is the reverse of ``export``. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import Any

from launch.contract.spec import SECTIONS, RunSpec, spec_to_json
from orchestrator.errors import input_error
from orchestrator.export.flag_meanings import DEFAULTS, EXPAND, moe_frequency, settings_of
from orchestrator.export.flag_notes import NODES, notes_on_flags, notes_on_words
from orchestrator.export.megatron_flags import Flags, Translation, is_number, parse_flags
from orchestrator.recipe.aliases import canonical_values
from orchestrator.recipe.yaml_reader import NAME, dump


def read_command(command: str) -> Translation:
    """Return the recipe of a command line with flags of Megatron-LM, as YAML.

    Raises:
        InputError: a flag has a value that no recipe takes, or the command has no flags.
    """
    words = _command_words(command)
    script = next((number for number, word in enumerate(words) if word.endswith(".py")), -1)
    launcher, own = parse_flags(words[: script + 1]), words[script + 1 :]
    flags = parse_flags(own)
    _check(own, flags)
    if frequency := moe_frequency(flags.get("moe_layer_freq", ())):
        flags = {**flags, "moe_layer_freq": [str(frequency)]}
    spec = _spec(DEFAULTS | settings_of(flags))
    sizes = {NODES[name]: int(words[0]) for name, words in launcher.items() if name in NODES and is_number(words)}
    name = _name(flags, words[script] if script >= 0 else "")
    return Translation(_recipe(name, spec, sizes), (*notes_on_words(launcher, own), *notes_on_flags(flags, spec)))


def _check(words: Sequence[str], flags: Flags) -> None:
    """Raise InputError if a shell variable may stand for flags, if there are no flags, or if two exclude each other."""
    values = ((before, word) for before, word in pairwise(["", *words]) if word.startswith("$"))
    if lost := [word for before, word in values if "[@]" in word or not before.startswith("-")]:
        raise input_error("--from-megatron-flags", f"the shell has not expanded {lost[0]}", EXPAND)
    if not flags:
        raise input_error("--from-megatron-flags", "it has no flags", "write 'pretrain_gpt.py --num-layers 8 ...'")
    if {"bf16", "fp16"} <= flags.keys():
        raise input_error("--fp16", "--bf16 is given too, and Megatron-LM refuses both", "keep one of them")


def _command_words(command: str) -> list[str]:
    """Return the words of the longest command in a shell line, without its redirections."""
    # The 2 of 2>&1 is not a word.
    lexer = shlex.shlex(
        re.sub(r"(?<=\s)\d+(?=[<>])", "", command.replace("\\\n", " ")), posix=True, punctuation_chars="|&;<>"
    )
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        commands = groupby(lexer, key=lambda word: not set(word) <= set("|&;<>"))
        return max((list(words) for is_command, words in commands if is_command), key=len, default=[])
    except ValueError as error:
        raise input_error("--from-megatron-flags", f"{error}", "quote the whole command line") from None


def _spec(settings: Mapping[str, Any]) -> RunSpec:
    spec = RunSpec(engine="megatron", megatron_core=settings["megatron_core"])
    for section, cls in SECTIONS.items():
        names = {each.name for each in fields(cls)}
        own = {name: settings[f"{section}.{name}"] for name in names if f"{section}.{name}" in settings}
        changed = replace(getattr(spec, section), **own)
        if section == "cuda_graph":
            changed = replace(changed, **canonical_values({"impl": changed.impl, "scope": changed.scope}))
        spec = replace(spec, **{section: changed})
    return spec


def _name(flags: Flags, script: str) -> str:
    """Return the name of the model whose tokenizer is used, else the name of the script."""
    models = (word for word in flags.get("tokenizer_model", ()) if not word.endswith((".model", ".json")))
    names = (PurePosixPath(word).name.removesuffix(".py") for word in (*models, script))
    return next((name for name in names if NAME.fullmatch(name)), "from_megatron_flags")


def _recipe(name: str, spec: RunSpec, resources: Mapping[str, int]) -> str:
    """Return the YAML of ``spec``. It holds only what differs from a recipe's defaults."""
    plain, default = spec_to_json(spec), spec_to_json(RunSpec())
    tree: dict[str, Any] = {"name": name, "engine": "megatron"}
    tree |= {"megatron_core": spec.megatron_core} if spec.megatron_core != "0.16" else {}
    for section in ("model", "parallelism", "training", "data", "cuda_graph"):
        own = {
            name: value
            for name, value in plain[section].items()
            if value != default[section][name] or name == "num_layers"
        }
        tree |= {section: own} if own else {}
    return dump(tree | {"resources": {**resources, "device": "cuda"}})
