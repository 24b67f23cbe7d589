"""Rules on the settings that engine command needs to run and judge the user's program."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from launch.common.flag_difference import read_flags
from launch.contract.spec import CudaGraph, RunSpec
from launch.frameworks import FRAMEWORKS
from launch.frameworks.command_line import command_words, flag_values, unused_settings
from launch.frameworks.megatron_spec import megatron_spec
from launch.support.rule import Rule

CommandRule = partial(Rule, engines=("command",))


def _sets_graphs_itself(spec: RunSpec) -> bool:
    """Return whether the command of a graphed cell has other graph settings than the cell, or also turns on eager's graphs."""
    if not spec.graphed:
        return False
    added = FRAMEWORKS[spec.command.framework].graph_flags(spec) if spec.cuda_graph.impl != "command" else {}
    wanted, final = flag_values(added), read_flags(command_words(spec, {}))
    eager = megatron_spec(replace(spec, cuda_graph=CudaGraph()))
    return any(final.get(name) != value for name, value in wanted.items()) or bool(eager and eager.graphed)


def _ranks_of_other_layouts(spec: RunSpec) -> list[str]:
    """Return the sizes of the run that torchrun's flags in the command contradict. Its words gpu, auto and 1:4 tell nothing."""
    words = " ".join(command_words(spec, {}))
    sizes = {
        "placement.ranks_per_node": (ranks_per_node(words), spec.placement.ranks_per_node),
        "placement.nodes": (_number_of("nnodes", words), spec.placement.nodes),
    }
    return [name for name, (size, of_run) in sizes.items() if size not in (None, of_run)]


def ranks_per_node(command: str) -> int | None:
    """Return how many ranks torchrun starts on a node, or None if ``command`` does not tell."""
    return _number_of("nproc[-_]per[-_]node", command)


def _number_of(flag: str, command: str) -> int | None:
    found = re.search(rf"(?<!\S)--{flag}[= ](\d+)(?!\S)", command)
    return int(found[1]) if found else None


RULES: tuple[Rule, ...] = (
    CommandRule(
        "command.layers", ("layer_check_steps",), "bisect --layers can check only layers of this project's engines",
        lambda spec: bool(spec.layer_check_steps),
        fix="Sweep the program's graphs, or bisect their scope.",
    ),
    CommandRule(
        "command.profile", ("profile",), "profile=nsys profiles only this project's engines",
        lambda spec: spec.profile != "none",
        fix="Set profile=none, and begin command.run with nsys profile.",
    ),
    CommandRule(
        "command.logs", ("command.framework",), "this framework only describes runs that were made elsewhere, so nothing can "
        "run it here",
        lambda spec: spec.made_elsewhere,
        fix="Read their logs with wrap --from-logs, or name the framework that command.run starts.",
    ),
    CommandRule(
        "command.framework", ("cuda_graph.impl", "command.framework"),
        "the framework has no flags for this implementation",
        lambda spec: spec.graphed and spec.cuda_graph.impl not in FRAMEWORKS[spec.command.framework].impls,
        fix="Write the flags that turn graphs on under command.graphs: {none: [], my_graphs: [--flag]}.",
    ),
    CommandRule(
        "command.graph_flags", ("cuda_graph.impl", "cuda_graph.scope"),
        "command.run, command.flags or command.graphs.none sets other graphs than the cell, or graphs of eager runs",
        _sets_graphs_itself,
        fix="Leave flags of graphs out there, because cuda_graph or command.graphs sets them.",
    ),
    CommandRule(
        "command.optimizer", ("cuda_graph.optimizer",), "no framework here gets a flag that captures the optimizer",
        lambda spec: spec.cuda_graph.optimizer,
        fix="Set cuda_graph.optimizer=false, and write the program's own flag for it under command.graphs.",
    ),
    CommandRule(
        "command.unused", (), "the program gets only fields whose placeholders are in its command",
        lambda spec: () if spec.made_elsewhere else unused_settings(spec),
        fix="Write each name in braces, such as {learning_rate}, in command.run or command.flags, or leave the field out.",
    ),
    CommandRule(
        "command.device", ("cuda_graph.impl", "placement.device"), "CUDA graphs need a GPU",
        lambda spec: spec.cuda_graph.implementation.needs_cuda and spec.placement.device != "cuda",
        fix="Set resources.device=cuda, or run eager cells alone.",
    ),
    CommandRule(
        "command.ranks", (), "--nproc-per-node or --nnodes of command.run is another number",
        _ranks_of_other_layouts,
        fix="Write {ranks_per_node} and {nodes} there, or the command's numbers in resources.gpus_per_node and nodes (wrap: "
        "--ranks).",
    ),
)  # fmt: skip
