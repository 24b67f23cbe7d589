"""What each engine can do in this version; all else is refused by name, before a run is submitted and again in the job.

One table an engine: a row is a field, the values that the engine takes, and the way out for all others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from launch.record import Reason
from launch.spec import CudaGraph, EngineName, Model, RunSpec


@dataclass(frozen=True)
class Limit:
    """One field of a spec, and when the engine takes it as it is."""

    field: str
    """Section and name, as a recipe spells it: ``parallelism.tp``; or the name alone of what has no section."""
    accepts: Callable[[Any, RunSpec], bool]
    """Of the field's value and the whole spec."""
    remedy: str

    @property
    def name(self) -> str:
        return self.field.rpartition(".")[2]

    def value(self, spec: RunSpec) -> Any:
        return attrgetter(self.field)(spec)


def unsupported(spec: RunSpec) -> tuple[Reason, ...]:
    """Why the engine that ``spec`` names cannot run it, one reason a field; empty where it can."""
    return tuple(
        Reason(f"{spec.engine}.{limit.name}", _message(limit, spec), limit.remedy)
        for limit in LIMITS[spec.engine]
        if not limit.accepts(limit.value(spec), spec)
    )


def known_faults(spec: RunSpec) -> tuple[Reason, ...]:
    """What the library that ``spec`` runs on is known to compute wrongly in it: its runs say so, and it is not advised."""
    if spec.cuda_graph.impl != "local":
        return ()
    return (Reason("megatron.local_inputs", LOCAL_INPUTS, "use transformer_engine or full_iteration"),)


def _message(limit: Limit, spec: RunSpec) -> str:
    value = limit.value(spec)
    shown = list(value) if isinstance(value, tuple) else value
    return (
        f"{limit.field}={shown!r} with device {spec.placement.device!r} is beyond engine {spec.engine} in this version"
    )


def _only(field: str, allowed: Any, remedy: str = "") -> Limit:
    spelt = json.dumps(allowed).strip('"')
    return Limit(field, lambda value, spec: value == allowed, remedy or f"set {field}={spelt}")


def _grouped_mm_width(width: int, spec: RunSpec) -> bool:
    """CUDA's grouped_mm wants rows of whole 16 bytes: 8 elements of bfloat16. float32 is multiplied expert by expert."""
    in_groups = spec.model.is_moe and spec.training.precision == "bf16" and spec.placement.device == "cuda"
    return not in_groups or width % 8 == 0


def _is_plain(model: Model) -> bool:
    """Whether every token attends to all before it, and to nothing else."""
    return model.window_size == 0 and not model.attention_sinks


def _expresses(backend: str, spec: RunSpec) -> bool:
    """Whether an attention backend expresses the model's layers on this device; auto chooses one that does. Transformer
    Engine keeps Dynamo out of its own (2.11 pytorch/attention/dot_product_attention/dot_product_attention.py:798)."""
    plain = _is_plain(spec.model) and not spec.data.packed_sequences
    on_cuda = spec.placement.device == "cuda"
    if backend == "transformer_engine":
        beyond = spec.data.packed_sequences or spec.compiles_whole
        return on_cuda and spec.training.precision == "bf16" and not beyond
    return backend == "auto" or (plain if backend == "sdpa" else on_cuda)


def _replays_first_product(spec: RunSpec) -> bool:
    """Whether a graph of the first micro-batch is replayed for others; with fp8 modules of it know no first one."""
    alone = spec.parallelism.pp == 1 and spec.training.fp8 == "none"
    return alone and spec.cuda_graph.impl == "transformer_engine" and spec.num_microbatches > 1


def _lies_whole(spec: RunSpec) -> bool:
    """Whether each rank holds the whole model."""
    return (spec.parallelism.tp, spec.parallelism.pp, spec.parallelism.ep) == (1, 1, 1)


