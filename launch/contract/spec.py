"""RunSpec: all settings of a run, as frozen dataclasses in plain Python.

This module is a contract. The orchestrator writes a RunSpec, the job reads it, and the analysis compares two of them. It must
not import torch. Fields of the model section are named as in Megatron-Core's TransformerConfig. Fields of the parallelism
section have the usual short names (tp, pp, ep).

launch/contract/spec_ids.py computes the digests that name a run, its workload and its task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from launch.common.atomic_files import members, read_json
from launch.contract import spec_ids
from launch.contract.graph_impls import GRAPH_IMPLS, SCOPE_PARTS, UNKNOWN, GraphImplementation
from launch.contract.records.events import SETTLE_STEPS

Device = Literal["cpu", "cuda"]
EngineName = Literal["torch_native", "megatron", "command"]
MegatronCore = Literal["0.16", "0.19"]
GraphImpl = Literal["none", "torch_compile", "torch", "transformer_engine", "local", "full_iteration", "command"]
FrameworkName = Literal["script", "huggingface", "lightning", "megatron_lm", "megatron_bridge", "torchtitan", "logs"]
Launcher = Literal["torchrun", "srun"]
Profiler = Literal["none", "nsys"]
Axis = Literal["tp", "cp", "dp", "pp", "etp", "ep", "expert_dp"]
FaultKind = Literal[
    "none", "exception", "nan", "hang", "segfault", "host_kill",
    "item_in_capture", "background_thread", "unjoined_stream", "legacy_stream", "unregistered_generator",
    "oom_eager", "oom_capture", "oom_replay",
    "input_freed", "dynamic_shape", "frozen_scalar", "frozen_draw", "missing_attention_backend",
]  # fmt: skip


LayerPart = Literal["attention", "mlp", "experts", "mamba"]
LAYER_LETTERS: Mapping[str, LayerPart] = {"M": "mamba", "*": "attention", "-": "mlp"}
"""Megatron's letters for the layers of a hybrid model."""
HYBRID_SCOPES: Mapping[str, str] = {"M": "mamba", "*": "attn", "-": "mlp"}
"""The graph scope of each letter."""


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. ``num_moe_experts=0`` is a dense model; sizes are per layer, in elements.

    ``window_size`` counts the tokens that a windowed layer attends to, the token itself included. ``hybrid_override_pattern``
    makes a hybrid model. It has a letter for each layer, which then has this part alone (LAYER_LETTERS).
    """

    preset: str = ""
    weights: str = "random"
    num_layers: int = 2
    hybrid_override_pattern: str = ""
    hidden_size: int = 64
    num_attention_heads: int = 4
    num_query_groups: int = 4
    kv_channels: int = 16
    ffn_hidden_size: int = 256
    vocab_size: int = 256
    activation: Literal["swiglu", "clamped_quick_gelu_glu"] = "swiglu"
    norm_epsilon: float = 1e-6
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    add_bias_linear: bool = False
    tie_embeddings: bool = False
    rotary_base: float = 10_000.0
    rope_scaling: Literal["none", "llama3", "yarn"] = "none"
    rope_scaling_factor: float = 1.0
    rope_original_max_position: int = 0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_truncate: bool = True
    window_size: int = 0
    window_attn_skip_freq: int = 0
    attention_sinks: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    num_moe_experts: int = 0
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_layer_freq: int = 1
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_order: Literal["softmax_then_topk", "topk_then_softmax"] = "softmax_then_topk"
    moe_router_normalize_topk: bool = True
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_shared_expert_ffn_hidden_size: int = 0
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    init_std: float = 0.02

    @property
    def is_moe(self) -> bool:
        return self.num_moe_experts > 0

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers."""
        return self.attention_dropout > 0 or self.hidden_dropout > 0

    @property
    def attends_to_all(self) -> bool:
        """Whether every token attends to all tokens before it, and to nothing else."""
        return self.window_size == 0 and not self.attention_sinks

    def window_of_layer(self, number: int) -> int:
        """Return the window of layer ``number``, counted from 0. A window of 0 means that the layer sees the whole sequence.

        Every ``window_attn_skip_freq``-th layer sees it all (Megatron-Core's ``is_layer_window_attention`` counts from 1).
        """
        skip = self.window_attn_skip_freq
        return 0 if skip and (number + 1) % skip == 0 else self.window_size

    @property
    def is_hybrid(self) -> bool:
        return bool(self.hybrid_override_pattern)

    def parts_of_layer(self, number: int) -> tuple[LayerPart, ...]:
        """Return the parts of layer ``number``, counted from 0. In an MoE model, layers 0, ``moe_layer_freq``, ... have experts."""
        if self.is_hybrid:
            letter = self.hybrid_override_pattern[number : number + 1]
            return (LAYER_LETTERS[letter],) if letter in LAYER_LETTERS else ()
        return "attention", "experts" if self.is_moe and number % self.moe_layer_freq == 0 else "mlp"

    @property
    def has_dense_layers(self) -> bool:
        """Whether at least one layer has a plain MLP (Megatron: ``moe_layer_freq`` above 1)."""
        if self.is_hybrid:
            return "-" in self.hybrid_override_pattern
        return not self.is_moe or self.moe_layer_freq > 1

    @property
    def layer_scopes(self) -> tuple[str, ...]:
        """The graph scopes that together contain every layer."""
        if self.is_hybrid:
            return tuple(scope for letter, scope in HYBRID_SCOPES.items() if letter in self.hybrid_override_pattern)
        return ("attn", *(("mlp",) if self.has_dense_layers else ()), *(("moe",) if self.is_moe else ()))


