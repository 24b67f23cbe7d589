"""Compare the rules with Megatron-Core's own validator, in both releases, on generated cells. Each disagreement needs a
reason."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from launch.contract.graph_impls import GRAPH_SCOPES
from launch.contract.spec import MegatronCore, RunSpec, spec_to_json
from launch.support import unsupported
from launch.support.rule import RELEASES
from orchestrator.rules import violations
from tests.megatron_release import FOLDER_0_19

CELLS = 3500
CHANGES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "model": [
        {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64},
        {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_layer_freq": 2},
        {"num_moe_experts": 4, "moe_router_topk": 1, "moe_ffn_hidden_size": 64, "moe_router_normalize_topk": False},
        {"num_moe_experts": 4, "moe_router_topk": 1, "moe_ffn_hidden_size": 64},
        {"num_moe_experts": 1, "moe_router_topk": 1, "moe_ffn_hidden_size": 64, "moe_router_normalize_topk": False},
        {"moe_expert_capacity_factor": 1.0},
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"moe_pad_expert_input_to_capacity": True},
        {"moe_shared_expert_ffn_hidden_size": 64},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_enable_expert_bias": True},
        {"add_bias_linear": True},
        {"hybrid_override_pattern": "M*-M", "hidden_size": 256}, {"hybrid_override_pattern": "M-M-", "hidden_size": 256},
        {"num_query_groups": 1}, {"attention_dropout": 0.1}, {"hidden_dropout": 0.1},
        {"num_query_groups": 3},
        {"rope_scaling": "yarn", "rope_original_max_position": 64, "rope_scaling_factor": 2.0},
    ],
    "parallelism": [
        {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"sequence_parallel": True}, {"pp": 2}, {"dispatcher": "allgather"},
        {"pp": 2, "vpp": 2, "schedule": "interleaved"}, {"vpp": 2}, {"cp": 2}, {"dp": 2, "ep": 2}, {"ep": 2}, {"etp": 2},
        {"dp": 2, "ep": 2, "overlap_moe_expert_parallel_comm": True}, {"overlap_moe_expert_parallel_comm": True},
        {"delay_wgrad_compute": True}, {"pp": 2, "batch_p2p_sync": False},
    ],
    "training": [
        {"precision": "fp32"}, {"recompute": "selective"}, {"recompute": "full"}, {"fp8": "delayed"}, {"deterministic": True},
        {"recompute": "selective", "recompute_modules": ("layernorm", "moe_act")}, {"recompute_modules": ("moe",)},
        {"recompute": "selective", "recompute_modules": ("moe",)}, {"recompute": "selective", "recompute_modules": ("mlp",)},
        {"recompute": "selective", "recompute_modules": ("shared_experts", "core_attn")},
        {"recompute": "selective", "recompute_modules": ("router",)}, {"recompute": "selective", "recompute_modules": ("layernorm",)},
    ],
}  # fmt: skip
"""Changes that a cell may make to a dense model on one rank. Without changes, the cells of that model run."""
IMPLS = ("transformer_engine", "local", "full_iteration", "none")


def cells() -> Iterator[RunSpec]:
    """Yield distinct cells with few changes each. With many changes, a cell violates so much that no rule is tested
    alone."""
    draw = random.Random(20)
    base = RunSpec(engine="megatron")
    base = replace(
        base,
        training=replace(base.training, precision="bf16", deterministic=False),
        model=replace(base.model, num_layers=4, hidden_size=128, num_attention_heads=4, num_query_groups=4),
    )
    seen = set()
    while len(seen) < CELLS:
        sections = {name: dict[str, Any]() for name in CHANGES}
        for section in draw.choices(list(CHANGES), k=draw.choice([0, 1, 2, 2, 3, 4])):
            sections[section] |= draw.choice(CHANGES[section])
        if draw.random() < 0.6:
            sections["model"] = dict(CHANGES["model"][draw.choice([0, 0, 1])]) | sections["model"]
        impl = draw.choice(IMPLS)
        scope = tuple(draw.sample(GRAPH_SCOPES, draw.choice([0, 1, 1, 2, 3]))) if draw.random() < 0.8 else ("attn",)
        graph = replace(base.cuda_graph, impl=impl, scope=() if impl in ("none", "full_iteration") else scope)
        changed = {name: replace(getattr(base, name), **values) for name, values in sections.items()}
        world = changed["parallelism"].world_size
        spec = replace(base, **changed, cuda_graph=graph)
        spec = replace(spec, placement=replace(spec.placement, device="cuda", ranks_per_node=world))
        if spec.cell_id not in seen:
            seen.add(spec.cell_id)
            yield spec


DOOMED = "Megatron-Core accepts it, and it fails or goes wrong later"
OURS = "what this engine or its weights cannot do"
STRICTER = {
    "capture.megatron_expert_sync": f"{DOOMED}: dropless dispatch waits for the host in a capture of layers or of a step",
    "layout.expert_parallel_dense": "without experts etp has no meaning, and Megatron-Core ignores it",
    "layout.expert_world": f"{DOOMED}: no process groups fit; its configuration does not know the number of ranks",
    "layout.experts": f"{DOOMED}: one expert on two ranks",
    "layout.interleaving": "the recipe names a schedule, which Megatron-Core infers from vpp",
    "layout.query_groups": OURS,
    "layout.moe_sequence_parallel": f"{DOOMED}: the expert layer's forward pass raises",
    "megatron.cp": f"{DOOMED}: Transformer Engine has no such attention",
    "megatron.dropout": f"{DOOMED}: recomputation draws other masks",
    "megatron.hybrid": OURS,
    "megatron.local_inputs": f"{DOOMED}: a gradient (0.16)",
    "megatron.local_pipeline": f"{DOOMED}: an assertion in the capture (0.19)",
    "megatron.moe_expert_capacity_factor": OURS,
    "megatron.moe_router_normalize_topk": "a different router than the recipe's, which Megatron-Core has no field for",
    "megatron.moe_shared_expert_ffn_hidden_size": f"{DOOMED}: asserted where the expert is built",
    "megatron.overlap_moe_expert_parallel_comm": f"{DOOMED}: the final norm, or tokens that were freed",
    "megatron.batch_p2p_sync": f"{DOOMED}: a transfer waits for the device in the capture",
    "megatron.precision": f"{DOOMED}: inputs of a capture are bfloat16",
    "megatron.recompute": f"{DOOMED}: a checkpoint refuses torch.autograd.grad",
    "megatron.recompute_act": "the graphed run would recompute nothing, and its eager baseline would (0.16)",
    "megatron.recompute_dense_norm": "nothing would be recomputed",
    "megatron.recompute_norm": f"{DOOMED}: the norm's weight gets no gradient",
    "megatron.tp": f"{DOOMED}: experts drift apart (0.16)",
    "megatron.yarn_positions": f"{DOOMED}: attention without positions",
    "model.expert_bias": "the recipe's field has no meaning without experts, and Megatron-Core does not get it",
    "model.padding": "the recipe's field has no meaning without experts, and Megatron-Core does not get it",
    "model.query_groups": f"{DOOMED}: heads without a group",
    "model.router_gradient": "the recipe's router would not learn; Megatron-Core gets another field, whose weight is not normalised",
    "overlap.delayed_wgrad_captured": "Megatron-LM's own arguments reject it, with this Transformer Engine",
    "overlap.expert_exchange": "moe would not be recomputed, since the schedule calls its parts (0.16)",
    "overlap.expert_exchange_captured": f"{DOOMED}: graphs across the exchange; 0.19 asserts it for transformer_engine alone",
    "scope.attn_without_attention": f"{DOOMED}: nothing is captured",
    "scope.local_mlp": f"{DOOMED}: no layer can be built",
    "scope.local_nothing": f"{DOOMED}: nothing is captured",
    "scope.mamba": f"{DOOMED}: nothing is captured",
    "scope.mlp_without_dense_layers": "a single expert is a dense model to Megatron-Core",
    "scope.preprocess_without_router": "local adds moe_router on its own; a name must say what is captured",
    "training.recompute_absent": "nothing would be recomputed",
    "training.recompute_modules": "modules have no effect where recomputation is not selective",
    "training.recompute_names": "a module is named twice",
    "training.fp8_precision": "Bridge's recipes combine fp8 with 16 bits alone",
}
"""The reasons why a rule rejects what Megatron-Core's validator accepts."""


