"""Test that the words of a command alone reveal known silent faults of a user's Megatron program."""

from __future__ import annotations

import pytest

from launch.contract.spec import Command, CudaGraph, MegatronCore, Parallelism, Placement, RunSpec, Training
from launch.support import known_faults

TE = CudaGraph("transformer_engine", ("attn",))
BF16 = "t.py --bf16 --num-layers 4"
UNFUSED = f"{BF16} --no-gradient-accumulation-fusion"
LATER = "t.py train.train_iters=9 model.cuda_graph_impl"


@pytest.mark.parametrize(
    ("framework", "release", "run", "graph", "faults"),
    [
        ("megatron_lm", "0.16", BF16, CudaGraph("local"), ["local_inputs"]),
        ("megatron_lm", "0.19", BF16, CudaGraph("local"), []),
        ("megatron_lm", "0.16", f"{UNFUSED} --position-embedding-type yarn", TE, ["yarn_positions"]),
        ("megatron_lm", "0.16", f"{UNFUSED} --position-embedding-type yarn", CudaGraph("full_iteration"), []),
        ("megatron_lm", "0.16", f"{BF16} --global-batch-size 4", TE, ["fused_gradients"]),
        ("megatron_lm", "0.16", f"{UNFUSED} --global-batch-size 4", TE, []),
        ("megatron_lm", "0.16", f"{BF16} --global-batch-size 2", TE, []),
        ("megatron_lm", "0.16", "t.py --no-gradient-accumulation-fusion", TE, ["precision"]),
        ("megatron_lm", "0.16", f"{BF16} --num-layers $X --micro-batch-size 0", TE, []),
        (
            "megatron_lm", "0.16", f"{BF16} --num-experts 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
            CudaGraph(), ["tp"],
        ),
        ("megatron_lm", "0.19", f"{UNFUSED} --num-experts 4 --moe-router-dtype fp32", CudaGraph(), ["router_bias"]),
        ("megatron_lm", "0.19", f"{UNFUSED} --num-experts 4 --moe-router-dtype fp64", CudaGraph(), []),
        (
            "megatron_lm", "0.19", f"{UNFUSED} --num-experts 4 --moe-router-dtype fp32 --disable-bias-linear",
            CudaGraph(), [],
        ),
        ("megatron_bridge", "0.19", f"{LATER}=local model.position_embedding_type=yarn", TE, ["yarn_positions"]),
        ("script", "0.16", f"{BF16} --cuda-graph-impl local --cuda-graph-scope attn", CudaGraph(), ["local_inputs"]),
        ("script", "0.16", f"{UNFUSED} --cuda-graph-impl local --cuda-graph-scope full_iteration", CudaGraph(), []),
        ("script", "0.16", f"{BF16} --enable-cuda-graph", CudaGraph("command"), ["local_inputs"]),
        ("script", "0.16", f"{LATER}=local", CudaGraph("command"), ["local_inputs"]),
        ("script", "0.16", "t.py --position-embedding-type yarn", CudaGraph("command"), []),
    ],
)  # fmt: skip
def test_the_words_of_a_command_show_its_known_faults(
    framework: str, release: MegatronCore, run: str, graph: CudaGraph, faults: list[str]
) -> None:
    command, ranks = Command(framework=framework, run=f"torchrun {run}"), Parallelism(dp=2)  # type: ignore[arg-type] # a word
    spec = RunSpec(
        "command",
        release,
        command=command,
        cuda_graph=graph,
        parallelism=ranks,
        training=Training(global_batch_size=0),
        placement=Placement("cuda", 1, 2),
    )
    assert [reason.rule.removeprefix("megatron.") for reason in known_faults(spec)] == faults
