"""Rules on how model and batch divide over the ranks. A job checks them again."""

from __future__ import annotations

from launch.contract.spec import RunSpec
from launch.support.rule import ARITHMETIC, CONFIG, MCORE, MegatronRule, NativeRule, Rule, divides


def _indivisible_widths(spec: RunSpec) -> list[str]:
    model, tp, etp = spec.model, "parallelism.tp", "parallelism.etp"
    split = {"vocab_size": tp}
    if model.has_dense_layers:
        split["ffn_hidden_size"] = tp
    if model.is_moe:
        split |= {"moe_shared_expert_ffn_hidden_size": tp, "moe_ffn_hidden_size": etp}
    degrees = {tp: spec.parallelism.tp, etp: spec.parallelism.etp}
    wrong = {name: degree for name, degree in split.items() if not divides(degrees[degree], getattr(model, name))}
    return [*(f"model.{name}" for name in wrong), *dict.fromkeys(wrong.values())]


def _sequence_indivisible(spec: RunSpec) -> bool:
    layout, length = spec.parallelism, spec.training.sequence_length
    if layout.cp < 1:
        return False
    if layout.cp > 1 and not divides(2 * layout.cp, length):
        return True
    return (layout.sequence_parallel or spec.model.is_moe) and not divides(layout.tp, length // layout.cp)


def _interleaving_mismatch(spec: RunSpec) -> bool:
    layout = spec.parallelism
    interleaved = layout.schedule == "interleaved"
    return (layout.vpp > 1) != interleaved or (interleaved and layout.pp <= 1)


def _microbatches_indivisible(spec: RunSpec) -> bool:
    layout, training = spec.parallelism, spec.training
    if layout.schedule != "interleaved" or training.micro_batch_size * layout.dp < 1:
        return False
    return not divides(layout.pp, spec.num_microbatches)


RULES: tuple[Rule, ...] = (
    Rule(
        "layout.expert_world", ("parallelism.etp", "parallelism.ep", "parallelism.pp", "parallelism.world_size"),
        "etp * ep * pp must divide the number of ranks",
        lambda spec: not divides(spec.parallelism.etp * spec.parallelism.ep * spec.parallelism.pp, spec.parallelism.world_size),
        fix="Lower ep or etp, or raise resources.gpus_per_node or resources.nodes, until etp * ep * pp divides the ranks.",
        source=f"{MCORE}parallel_state.py:792",
    ),
    Rule(
        "model.kv_channels", ("model.kv_channels",), "kv_channels must be even, since rotary embeddings turn pairs of channels",
        lambda spec: not divides(2, spec.model.kv_channels),
        fix="Set an even number of kv_channels.",
        source=ARITHMETIC,
    ),
    Rule(
        "layout.experts", ("parallelism.ep", "model.num_moe_experts"), "ep must divide the experts",
        lambda spec: spec.model.is_moe and not divides(spec.parallelism.ep, spec.model.num_moe_experts),
        fix="Choose an ep that divides num_moe_experts.",
        source=ARITHMETIC,
    ),
    Rule(
        "layout.query_groups", ("parallelism.tp", "model.num_query_groups"),
        "tp must divide the query groups, and with them the attention heads",
        lambda spec: not divides(spec.parallelism.tp, spec.model.num_query_groups),
        fix="Choose a tp that divides num_query_groups.",
        source=ARITHMETIC,
    ),
    Rule(
        "layout.widths", (), "tp must divide the vocabulary and the width of dense and shared MLPs, and etp must divide the "
        "width of experts",
        _indivisible_widths,
        fix="Round the size up to a multiple of the degree (vocab_size may be padded), or lower tp or etp.",
        source=f"{MCORE}tensor_parallel/layers.py:842, tensor_parallel/utils.py:118",
    ),
    MegatronRule(
        "layout.layers", ("parallelism.pp", "parallelism.vpp", "model.num_layers"), "pp * vpp must divide the layers",
        lambda spec: not divides(spec.parallelism.pp * spec.parallelism.vpp, spec.model.num_layers),
        fix="Choose pp and vpp whose product divides num_layers.",
        source=f"{MCORE}transformer/transformer_block.py:157, {CONFIG.removeprefix(MCORE)}:1471",
    ),
    NativeRule(
        "layout.stages", ("parallelism.pp", "parallelism.vpp", "model.num_layers"),
        "each of the pp * vpp virtual stages needs at least one layer",
        lambda spec: spec.parallelism.pp * spec.parallelism.vpp > max(spec.model.num_layers, 1),
        fix="Lower pp or vpp, or choose a deeper model.",
        source=ARITHMETIC,
    ),
    Rule(
        "layout.interleaving", ("parallelism.schedule", "parallelism.pp", "parallelism.vpp"),
        "schedule interleaved needs pp and vpp above 1, and vpp above 1 needs schedule interleaved",
        _interleaving_mismatch,
        fix="Set parallelism.vpp=1 and parallelism.schedule=1f1b, or parallelism.vpp=2 and parallelism.schedule=interleaved, with pp "
        "above 1.",
        source=f"{MCORE}parallel_state.py:745",
    ),
    Rule(
        "training.batch", ("training.global_batch_size", "training.micro_batch_size", "parallelism.dp"),
        "micro_batch_size * dp must divide the global batch",
        lambda spec: not divides(spec.training.micro_batch_size * spec.parallelism.dp, spec.training.global_batch_size),
        fix="Make global_batch_size a multiple of micro_batch_size * dp.",
        source=f"{MCORE}num_microbatches_calculator.py:341",
    ),
    Rule(
        "layout.interleaved_microbatches", ("num_microbatches", "parallelism.pp"),
        "pp must divide the micro-batches of the interleaved schedule",
        _microbatches_indivisible,
        fix="Set parallelism.vpp=1 and parallelism.schedule=1f1b, or make training.global_batch_size a multiple of pp * "
        "micro_batch_size * dp.",
        source=f"{MCORE}pipeline_parallel/schedules.py:1007",
    ),
    Rule(
        "layout.sequence_length",
        ("training.sequence_length", "parallelism.cp", "parallelism.tp", "parallelism.sequence_parallel"),
        "2 * cp must divide the sequence, and tp must divide a rank's part of it if sequence_parallel is on or the model has "
        "experts (each tensor-parallel rank then routes its part)",
        _sequence_indivisible,
        fix="Make sequence_length a multiple of 2 * cp * tp.",
        source=f"{MCORE}utils.py:2027, tensor_parallel/mappings.py:69",
    ),
)  # fmt: skip