def ask(release: MegatronCore, specs: Sequence[RunSpec]) -> list[str]:
    """Return why ``release`` rejects each spec."""
    folder = {"PYTHONPATH": str(FOLDER_0_19)} if release == "0.19" else {}
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron_oracle"],
        input=json.dumps([spec_to_json(spec) for spec in specs]),
        env=os.environ | folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[str] = json.loads(done.stdout)
    return answers


@pytest.mark.slow
def test_rules_accept_nothing_that_megatron_core_rejects_and_reject_more_for_a_reason() -> None:
    assert FOLDER_0_19.is_dir(), "Megatron-Core 0.19.2 is missing: make .venv/megatron-core-0.19.2"
    generated, stricter = list(cells()), set[str]()
    specs = {release: [replace(spec, megatron_core=release) for spec in generated] for release in RELEASES}
    with ThreadPoolExecutor() as pool:
        answers = dict(zip(RELEASES, pool.map(lambda release: ask(release, specs[release]), RELEASES), strict=True))
    for release, rejections in answers.items():
        assert len(set(rejections)) > 15, "it rejects for few reasons: are cells too much alike?"
        for spec, rejection in zip(specs[release], rejections, strict=True):
            rules = {reason.rule for reason in (*violations(spec), *unsupported(spec))}
            assert rules or not rejection, f"{release} rejects what no rule does: {rejection}\n{spec}"
            stricter |= rules if not rejection else set()
    assert stricter == set(STRICTER)
