"""What engine megatron takes of Megatron-Core 0.16.1, and what that computes wrongly."""

from __future__ import annotations

from launch.contract.plan import Reason
from launch.contract.spec import CudaGraph, Model, RunSpec
from launch.support.support_rule import SupportRule, fixed, is_plain

LOCAL_INPUTS = (
    "a local graph of megatron-core 0.16.1 gives its input back to a pool of buffers before its own backward pass has read it "
    "(transformer/cuda_graphs.py:995), and the gradient of the first layer's norm is wrong (seen; mended in Megatron-LM pull "
    "request 4433)"
)
WITHOUT_ATTENTION = (
    "capture parts without attention (cuda_graph.scope: [moe_router, moe_preprocess], or [mlp] where layers are dense)"
)
ON_GPUS = (
    "set resources.device=cuda, or engine=torch_native: Megatron-Core's schedules and optimizers allocate on a GPU"
)


def known_faults(spec: RunSpec) -> tuple[Reason, ...]:
    """What the library that ``spec`` runs on is known to compute wrongly in it: its runs say so, and it is not advised."""
    if spec.cuda_graph.impl != "local":
        return ()
    return (Reason("megatron.local_inputs", LOCAL_INPUTS, "use transformer_engine or full_iteration"),)


def _replays_first_product(spec: RunSpec) -> bool:
    """Whether a graph of the first micro-batch is replayed for others, as where micro-batches follow one another (megatron-core
    0.16.1 transformer/cuda_graphs.py:2046); with fp8 modules of it know no first one."""
    layout = spec.parallelism
    shared = layout.pp == 1 and not layout.overlap_moe_expert_parallel_comm and spec.training.fp8 == "none"
    return shared and spec.cuda_graph.impl == "transformer_engine" and spec.num_microbatches > 1


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


