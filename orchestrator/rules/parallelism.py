"""Layouts that no set of ranks can form, or that the model does not fit."""

from __future__ import annotations

from collections.abc import Mapping

from launch.contract.spec import RunSpec
from orchestrator.rules.bounds import POSITIVE, Interval, outside
from orchestrator.rules.rule import (
    ANY,
    ARITHMETIC,
    BOTH,
    CONFIG,
    MCORE,
    MCORE_016,
    MEGATRON,
    TORCH_NATIVE,
    Rule,
    divides,
)

DEGREES: Mapping[str, Interval] = dict.fromkeys(("tp", "pp", "vpp", "ep", "etp", "cp", "dp"), POSITIVE)
PLACES: Mapping[str, Interval] = dict.fromkeys(("nodes", "ranks_per_node", "threads_per_rank"), POSITIVE)


def degrees_out_of_range(spec: RunSpec) -> str | None:
    """Every parallel degree is at least 1."""
    return outside("parallelism", spec.parallelism, DEGREES)


def places_out_of_range(spec: RunSpec) -> str | None:
    """Nodes, ranks a node and threads a rank are at least 1."""
    return outside("placement", spec.placement, PLACES)


def world_mismatch(spec: RunSpec) -> str | None:
    """tp * cp * pp * dp is the number of ranks placed."""
    layout, place = spec.parallelism, spec.placement
    if layout.world_size == place.nodes * place.ranks_per_node:
        return None
    return (
        f"tp={layout.tp} * cp={layout.cp} * pp={layout.pp} * dp={layout.dp} is {layout.world_size} ranks, but "
        f"nodes={place.nodes} * ranks_per_node={place.ranks_per_node} is {place.nodes * place.ranks_per_node}"
    )


def expert_world_indivisible(spec: RunSpec) -> str | None:
    """On the experts' side, etp * ep * pp divides the number of ranks."""
    layout = spec.parallelism
    if divides(layout.etp * layout.ep * layout.pp, layout.world_size):
        return None
    return f"etp={layout.etp} * ep={layout.ep} * pp={layout.pp} does not divide {layout.world_size} ranks"


def expert_parallel_dense(spec: RunSpec) -> str | None:
    """Expert parallelism needs experts."""
    layout = spec.parallelism
    if spec.model.is_moe or (layout.ep <= 1 and layout.etp <= 1):
        return None
    return f"parallelism.ep={layout.ep}, parallelism.etp={layout.etp} with model.num_moe_experts=0"


def experts_indivisible(spec: RunSpec) -> str | None:
    """ep divides the experts."""
    if not spec.model.is_moe or divides(spec.parallelism.ep, spec.model.num_moe_experts):
        return None
    return f"parallelism.ep={spec.parallelism.ep} does not divide model.num_moe_experts={spec.model.num_moe_experts}"


def heads_indivisible(spec: RunSpec) -> str | None:
    """tp divides the attention heads."""
    tp, heads = spec.parallelism.tp, spec.model.num_attention_heads
    return None if divides(tp, heads) else f"parallelism.tp={tp} does not divide model.num_attention_heads={heads}"


def groups_indivisible(spec: RunSpec) -> str | None:
    """tp divides the query groups."""
    tp, groups = spec.parallelism.tp, spec.model.num_query_groups
    return None if divides(tp, groups) else f"parallelism.tp={tp} does not divide model.num_query_groups={groups}"


def groups_incommensurate(spec: RunSpec) -> str | None:
    """tp divides the query groups or is a multiple of them."""
    if groups_indivisible(spec) is None or divides(spec.model.num_query_groups, spec.parallelism.tp):
        return None
    return f"parallelism.tp={spec.parallelism.tp}, model.num_query_groups={spec.model.num_query_groups}"


def widths_indivisible(spec: RunSpec) -> str | None:
    """tp divides the vocabulary and the width of dense and shared MLPs, etp the width of the experts."""
    model, layout = spec.model, spec.parallelism
    split = {"vocab_size": layout.tp}
    if model.has_dense_layers:
        split["ffn_hidden_size"] = layout.tp
    if model.is_moe:
        split |= {"moe_shared_expert_ffn_hidden_size": layout.tp, "moe_ffn_hidden_size": layout.etp}
    wrong = [
        f"model.{name}={getattr(model, name)} over {degree} ranks"
        for name, degree in split.items()
        if not divides(degree, getattr(model, name))
    ]
    return ", ".join(wrong) or None


