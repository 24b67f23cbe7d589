"""Print a cell as flags of Megatron-LM, or as flags and overrides of Megatron Bridge. Pure.

Each setting that the target cannot express is omitted, with a note.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from launch.contract.spec import CudaGraph, Fault, RunSpec
from launch.frameworks.command_line import command_words
from launch.support import known_faults, megatron
from launch.support.expandable_segments import REGISTER, expandable_segments_setting
from launch.support.rule import field_value, judge, spell
from orchestrator.export import megatron_bridge, megatron_lm
from orchestrator.export.megatron_flags import Translation
from orchestrator.plan.sound_fixes import keep_sound_fixes
from orchestrator.rules import violations

Format = Literal["megatron-lm", "bridge"]


def export(spec: RunSpec, to: Format) -> Translation:
    if spec.engine == "command":
        return Translation(
            shlex.join(command_words(spec, {})), ("engine command has a program of its own: this is its command",)
        )
    printed = spec
    if not _is_on_megatron(spec):
        printed = dataclasses.replace(spec, cuda_graph=CudaGraph(warmup_steps=spec.cuda_graph.warmup_steps))
    render = {"megatron-lm": megatron_lm.render, "bridge": megatron_bridge.render}[to]
    text, notes = render(printed)
    return Translation(text, (*_rejections(printed), *_not_expressed(spec), *notes))


def _is_on_megatron(spec: RunSpec) -> bool:
    return "megatron" in spec.cuda_graph.implementation.engines


def _rejections(spec: RunSpec) -> Iterator[str]:
    """Yield the rules that the cell would violate on engine megatron, whatever its engine.

    Ignore the placement of ranks, which the job decides, and injected faults, which are not printed.
    """
    ranks = dataclasses.replace(spec.placement, nodes=1, ranks_per_node=spec.parallelism.world_size)
    graph = dataclasses.replace(spec.cuda_graph, optimizer=False)
    job = dataclasses.replace(spec, engine="megatron", placement=ranks, cuda_graph=graph, fault=Fault())
    for reason in keep_sound_fixes(job, violations(job), of_program=True):
        yield f"[{reason.rule}] {reason.text}"


def _not_expressed(spec: RunSpec) -> Iterator[str]:
    """Yield a note on each setting that neither target has."""
    for field, applies, note in NOT_EXPRESSED:
        if applies(spec):
            yield f"{field}={spell(field_value(spec, field))}: {note}"
    job = dataclasses.replace(spec, engine="megatron")
    for reason in keep_sound_fixes(job, judge(megatron.RULES, job), of_program=True):
        if reason.rule in LIBRARY_LIMITS:
            yield reason.text
    yield from (fault.message for fault in (*known_faults(job), *judge(megatron.CORRECTED, job)))
    for name, value in spec.environment.items():
        yield f"environment.{name}={spell(value)}: set it in the job"
    if spec.graphed and expandable_segments_setting(spec.environment) and REGISTER not in spec.environment:
        yield f"{REGISTER}: set it to 0 in the job, as runs here do with expandable segments"


LIBRARY_LIMITS = {
    f"megatron.{name}"
    for name in (
        "rope_scaling", "moe_router_normalize_topk", "moe_shared_expert_ffn_hidden_size", "tp", "batch_p2p_sync", "schedule",
        "overlap_moe_expert_parallel_comm", "recompute", "recompute_norm", "recompute_act", "fused_gradients", "optimizer",
    )
}  # fmt: skip
"""Rules about Megatron-Core itself. The engine's other rules do not apply to other programs that use Megatron-Core."""

NOT_EXPRESSED: Sequence[tuple[str, Callable[[RunSpec], bool], str]] = (
    ("model.weights", lambda spec: spec.model.weights != "random", "name a checkpoint of the target's own format"),
    (
        "parallelism.cp", lambda spec: spec.parallelism.cp > 1 and not spec.model.attends_to_all,
        "set cp_comm_type to a2a by hand; the default supports no windows or sinks",
    ),
    ("training.learning_rate_warmup_steps", lambda spec: spec.training.learning_rate_warmup_steps > 0,
     "the warm-up of Megatron's learning rate is one step behind"),
    ("training.compile", lambda spec: spec.training.compile != "none",
     "only torch_native compiles; Megatron's own fusions are on"),
    ("training.attention_backend", lambda spec: spec.training.attention_backend in ("sdpa", "flex"),
     "Transformer Engine chooses the backend"),
    ("training.deterministic", lambda spec: spec.training.deterministic,
     "set NCCL_ALGO=Ring and NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 in the job too"),
    ("training.cpu_offloading", lambda spec: spec.training.cpu_offloading, "set --cpu-offloading or recomputation by hand"),
    ("training.variable_sequence_lengths", lambda spec: spec.training.variable_sequence_lengths,
     "the printed sequences have one length"),
    ("training.gradient_accumulation_fusion", lambda spec: spec.training.gradient_accumulation_fusion,
     "Megatron-Core exits if Apex's kernel for it is not installed"),
    ("data.kind", lambda spec: spec.data.kind == "text", "name data in the target's own format, and its tokenizer"),
    ("data.packed_sequences", lambda spec: spec.data.packed_sequences,
     "pack documents with the target's own data settings; a graph of the whole step needs them padded (Megatron Bridge: "
     "pad_to_max_length=true and offline_packing_specs.pad_cu_seqlens=true)"),
    ("cuda_graph.impl", lambda spec: not _is_on_megatron(spec), "Megatron does not have it; printed as eager"),
    ("cuda_graph.mend", lambda spec: bool(spec.cuda_graph.mend),
     "your job has the fault; launch/engines/megatron/mends has the repair"),
    ("training.capturable_optimizer", lambda spec: spec.training.capturable_optimizer and not spec.cuda_graph.optimizer,
     "Megatron turns it on only together with the graph of the optimizer; printed as off"),
    ("training.capturable_optimizer", lambda spec: spec.training.capturable_optimizer and spec.cuda_graph.optimizer,
     "in your job, the capture of the optimizer needs Transformer Engine 2.14 or later"),
    ("fault.kind", lambda spec: spec.fault.is_set, "only this project injects faults"),
)  # fmt: skip
"""The fields that no target has. Each has the condition under which this matters, and what to do."""
