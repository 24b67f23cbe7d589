"""A cell as other programs are told of it: Megatron-LM's flags, or Megatron Bridge's. Pure.

What a cell asks for and the target cannot say is told in a line each, and nothing is left out in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launch.contract.graph_impls import GRAPH_IMPLS
from launch.contract.spec import CudaGraph, Fault, RunSpec
from launch.megatron_config.graph_config import Release
from launch.support import known_faults, megatron
from launch.support.expandable_segments import REGISTER, expandable_segments_setting
from launch.support.rule import judge
from orchestrator.rules import violations

Format = Literal["megatron-lm", "bridge"]


@dataclass(frozen=True)
class Exported:
    """``text`` is for standard output, ``notes`` for standard error: what it does not say."""

    text: str
    notes: tuple[str, ...]


def export(spec: RunSpec, to: Format, release: Release) -> Exported:
    from orchestrator.export import megatron_bridge, megatron_lm

    if "megatron" not in spec.cuda_graph.implementation.engines:
        told = dataclasses.replace(spec, cuda_graph=CudaGraph(warmup_steps=spec.cuda_graph.warmup_steps))
    else:
        told = spec
    render = {"megatron-lm": megatron_lm.render, "bridge": megatron_bridge.render}[to]
    text, notes = render(told, release)
    return Exported(text, (*_rejected(told), *_unsaid(spec, release), *notes))


def _rejected(spec: RunSpec) -> Iterator[str]:
    """What rules say of the cell on Megatron, whichever engine it is of. How ranks are placed is the job's own, and faults on
    purpose are not printed."""
    ranks = dataclasses.replace(spec.placement, nodes=1, ranks_per_node=spec.parallelism.world_size)
    graph = dataclasses.replace(spec.cuda_graph, optimizer=False)
    job = dataclasses.replace(spec, engine="megatron", placement=ranks, cuda_graph=graph, fault=Fault())
    for reason in violations(job):
        yield f"[{reason.rule}] {reason.text}"


def _unsaid(spec: RunSpec, release: Release) -> Iterator[str]:
    """What neither target has."""
    for field, is_unsaid, why in UNSAID:
        section, _, name = field.partition(".")
        value = getattr(getattr(spec, section), name)
        if is_unsaid(value, spec):
            yield f"{field}={value!r}: {why}"
    for reason in judge(megatron.RULES, dataclasses.replace(spec, engine="megatron")):
        if reason.rule in LIMITS_OF_THE_LIBRARY:
            yield reason.text
    if release == "0.16":
        yield from (fault.message for fault in known_faults(spec))
    for name, value in spec.environment.items():
        yield f"environment.{name}={value!r}: set it in the job"
    if spec.training.gradient_accumulation_fusion:
        yield "training.gradient_accumulation_fusion=True: Megatron-Core ends where Apex's kernel for it is not installed"
    if spec.graphed and expandable_segments_setting(spec.environment) and REGISTER not in spec.environment:
        yield f"{REGISTER}: set it to 0 in the job, as runs here do beside expandable segments"


LIMITS_OF_THE_LIBRARY = {
    f"megatron.{name}"
    for name in (
        "rope_scaling", "moe_router_normalize_topk", "moe_shared_expert_ffn_hidden_size", "tp", "pp", "schedule",
        "overlap_moe_expert_parallel_comm", "recompute", "gradient_accumulation_fusion",
    )
}  # fmt: skip
"""Rules on Megatron-Core itself. The other rules of the engine do not bind other programs that use it."""

UNSAID: Sequence[tuple[str, Callable[[Any, RunSpec], bool], str]] = (
    ("model.weights", lambda weights, spec: weights != "random", "name a checkpoint of the target's own format"),
    (
        "parallelism.cp",
        lambda cp, spec: cp > 1 and bool(spec.model.window_size or spec.model.attention_sinks),
        "choose cp_comm_type a2a by hand; the default has neither windows nor sinks",
    ),
    ("training.learning_rate_warmup_steps", lambda steps, spec: steps > 0, "Megatron's warm-up is a step behind"),
    ("training.compile", lambda choice, spec: choice != "none", "torch_native's alone; Megatron's own fusions are on"),
    ("training.attention_backend", lambda choice, spec: choice in ("sdpa", "flex"), "Transformer Engine chooses one"),
    ("training.deterministic", lambda on, spec: on, "set NCCL_ALGO=Ring, NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 too"),
    ("training.cpu_offloading", lambda on, spec: on, "choose --cpu-offloading or recomputation by hand"),
    ("training.variable_sequence_lengths", lambda on, spec: on, "sequences are printed as of one length"),
    ("data.kind", lambda kind, spec: kind == "text", "name data of the target's own format and its tokenizer"),
    ("data.packed_sequences", lambda on, spec: on, "pack documents by the target's own data settings"),
    ("cuda_graph.impl", lambda impl, spec: "megatron" not in GRAPH_IMPLS[impl].engines, "torch_native's; printed as eager"),
    ("cuda_graph.optimizer", lambda on, spec: on, "torch_native's alone; Megatron's graph ends before the optimizer"),
    ("fault.kind", lambda kind, spec: kind != "none", "faults on purpose are this program's own"),
)  # fmt: skip