def layers_indivisible(spec: RunSpec) -> str | None:
    """pp * vpp divides the layers."""
    layout = spec.parallelism
    if divides(layout.pp * layout.vpp, spec.model.num_layers):
        return None
    return f"pp={layout.pp} * vpp={layout.vpp} does not divide model.num_layers={spec.model.num_layers}"


def more_stages_than_layers(spec: RunSpec) -> str | None:
    """Every one of pp * vpp virtual stages has a layer."""
    layout = spec.parallelism
    if layout.pp * layout.vpp <= max(spec.model.num_layers, 1):
        return None
    return f"pp={layout.pp} * vpp={layout.vpp} with model.num_layers={spec.model.num_layers}"


def interleaving_mismatch(spec: RunSpec) -> str | None:
    """vpp above 1, pp above 1 and schedule interleaved go together."""
    layout = spec.parallelism
    interleaved = layout.schedule == "interleaved"
    if (layout.vpp > 1) == interleaved and (layout.pp > 1 or not interleaved):
        return None
    return f"parallelism.schedule={layout.schedule} with vpp={layout.vpp} and pp={layout.pp}"


def interleaved_microbatches(spec: RunSpec) -> str | None:
    """The interleaved schedule runs micro-batches in groups of pp."""
    layout, training = spec.parallelism, spec.training
    sequences = training.micro_batch_size * layout.dp
    if layout.schedule != "interleaved" or sequences < 1 or divides(layout.pp, training.global_batch_size // sequences):
        return None
    return f"{training.global_batch_size // sequences} micro-batches with parallelism.pp={layout.pp}"


def sequence_parallel_alone(spec: RunSpec) -> str | None:
    """sequence_parallel needs tp above 1."""
    if not spec.parallelism.sequence_parallel or spec.parallelism.tp > 1:
        return None
    return f"parallelism.sequence_parallel=true with parallelism.tp={spec.parallelism.tp}"


def moe_without_sequence_parallel(spec: RunSpec) -> str | None:
    """A mixture of experts with tp above 1 trains with sequence_parallel only."""
    layout = spec.parallelism
    if not spec.model.is_moe or layout.tp <= 1 or layout.sequence_parallel:
        return None
    return f"model.num_moe_experts={spec.model.num_moe_experts}, parallelism.tp={layout.tp}, sequence_parallel=false"


def sequence_indivisible(spec: RunSpec) -> str | None:
    """A sequence is cut in 2 * cp chunks of equal length, and a rank's part in tp where sequence_parallel is on or experts
    are (tensor-parallel ranks route a stretch each)."""
    layout, length = spec.parallelism, spec.training.sequence_length
    split = layout.sequence_parallel or spec.model.is_moe
    if layout.cp < 1:
        return None
    fits_cp = layout.cp == 1 or divides(2 * layout.cp, length)
    if fits_cp and (not split or divides(layout.tp, length // layout.cp)):
        return None
    return (
        f"training.sequence_length={length} with parallelism.cp={layout.cp}, parallelism.tp={layout.tp}, "
        f"sequence_parallel={str(layout.sequence_parallel).lower()}"
    )


def biased_experts_split(spec: RunSpec) -> str | None:
    """Experts with biases are not split: etp=1."""
    if not spec.model.is_moe or not spec.model.add_bias_linear or spec.parallelism.etp <= 1:
        return None
    return f"model.add_bias_linear=true with parallelism.etp={spec.parallelism.etp}"


RULES: tuple[Rule, ...] = (
    Rule(
        "layout.degrees", BOTH, ANY, degrees_out_of_range,
        remedy="Set the degrees named to 1 or more, or leave dp out: it follows from the resources.",
        source=ARITHMETIC,
    ),
    Rule(
        "layout.places", BOTH, ANY, places_out_of_range,
        remedy="Set resources.nodes, resources.gpus_per_node and resources.threads_per_rank to 1 or more.",
        source=ARITHMETIC,
    ),
    Rule(
        "layout.world", BOTH, ANY, world_mismatch,
        remedy="Choose tp * cp * pp * dp equal to resources.nodes * resources.gpus_per_node; dp, left out, follows where it can.",
        source=f"{MCORE}parallel_state.py:738",
    ),
    Rule(
        "layout.expert_world", BOTH, ANY, expert_world_indivisible,
        remedy="Lower ep or etp, or add nodes, until etp * ep * pp divides the ranks.",
        source=f"{MCORE}parallel_state.py:792",
    ),
    Rule(
        "layout.expert_parallel_dense", BOTH, ANY, expert_parallel_dense,
        remedy="Set ep and etp to 1 for a dense model.",
        source=f"{CONFIG}:1048",
    ),
    Rule(
        "layout.experts", BOTH, ANY, experts_indivisible,
        remedy="Choose an ep that divides num_moe_experts.",
        source=ARITHMETIC,
    ),
    Rule(
        "layout.heads", BOTH, ANY, heads_indivisible,
        remedy="Choose a tp that divides num_attention_heads.",
        source=f"{CONFIG}:924",
    ),
    Rule(
        "layout.query_groups", TORCH_NATIVE, ANY, groups_indivisible,
        remedy="Choose a tp that divides num_query_groups.",
        source=ARITHMETIC,
    ),
    Rule(
        "layout.megatron_query_groups", MEGATRON, MCORE_016, groups_incommensurate,
        remedy="Choose a tp that divides num_query_groups.",
        source=f"{CONFIG}:940",
    ),
    Rule(
        "layout.widths", BOTH, ANY, widths_indivisible,
        remedy="Round the size up to a multiple of the degree (vocab_size may be padded), or lower tp or etp.",
        source=f"{MCORE}tensor_parallel/layers.py:842, tensor_parallel/utils.py:118",
    ),
    Rule(
        "layout.layers", MEGATRON, MCORE_016, layers_indivisible,
        remedy="Choose pp and vpp whose product divides num_layers.",
        source=f"{MCORE}transformer/transformer_block.py:157, {CONFIG.removeprefix(MCORE)}:1471",
    ),
    Rule(
        "layout.stages", TORCH_NATIVE, ANY, more_stages_than_layers,
        remedy="Lower pp or vpp, or choose a deeper model.",
        source=ARITHMETIC,
    ),
    Rule(
        "layout.interleaving", BOTH, ANY, interleaving_mismatch,
        remedy="Set schedule to interleaved with pp and vpp above 1, or to 1f1b with vpp=1 (torch_native has gpipe too).",
        source=f"{MCORE}parallel_state.py:745",
    ),
    Rule(
        "layout.interleaved_microbatches", BOTH, ANY, interleaved_microbatches,
        remedy="Make global_batch_size / (micro_batch_size * dp) a multiple of pp.",
        source=f"{MCORE}pipeline_parallel/schedules.py:1007",
    ),
    Rule(
        "layout.sequence_parallel", BOTH, ANY, sequence_parallel_alone,
        remedy="Set sequence_parallel to false, or tp to 2 or more.",
        source=f"{MCORE}model_parallel_config.py:409",
    ),
    Rule(
        "layout.moe_sequence_parallel", MEGATRON, MCORE_016, moe_without_sequence_parallel,
        remedy="Set parallelism.sequence_parallel to true, or tp to 1.",
        source=f"{MCORE}transformer/moe/moe_layer.py:379",
    ),
    Rule(
        "layout.sequence_length", BOTH, ANY, sequence_indivisible,
        remedy="Make sequence_length a multiple of 2 * cp * tp.",
        source=f"{MCORE}utils.py:2027, tensor_parallel/mappings.py:69",
    ),
    Rule(
        "layout.biased_experts", MEGATRON, MCORE_016, biased_experts_split,
        remedy="Set parallelism.etp to 1.",
        source=f"{CONFIG}:1588",
    ),
)  # fmt: skip