LOCAL_INPUTS = (
    "a local graph of megatron-core 0.16.1 gives its input back to a pool of buffers before its own backward pass has read it "
    "(transformer/cuda_graphs.py:995), and the gradient of the first layer's norm is wrong (seen; mended in Megatron-LM pull "
    "request 4433)"
)
OF_MEGATRON = "set it to false, or engine=megatron"
TORCH_NATIVE: tuple[Limit, ...] = (
    Limit("model.kv_channels", lambda channels, spec: channels % 2 == 0, "set an even one: RoPE rotates pairs"),
    Limit(
        "model.moe_expert_capacity_factor",
        lambda factor, spec: factor is None or spec.model.moe_pad_expert_input_to_capacity,
        "set model.moe_pad_expert_input_to_capacity=true, or model.moe_expert_capacity_factor=null (dropless)",
    ),
    Limit("model.hidden_size", _grouped_mm_width, "set a multiple of 8, or resources.device=cpu"),
    Limit("model.moe_ffn_hidden_size", _grouped_mm_width, "set a multiple of 8, or resources.device=cpu"),
    _only("parallelism.etp", 1),
    _only("parallelism.cp", 1, remedy="set parallelism.cp=1, or engine=megatron"),
    Limit(
        "training.attention_backend",
        _expresses,
        "set training.attention_backend=auto: sdpa has neither windows, sinks nor packed documents, flex and "
        "transformer_engine run on CUDA, and transformer_engine takes bf16 without packed documents and is not compiled with "
        "the model (training.compile=whole, torch_compile)",
    ),
    _only(
        "parallelism.overlap_grad_reduce",
        False,
        f"{OF_MEGATRON}: gradients are reduced in the backward pass here in any case",
    ),
    _only("parallelism.overlap_param_gather", False, OF_MEGATRON),
    _only("parallelism.overlap_moe_expert_parallel_comm", False, OF_MEGATRON),
    _only("parallelism.delay_wgrad_compute", False, OF_MEGATRON),
    _only("training.fp8", "none", remedy="set training.fp8=none, or engine=megatron"),
    _only("training.gradient_accumulation_fusion", False, OF_MEGATRON),
    _only("training.moe_router_fusion", False, OF_MEGATRON),
    _only("training.cpu_offloading", False),
    _only("training.variable_sequence_lengths", False),
    Limit(
        "cuda_graph.impl",
        lambda impl, spec: impl in ("none", "torch_compile") or spec.placement.device == "cuda",
        "set cuda_graph.impl=none or torch_compile, or resources.device=cuda",
    ),
    Limit(
        "cuda_graph.impl",
        lambda impl, spec: impl != "torch_compile" or _lies_whole(spec),
        "set cuda_graph.impl=none, or tp, pp and ep to 1: collectives break the graph",
    ),
    Limit(
        "training.compile",
        lambda choice, spec: choice != "whole" or _lies_whole(spec),
        "set training.compile=none or elementwise, or tp, pp and ep to 1: collectives break the graph",
    ),
    Limit(
        "cuda_graph.impl",
        lambda impl, spec: spec.training.compile != "whole" or impl in ("none", "torch_compile", "full_iteration"),
        "set cuda_graph.impl=full_iteration or torch_compile, or training.compile=none or elementwise: with "
        "training.compile=whole the model is one compiled function, of which no layer or part can be captured",
    ),
    Limit(
        "digest_steps",
        lambda steps, spec: not steps or not spec.compiles_whole,
        "look into another implementation, without training.compile=whole: Inductor's kernels round otherwise than those they "
        "replace, so that all layers differ in their bits, whatever is at fault",
    ),
)


def _routes_as_megatron(model: Model) -> bool:
    """Whether megatron-core 0.16.1 has the router (transformer/moe/moe_utils.py, topk_routing_with_score_function).

    What a single chosen expert counts for it never makes sum to 1; what several count for by sigmoid it always does.
    """
    over_chosen = model.moe_router_order == "topk_then_softmax"
    if model.moe_router_score_function == "sigmoid":
        return not over_chosen and model.moe_router_normalize_topk == (model.moe_router_topk > 1)
    return model.moe_router_topk > 1 or not (over_chosen or model.moe_router_normalize_topk)


def _is_llama_3s(model: Model) -> bool:
    """Megatron-Core has these as constants (models/common/embeddings/rotary_pos_embedding.py)."""
    scaling = (model.rope_original_max_position, model.rope_low_freq_factor, model.rope_high_freq_factor)
    return scaling == (8192, 1.0, 4.0)


def _captures_attention(graph: CudaGraph) -> bool:
    """Whether a layer's graph holds its attention."""
    return graph.impl == "transformer_engine" and (not graph.scope or "attn" in graph.scope)


