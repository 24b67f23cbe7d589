"""Notes on what a recipe does not express of a command line's flags. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from launch.contract.spec import RunSpec
from launch.megatron_config.absent_fields import absent_field
from launch.megatron_config.field_names import FIELDS
from launch.support.rule import field_value
from orchestrator.export import megatron_lm
from orchestrator.export.flag_meanings import ENOUGH_STEPS, NEEDED, SWITCHES, VALUES
from orchestrator.export.megatron_flags import Flags, each_flag, is_number, parse_flags, spell_flag

MANY_STEPS = 1000
"""More steps than a verdict needs by far: the command line is that of a whole training."""
ASSUMED = {
    "model.vocab_size": ("vocab_size", "padded_vocab_size"), "data.kind": ("data_path", "mock_data"),
    "training.steps": ("train_iters",), "training.learning_rate": ("lr",),
    "training.global_batch_size": ("global_batch_size",),
}  # fmt: skip
"""Fields for which a recipe takes its own value if none of these flags is given."""
DROPS = "moe_expert_rank_capacity_factor"
SAID_ELSEWHERE = {"vocab_size", "tokenizer_type", "max_position_embeddings", "group_query_attention", "make_vocab_size_divisible_by",
                  "num_layers_per_virtual_pipeline_stage", "sequence_parallel", *SWITCHES}  # fmt: skip
NODES = {"nnodes": "nodes", "nproc_per_node": "gpus_per_node"}
"""Flags of torchrun."""


def notes_on_words(launcher: Flags, own: Iterable[str]) -> Iterator[str]:
    """Yield what the words of the command leave open.

    These are flags of the launcher that are missing or not numbers, and flags that are given twice.
    """
    for name, words in launcher.items():
        if name in NODES and not is_number(words):
            yield f"{spell_flag(name, words[:1])} is not a number: set resources.{NODES[name]} in the recipe"
    if not launcher.keys() & NODES.keys():
        yield "the number of GPUs is not given: set resources.nodes and resources.gpus_per_node in the recipe"
    given = each_flag(own)
    for name, count in Counter(name for name, _ in given).items():
        if count > 1:
            yield f"{spell_flag(name)} is given {count} times, and the last counts: {spell_flag(name, dict(given)[name])}"


def notes_on_flags(flags: Flags, spec: RunSpec) -> Iterator[str]:
    """Yield what the recipe does not express of ``flags``. Compare them with the flags of the recipe's export."""
    text, _ = megatron_lm.render(spec)
    exported = parse_flags(shlex.split(text.replace("\\\n", " ")))
    expressed = {FIELDS.get(name) for name in exported} | {"cuda_graph.scope"}
    silent = [name for name in flags if name not in exported and name not in SAID_ELSEWHERE | VALUES.keys()]
    unknown = [name for name in silent if FIELDS.get(name, "") not in expressed]
    for name in (name for name in flags if name in exported and name not in SAID_ELSEWHERE):
        if not _same(flags[name], exported[name]):
            yield f"{spell_flag(name, flags[name])}: the recipe's cells train with {spell_flag(name, exported[name])}"
    yield from _notes_on_missing(flags, exported, spec)
    if spec.training.steps > MANY_STEPS:
        warmup = spec.training.learning_rate_warmup_steps
        lower = f", and training.learning_rate_warmup_steps={ENOUGH_STEPS} or fewer" if warmup > ENOUGH_STEPS else ""
        yield (
            f"--train-iters {spec.training.steps}: every run takes as many, unless it exceeds resources.minutes_per_run;"
            f" a verdict needs 100 steps after the capture: set training.steps={ENOUGH_STEPS}{lower}"
        )
    if DROPS in flags and "moe_paged_stash" not in flags:
        yield f"{spell_flag(DROPS)} without --moe-paged-stash: Megatron-Core 0.19.2 silently drops tokens above it"
    for name in unknown:
        if absent := absent_field(name):
            yield f"{spell_flag(name, flags[name])}: {': '.join(absent)}"
    if unknown := [name for name in unknown if not absent_field(name)]:
        yield f"without a counterpart in a recipe: {', '.join(spell_flag(name, flags[name]) for name in unknown)}"


def _notes_on_missing(flags: Flags, exported: Flags, spec: RunSpec) -> Iterator[str]:
    """Yield the values that follow from flags that are not given, where the recipe has others."""
    for name, default in NEEDED.items():
        if name not in flags and exported.get(name, [default]) != [default]:
            yield f"{spell_flag(name)} is not given: Megatron-LM's default is {default}, the recipe has {' '.join(exported[name])}"
    if not {"swiglu", "quick_geglu"} & set(flags):
        yield "--swiglu is not given: Megatron-LM's default is GELU, the recipe has swiglu"
    for field, (name, *others) in ASSUMED.items():
        if flags.keys().isdisjoint((name, *others)):
            yield f"{spell_flag(name)} is not given; the recipe has {field}={field_value(spec, field)}: set it to your job's"


def _same(given: Sequence[str], exported: Sequence[str]) -> bool:
    try:
        return [float(word) for word in given] == [float(word) for word in exported]
    except ValueError:
        return sorted(",".join(given).split(",")) == sorted(",".join(exported).split(","))