MEGATRON: tuple[SupportRule, ...] = (
    fixed("placement.device", "cuda", ON_GPUS),
    fixed("model.weights", "random", "set model.weights=random, or engine=torch_native"),
    SupportRule("model.kv_channels", lambda channels, spec: channels % 2 == 0, "set an even one: RoPE rotates pairs"),
    SupportRule(
        "model.num_query_groups",
        lambda groups, spec: groups % spec.parallelism.tp == 0,
        "set parallelism.tp to a divisor of it",
    ),
    SupportRule(
        "model.rope_scaling",
        lambda scaling, spec: scaling != "llama3" or _is_llama_3s(spec.model),
        "set model.rope_original_max_position=8192, rope_low_freq_factor=1 and rope_high_freq_factor=4, Llama 3's own, "
        "or engine=torch_native",
    ),
    SupportRule(
        "model.moe_router_normalize_topk",
        lambda _, spec: not spec.model.is_moe or _routes_as_megatron(spec.model),
        "leave it true for a sigmoid of several experts, set it to false for one expert, and topk_then_softmax for "
        "several by softmax alone; or set engine=torch_native",
    ),
    SupportRule(
        "model.moe_expert_capacity_factor",
        lambda factor, spec: factor is None or spec.model.moe_pad_expert_input_to_capacity,
        "set model.moe_pad_expert_input_to_capacity=true, or model.moe_expert_capacity_factor=null (dropless)",
    ),
    SupportRule(
        "model.moe_shared_expert_ffn_hidden_size",
        lambda width, spec: width == 0 or not spec.model.add_bias_linear,
        "set model.add_bias_linear=false: Megatron-Core's shared expert has no biases",
    ),
    SupportRule(
        "parallelism.tp",
        lambda tp, spec: tp == spec.parallelism.etp or not spec.model.is_moe or spec.parallelism.ep > 1,
        "set it to 1, or parallelism.ep to 2 or more, or etp to tp: with ep=1 megatron-core 0.16.1 reduces the gradients of experts "
        "over the ranks of dp and cp, whoever holds the same",
    ),
    SupportRule(
        "parallelism.overlap_moe_expert_parallel_comm",
        lambda on, spec: not on or (spec.model.num_layers - 1) % max(spec.model.moe_layer_freq, 1) == 0,
        "set it to false, or a model.num_layers whose last layer has experts: behind a dense one megatron-core 0.16.1 leaves "
        "the last norm out of the model (models/gpt/fine_grained_callables.py:583)",
    ),
    SupportRule(
        "parallelism.overlap_moe_expert_parallel_comm",
        lambda on, spec: not on or spec.parallelism.ep != spec.model.num_moe_experts or spec.parallelism.etp > 1,
        "set it to false, or parallelism.ep below model.num_moe_experts: on a rank with one expert megatron-core 0.16.1 frees "
        "tokens that its backward pass has yet to read (models/gpt/fine_grained_callables.py:74)",
    ),
    SupportRule(
        "parallelism.cp",
        lambda cp, spec: cp == 1 or (is_plain(spec.model) and spec.training.precision == "bf16"),
        "set parallelism.cp=1, or training.precision=bf16 for a model without windows and sinks: Transformer Engine's ring "
        "attention has neither, and takes 16 bits alone (2.11 pytorch/attention/dot_product_attention/context_parallel.py:4026, "
        ":4046, utils.py:756)",
    ),
    SupportRule(
        "parallelism.schedule",
        lambda schedule, spec: schedule != "gpipe" or spec.parallelism.pp == 1,
        "set parallelism.schedule=1f1b, or engine=torch_native",
    ),
    fixed("training.compile", "none"),
    SupportRule(
        "training.attention_backend",
        lambda backend, spec: backend in ("auto", "transformer_engine"),
        "set training.attention_backend=auto: the layers are Transformer Engine's",
    ),
    SupportRule(
        "training.gradient_accumulation_fusion",
        lambda on, spec: not on or not _replays_first_product(spec),
        "set it to false, or cuda_graph.impl=full_iteration, or parallelism.pp to 2 or more, or a global_batch_size of one "
        "micro-batch a step: one graph replays all micro-batches, and transformer-engine 2.11 captures it as that of the first, "
        "which writes gradients instead of adding to them (pytorch/graph.py:484; seen; mended in TransformerEngine pull "
        "request 2715)",
    ),
    SupportRule(
        "training.moe_router_fusion",
        lambda on, spec: not on or (spec.model.is_moe and not spec.training.deterministic),
        "set it to false: a dense model has no router, and in deterministic mode it is not known whether Transformer Engine's "
        "kernels add in a fixed order",
    ),
    fixed("training.cpu_offloading", False),
    fixed("training.variable_sequence_lengths", False),
    fixed("data.packed_sequences", False, "set data.packed_sequences=false, or engine=torch_native"),
    SupportRule(
        "cuda_graph.impl",
        lambda impl, spec: impl != "local" or spec.training.deterministic,
        "use transformer_engine or full_iteration, or set training.deterministic=true, where a verdict shows to the bit what "
        f"they are worth: {LOCAL_INPUTS}",
    ),
    SupportRule(
        "training.recompute",
        lambda recompute, spec: recompute != "selective" or not _captures_attention(spec.cuda_graph),
        f"set training.recompute=none, or cuda_graph.impl=full_iteration, or {WITHOUT_ATTENTION}: megatron-core 0.16.1 "
        "recomputes attention by a function that refuses torch.autograd.grad, by which layers are "
        "captured (tensor_parallel/random.py:539)",
    ),
    SupportRule(
        "parallelism.pp",
        lambda pp, spec: pp == 1 or spec.parallelism.vpp > 1 or spec.cuda_graph.impl != "full_iteration",
        "set parallelism.pp=1, or vpp to 2 or more with schedule=interleaved: stages of one piece wait for the whole device "
        "in every transfer (megatron-core 0.16.1 pipeline_parallel/p2p_communication.py:398), which no capture allows",
    ),
    SupportRule(
        "model.rope_scaling",
        lambda scaling, spec: scaling != "yarn" or not _captures_attention(spec.cuda_graph),
        f"{WITHOUT_ATTENTION}, or use full_iteration: megatron-core 0.16.1 captures attention of a YaRN model "
        "without positions, and says nothing (transformer/cuda_graphs.py:1863)",
    ),
    fixed("digest_steps", 0, "set engine=torch_native: Megatron-Core's layers are not digested here"),
)