ON_GPUS = (
    "set resources.device=cuda, or engine=torch_native: Megatron-Core's schedules and optimizers allocate on a GPU"
)
MEGATRON: tuple[Limit, ...] = (
    _only("placement.device", "cuda", ON_GPUS),
    _only("model.weights", "random", "set model.weights=random, or engine=torch_native"),
    Limit("model.kv_channels", lambda channels, spec: channels % 2 == 0, "set an even one: RoPE rotates pairs"),
    Limit(
        "model.num_query_groups",
        lambda groups, spec: groups % spec.parallelism.tp == 0,
        "set parallelism.tp to a divisor of it",
    ),
    Limit(
        "model.rope_scaling",
        lambda scaling, spec: scaling != "llama3" or _is_llama_3s(spec.model),
        "set model.rope_original_max_position=8192, rope_low_freq_factor=1 and rope_high_freq_factor=4, Llama 3's own, "
        "or engine=torch_native",
    ),
    Limit(
        "model.moe_router_normalize_topk",
        lambda _, spec: not spec.model.is_moe or _routes_as_megatron(spec.model),
        "leave it true for a sigmoid of several experts, set it to false for one expert, and topk_then_softmax for "
        "several by softmax alone; or set engine=torch_native",
    ),
    Limit(
        "model.moe_expert_capacity_factor",
        lambda factor, spec: factor is None or spec.model.moe_pad_expert_input_to_capacity,
        "set model.moe_pad_expert_input_to_capacity=true, or model.moe_expert_capacity_factor=null (dropless)",
    ),
    Limit(
        "model.moe_shared_expert_ffn_hidden_size",
        lambda width, spec: width == 0 or not spec.model.add_bias_linear,
        "set model.add_bias_linear=false: Megatron-Core's shared expert has no biases",
    ),
    Limit(
        "parallelism.tp",
        lambda tp, spec: tp == spec.parallelism.etp or not spec.model.is_moe or spec.parallelism.ep > 1,
        "set parallelism.ep to 2 or more, or etp to tp: with ep=1 megatron-core 0.16.1 reduces the gradients of experts "
        "over the ranks of dp and cp, whoever holds the same",
    ),
    Limit(
        "parallelism.overlap_moe_expert_parallel_comm",
        lambda on, spec: not on or (spec.model.num_layers - 1) % max(spec.model.moe_layer_freq, 1) == 0,
        "set it to false, or a model.num_layers whose last layer has experts: behind a dense one megatron-core 0.16.1 leaves "
        "the last norm out of the model (models/gpt/fine_grained_callables.py:583)",
    ),
    Limit(
        "parallelism.overlap_moe_expert_parallel_comm",
        lambda on, spec: not on or spec.parallelism.ep != spec.model.num_moe_experts or spec.parallelism.etp > 1,
        "set it to false, or parallelism.ep below model.num_moe_experts: on a rank with one expert megatron-core 0.16.1 frees "
        "tokens that its backward pass has yet to read (models/gpt/fine_grained_callables.py:74)",
    ),
    Limit(
        "parallelism.cp",
        lambda cp, spec: cp == 1 or (_is_plain(spec.model) and spec.training.precision == "bf16"),
        "set parallelism.cp=1, or training.precision=bf16 for a model without windows and sinks: Transformer Engine's ring "
        "attention has neither, and takes 16 bits alone (2.11 pytorch/attention/dot_product_attention/context_parallel.py:4026, "
        ":4046, utils.py:756)",
    ),
    Limit(
        "parallelism.schedule",
        lambda schedule, spec: schedule != "gpipe" or spec.parallelism.pp == 1,
        "set parallelism.schedule=1f1b, or engine=torch_native",
    ),
    _only("training.compile", "none"),
    Limit(
        "training.attention_backend",
        lambda backend, spec: backend in ("auto", "transformer_engine"),
        "set training.attention_backend=auto: the layers are Transformer Engine's",
    ),
    Limit(
        "training.gradient_accumulation_fusion",
        lambda on, spec: not on or not _replays_first_product(spec),
        "set it to false, or cuda_graph.impl=full_iteration, or parallelism.pp to 2 or more, or a global_batch_size of one "
        "micro-batch a step: one graph replays all micro-batches, and transformer-engine 2.11 captures it as that of the first, "
        "which writes gradients instead of adding to them (pytorch/graph.py:484; seen; mended in TransformerEngine pull "
        "request 2715)",
    ),
    Limit(
        "training.moe_router_fusion",
        lambda on, spec: not on or (spec.model.is_moe and not spec.training.deterministic),
        "set it to false: a dense model has no router, and in deterministic mode it is not known whether Transformer Engine's "
        "kernels add in a fixed order",
    ),
    _only("training.cpu_offloading", False),
    _only("training.variable_sequence_lengths", False),
    _only("data.packed_sequences", False, "set data.packed_sequences=false, or engine=torch_native"),
    Limit(
        "cuda_graph.impl",
        lambda impl, spec: impl != "local" or spec.training.deterministic,
        "use transformer_engine or full_iteration, or set training.deterministic=true, where a verdict shows to the bit what "
        f"they are worth: {LOCAL_INPUTS}",
    ),
    Limit(
        "training.recompute",
        lambda recompute, spec: recompute != "selective" or not _captures_attention(spec.cuda_graph),
        "set training.recompute=none, or cuda_graph.impl=full_iteration, or leave attention out of cuda_graph.scope: "
        "megatron-core 0.16.1 recomputes attention by a function that refuses torch.autograd.grad, by which layers are "
        "captured (tensor_parallel/random.py:539)",
    ),
    Limit(
        "parallelism.pp",
        lambda pp, spec: pp == 1 or spec.parallelism.vpp > 1 or spec.cuda_graph.impl != "full_iteration",
        "set parallelism.pp=1, or vpp to 2 or more with schedule=interleaved: stages of one piece wait for the whole device "
        "in every transfer (megatron-core 0.16.1 pipeline_parallel/p2p_communication.py:398), which no capture allows",
    ),
    Limit(
        "model.rope_scaling",
        lambda scaling, spec: scaling != "yarn" or not _captures_attention(spec.cuda_graph),
        "leave attention out of cuda_graph.scope, or use full_iteration: megatron-core 0.16.1 captures "
        "attention of a YaRN model without positions, and says nothing (transformer/cuda_graphs.py:1863)",
    ),
    _only("digest_steps", 0, "set engine=torch_native: Megatron-Core's layers are not digested here"),
)

LIMITS: dict[EngineName, tuple[Limit, ...]] = {"torch_native": TORCH_NATIVE, "megatron": MEGATRON}