@dataclass(frozen=True)
class Parallelism:
    """Degrees of each kind of parallelism. There are ``tp * cp * pp * dp`` ranks, and ``etp * ep`` divides ``tp * cp * dp``.

    Ranks are in Megatron-Core's order tp-cp-ep-dp-pp (parallel_state.RankGenerator): neighbours share a tensor-parallel
    group, and a pipeline stage is a contiguous range of ranks. Within a stage, experts have their own grid in the order
    etp-ep-expert_dp: neighbours share an expert-tensor-parallel group, ranks of an expert-parallel group hold different
    experts, and ranks with the same part of the same experts form an expert-data-parallel group.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    dispatcher: Literal["allgather", "alltoall"] = "alltoall"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    batch_p2p_sync: bool = True
    """Whether stages that are not interleaved wait for the whole device after each transfer (Megatron-Core's default)."""

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    @property
    def stage_size(self) -> int:
        """The number of ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        return self.stage_size // (self.etp * self.ep)

    def size(self, axis: Axis) -> int:
        degree: int = getattr(self, axis)
        return degree

    def rank_in(self, axis: Axis, rank: int) -> int:
        """Return the position of ``rank`` in its group along ``axis``."""
        return rank // self._stride(axis) % self.size(axis)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks of ``rank``'s group along ``axis``, in order."""
        stride = self._stride(axis)
        first = rank - self.rank_in(axis, rank) * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return all groups along ``axis``. Every rank is in exactly one."""
        return tuple(dict.fromkeys(self.group(axis, rank) for rank in range(self.world_size)))

    def _stride(self, axis: Axis) -> int:
        """Return the distance between neighbouring ranks of a group."""
        experts = {"etp": 1, "ep": self.etp, "expert_dp": self.etp * self.ep}
        return {"tp": 1, "cp": self.tp, "dp": self.tp * self.cp, "pp": self.stage_size, **experts}[axis]


@dataclass(frozen=True)
class Training:
    """The training loop: lengths in tokens, batches in sequences, rates per optimizer step."""

    steps: int = 100
    sequence_length: int = 128
    micro_batch_size: int = 1
    global_batch_size: int = 8
    precision: Literal["fp32", "bf16"] = "fp32"
    gradient_precision: Literal["fp32", "bf16"] = "fp32"
    fp8: Literal["none", "delayed", "current"] = "none"
    fp8_weight_caching: bool = True
    """Whether the microbatches of a step share one cast of each weight to 8 bits."""
    optimizer: Literal["adamw"] = "adamw"
    optimizer_precision: Literal["fp32", "lean"] = "fp32"
    """``lean``: fp32 master weights stored as the bf16 weights and their missing 16 bits, and bf16 moments."""
    learning_rate: float = 3e-4
    min_learning_rate: float = 0.0
    learning_rate_schedule: Literal["constant", "cosine"] = "cosine"
    learning_rate_warmup_steps: int = 0
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    clip_grad: float = 1.0
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[str, ...] = ()
    compile: Literal["none", "elementwise", "whole"] = "none"
    attention_backend: Literal["auto", "sdpa", "flex", "transformer_engine"] = "auto"
    gradient_accumulation_fusion: bool = False
    moe_router_fusion: bool = False
    capturable_optimizer: bool = False
    """Whether Megatron-Core's Adam uses kernels that a graph can contain, in the eager baseline too."""
    cpu_offloading: bool = False
    variable_sequence_lengths: bool = False
    deterministic: bool = False
    seed: int = 1234

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute_modules", tuple(sorted(self.recompute_modules)))  # they are a set

    def shortened(self, steps: int) -> Training:
        """Return the same training with only ``steps`` steps."""
        warmup = min(self.learning_rate_warmup_steps, steps)
        return dataclasses.replace(self, steps=steps, learning_rate_warmup_steps=warmup)

    def draws_again(self, model: Model) -> bool:
        """Return whether recomputation repeats random draws. Hidden dropout lies behind the modules that can be named."""
        return (
            model.draws if self.recompute == "full" else model.attention_dropout > 0 and "core_attn" in self.recomputed
        )

    @property
    def recomputed(self) -> frozenset[str]:
        """The modules that selective recomputation computes again; by default, as in Megatron-Core, the core of attention."""
        return frozenset(self.recompute_modules or ("core_attn",)) if self.recompute == "selective" else frozenset()


BYTE_VALUES = 256
"""The vocabulary of text without a tokenizer, whose tokens are bytes."""


@dataclass(frozen=True)
class Data:
    """Where tokens come from.

    ``text`` without a path reads the source of Python's standard library. Without a tokenizer, tokens are bytes. ``indexed`` is
    Megatron's pair of files; ``path`` leaves out ``.bin`` and ``.idx``. ``eod_token`` ends a document.
    """

    kind: Literal["text", "indexed", "synthetic"] = "text"
    path: str | None = None
    tokenizer: str | None = None
    eod_token: int | None = None
    packed_sequences: bool = False
    max_documents: int | None = None
    """The most documents in a packed sequence."""


@dataclass(frozen=True)
class CudaGraph:
    """Which implementation captures what. An empty scope captures the whole layer, model or step, by the implementation."""

    impl: GraphImpl = "none"
    scope: tuple[str, ...] = ()
    warmup_steps: int = 3
    optimizer: bool = False
    """Whether full_iteration captures clipping and the optimizer too."""
    name: str = ""
    """The name of these graphs with engine command. ``arguments`` make its program capture them."""
    arguments: tuple[str, ...] = ()
    mend: tuple[str, ...] = ()
    """Known faults of Megatron-Core that engine megatron repairs in this cell (launch/engines/megatron/mends/)."""

    @property
    def capture_step(self) -> int:
        """The step in which graphs are captured, counted from 0."""
        return 0 if self.implementation.captures_in_first_step else self.warmup_steps

    @property
    def implementation(self) -> GraphImplementation:
        return GRAPH_IMPLS.get(self.impl, UNKNOWN)

    @property
    def label(self) -> str:
        if self.impl == "none":
            return "eager"
        if self.name:
            return self.name
        rest = (*(("optimizer",) if self.optimizer else ()), *(("mended",) if self.mend else ()))
        return ".".join((self.impl, *self.scope, *rest))


@dataclass(frozen=True)
class Fault:
    """An injected fault (launch/train/fault_injection.py). ``step`` is an optimizer step, counted from 0. A fault of a capture
    ignores ``step`` and happens in the capture's step."""

    kind: FaultKind = "none"
    step: int = 5

    @property
    def is_set(self) -> bool:
        return self.kind != "none"


@dataclass(frozen=True)
class Placement:
    """Where ranks run: ``nodes * ranks_per_node`` ranks, each with ``threads_per_rank`` CPU threads."""

    device: Device = "cpu"
    nodes: int = 1
    ranks_per_node: int = 1
    threads_per_rank: int = 1


def first_of_task(rank: int, ranks_per_task: int) -> int:
    """Return the first rank of the process that started ``rank``. The log and the exit of all its ranks have that number."""
    return rank - rank % ranks_per_task


@dataclass(frozen=True)
class Command:
    """The user's program, which engine command runs. launch/frameworks/command_line.py fills in its placeholders.

    ``flags`` and ``eager`` follow the words of ``run``: ``flags`` in every run, ``eager`` in an eager run instead of
    ``CudaGraph.arguments``. ``launcher`` torchrun starts the program once on each node, srun once for each rank. ``pattern`` is a
    regular expression for its printed lines, with groups named ``step``, ``loss`` and ``grad_norm``.
    """

    framework: FrameworkName = "script"
    run: str = ""
    workdir: str = ""
    launcher: Launcher = "torchrun"
    pattern: str = ""
    flags: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSpec:
    """One run, fully resolved."""

    engine: EngineName = "torch_native"
    megatron_core: MegatronCore = "0.16"
    """The release of Megatron-Core. Engine megatron runs on it, and ``export`` prints its names."""
    model: Model = field(default_factory=Model)
    parallelism: Parallelism = field(default_factory=Parallelism)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    cuda_graph: CudaGraph = field(default_factory=CudaGraph)
    placement: Placement = field(default_factory=Placement)
    fault: Fault = field(default_factory=Fault)
    command: Command = field(default_factory=Command)
    environment: Mapping[str, str] = field(default_factory=dict)
    repeat: int = 0
    profile: Profiler = "none"
    """The profiler that records the whole run for a person. A profiled run is slower. If set, every digest includes this
    field."""
    perturbed: bool = False
    """Whether step ``first_compared`` is perturbed by one unit in the last place (launch/train/perturbation.py), or a program from
    this step on (launch/observe/steps/perturbation.py). Such an eager run shows how far a harmless difference between kernels grows. No
    digest contains this field."""
    inspect: bool = False
    """Whether steps after the timed ones are inspected (launch/train/inspection/capture_blockers.py). No digest contains this
    field, because it does not change what a run computes."""
    step_checks: int = 0
    """How many steps of a graphed run are also computed uncaptured (launch/contract/records/step_check.py). The digests of
    workload and task do not contain this field."""
    layer_check_steps: int = 0
    """If above 0, step checks also compare the outputs of layers and their gradients, and lie within this many first steps.
    Such a run is for diagnosis and its speed does not count, so every digest contains this field if it is set."""

    @property
    def first_compared(self) -> int:
        """The first step after the capture, also of eager runs."""
        return self.cuda_graph.capture_step + 1

    @property
    def first_measured(self) -> int:
        """The first measured step, also of eager runs, if graphs are captured after the warm-up."""
        return self.cuda_graph.warmup_steps + 1 + SETTLE_STEPS

    @property
    def middle(self) -> int:
        """The step before which the observer of a user's program digests the state once more, if steps are measured then."""
        return self.training.steps // 2

    @property
    def checked_steps(self) -> tuple[int, ...]:
        """The steps with a step check: the first one after the capture, the last one, and others evenly between."""
        first, last = self.first_compared, (self.layer_check_steps or self.training.steps) - 1
        if not self.graphed or self.step_checks == 0 or first > last:
            return ()
        between = max(self.step_checks - 1, 1)
        return tuple(sorted({first + round((last - first) * number / between) for number in range(self.step_checks)}))

    @property
    def steps_after_checks(self) -> tuple[int, ...]:
        """The steps of the steady window that a step check may have slowed down: the checked one and the next."""
        checked = {step + after for step in self.checked_steps[1:] for after in (0, 1)}
        return tuple(sorted(step for step in checked if step < self.training.steps))

    @property
    def num_microbatches(self) -> int:
        """Micro-batches a rank runs each step (gradient accumulation)."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.parallelism.dp)

    @property
    def graphed(self) -> bool:
        return self.cuda_graph.impl != "none"

    @property
    def ranks_per_task(self) -> int:
        """The ranks per process that srun or a host's supervisor starts. A torchrun process starts all ranks of its node."""
        by_torchrun = self.engine == "command" and self.command.launcher == "torchrun"
        return self.placement.ranks_per_node if by_torchrun else 1

    @property
    def made_elsewhere(self) -> bool:
        """Whether only the run's logs are known, so that nothing here can run it (``wrap --from-logs``)."""
        return self.engine == "command" and self.command.framework == "logs"

    @property
    def compiles(self) -> bool:
        """Whether Inductor compiles any part of it besides attention kernels."""
        return self.training.compile != "none" or self.compiles_whole

    @property
    def compiles_whole(self) -> bool:
        """Whether Inductor compiles model and loss as one function."""
        return self.training.compile == "whole" or self.cuda_graph.implementation.compiles

    @cached_property
    def captured_parts(self) -> frozenset[str]:
        """The parts of a step that graphs contain: parts of layers (SCOPE_PARTS), "rest of the model" and "optimizer"."""
        graph, implementation = self.cuda_graph, self.cuda_graph.implementation
        whole_layer = frozenset().union(*(SCOPE_PARTS[name] for name in self.model.layer_scopes))
        if implementation.takes_whole_model:
            return whole_layer | {"rest of the model"} | ({"optimizer"} if graph.optimizer else set())
        if not implementation.takes_scope:
            return frozenset()
        if self.model.is_hybrid:
            # Each layer has one part.
            named = (SCOPE_PARTS[name] for name in graph.scope if name in self.model.layer_scopes)
            return frozenset().union(*named) if graph.scope else whole_layer
        if not graph.scope or (not implementation.splits_layers and "attn" in graph.scope):
            return whole_layer
        if not implementation.splits_layers:
            return SCOPE_PARTS["attn"] | SCOPE_PARTS["mlp"] if "mlp" in graph.scope else frozenset()
        return frozenset().union(*(SCOPE_PARTS.get(name, frozenset()) for name in graph.scope))

    @cached_property
    def identity(self) -> Mapping[str, str]:
        return spec_ids.identity(self)

    @cached_property
    def workload_id(self) -> str:
        return spec_ids.workload_id(self)

    @cached_property
    def cell_id(self) -> str:
        """The graph settings' label and a digest: ``torch_compile-1a2b3c4d5e``."""
        return f"{self.cuda_graph.label}-{spec_ids.cell_digest(self)}"

    @property
    def run_id(self) -> str:
        return spec_ids.run_id(self.cell_id, self.repeat, perturbed=self.perturbed)

    @cached_property
    def task_id(self) -> str:
        return spec_ids.task_id(self)


SECTIONS: Mapping[str, Any] = {
    name: cls for name, cls in get_type_hints(RunSpec).items() if dataclasses.is_dataclass(cls)
}


def spec_to_json(spec: RunSpec) -> dict[str, Any]:
    """Return ``spec`` as plain JSON values, one mapping per section."""
    content = members(spec)
    for name in SECTIONS:
        section = vars(content[name])
        content[name] = {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}
    return content | {"environment": dict(spec.environment)}


def spec_from_json(content: Mapping[str, Any]) -> RunSpec:
    """Return the spec that :func:`spec_to_json` wrote.

    Raises:
        TypeError: a field is unknown to this version.
    """
    sections = {name: _section(cls, **_hashable(content.get(name, {}))) for name, cls in SECTIONS.items()}
    return RunSpec(**{**content, **sections})


def _hashable(section: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in section.items()}


@lru_cache(maxsize=4096, typed=True)
def _section(cls: type, **fields: Any) -> Any:
    """Thousands of cells share few sections. The types tell 1 from 1.0 and True."""
    return cls(**fields)


def read_spec(path: Path) -> RunSpec:
    """Read a run's spec.json."""
    return spec_from_json(read_json(path))
