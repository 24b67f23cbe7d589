"""Test the words that each framework adds to a user's command."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from launch.contract.spec import Command, CudaGraph, Parallelism, Placement, RunSpec, Training
from launch.frameworks.command_line import command_words, module_of, other_steps, script_of, unknown_placeholders
from launch.support import unsupported

SCOPES = CudaGraph("transformer_engine", ("attn", "moe_router"))
LOCAL = CudaGraph("command", name="local", arguments=("--cuda-graph-impl", "local"))
MEGATRON = "torchrun --nproc-per-node {ranks_per_node} pretrain_gpt.py --log-interval 5"
OWN = (
    "--train-iters 120 --tensorboard-dir {output}/tensorboard --tensorboard-log-interval 1 --te-rng-tracker "
    "--no-check-for-nan-in-loss-and-grad"
)

BRIDGE = (
    "train.train_iters=120 logger.log_interval=1 logger.tensorboard_log_interval=1 logger.tensorboard_dir={output}/tensorboard "
    "checkpoint.load=null rng.te_rng_tracker=true rerun_state_machine.check_for_nan_in_loss=false ddp.check_for_nan_in_grad=false"
)
TITAN = "--training.steps 120 --dump_folder {output} --metrics.log_freq 1 --metrics.enable_tensorboard"


@pytest.mark.parametrize(
    ("command", "graph", "words"),
    [
        (Command(run="python t.py {steps} '{\"a\": 1}' {x}"), CudaGraph(), 'python t.py 120 {"a": 1} {x}'),
        (Command(run="t", flags=("--lr", "1"), eager=("--no-graphs",)), CudaGraph(), "t --lr 1 --no-graphs"),
        (Command(run="t", eager=("-n",)), CudaGraph("command", name="g", arguments=("-g", "{seed}")), "t -g 1234"),
        (Command("megatron_lm", MEGATRON), CudaGraph(), f"torchrun --nproc-per-node 1 pretrain_gpt.py --log-interval 5 {OWN}"),
        (
            Command("megatron_lm", MEGATRON), SCOPES,
            f"torchrun --nproc-per-node 1 pretrain_gpt.py --log-interval 5 {OWN} --cuda-graph-impl transformer_engine "
            "--cuda-graph-modules attn moe_router --cuda-graph-warmup-steps 3",
        ),
        (Command("megatron_bridge", "t ++checkpoint.save=/x"), CudaGraph(), f"t ++checkpoint.save=/x {BRIDGE} model.cuda_graph_impl=none"),
        (
            Command("megatron_bridge", "t checkpoint.save=/x"), SCOPES,
            f"t checkpoint.save=/x {BRIDGE} model.cuda_graph_impl=transformer_engine "
            "model.cuda_graph_modules=[attn,moe_router] model.cuda_graph_warmup_steps=3 model.cuda_graph_scope=null",
        ),
        (Command("torchtitan", "t --debug.seed 5"), CudaGraph(), f"t --debug.seed 5 {TITAN} --training.disable_cuda_graphs"),
        (
            Command("torchtitan", "t"), CudaGraph("full_iteration"),
            f"t {TITAN} --debug.seed 1234 --training.no_disable_cuda_graphs",
        ),
        (
            Command("huggingface", "python t.py --max_steps=9"), CudaGraph("torch_compile"),
            "python t.py --max_steps=9 --output_dir {output} --dataloader_drop_last True --torch_compile True "
            "--torch_compile_mode reduce-overhead",
        ),
    ],
)  # fmt: skip
def test_the_command_of_a_run(command: Command, graph: CudaGraph, words: str) -> None:
    spec = RunSpec("command", training=Training(steps=120), command=command, cuda_graph=graph, megatron_core="0.19")
    assert " ".join(command_words(spec, {})) == words


def test_places_are_filled_when_a_run_starts_and_a_gpu_takes_steps_to_profile() -> None:
    spec = RunSpec("command", command=Command(run="{python} t.py --out {output} {steps}"), placement=Placement("cuda"))
    assert command_words(spec, {"python": "py", "output": "/a"}) == ("py", "t.py", "--out", "/a", "103")


@pytest.mark.parametrize("graph", [CudaGraph(), CudaGraph("torch_compile")], ids=["eager", "compiled"])
def test_both_sides_of_a_trainer_that_turns_tf32_on_when_it_compiles_use_it(graph: CudaGraph) -> None:
    spec = RunSpec("command", command=Command("huggingface", "t"), cuda_graph=graph, placement=Placement("cuda"))
    assert " --tf32 True" in " ".join(command_words(spec, {}))
    own = replace(spec, command=Command("huggingface", "t --tf32 False"))
    assert " ".join(command_words(own, {})).count("--tf32") == 1


@pytest.mark.parametrize(
    ("command", "other"),
    [
        (Command("megatron_lm", "t --train-iters 500000"), ("--train-iters", "500000")),
        (Command("megatron_bridge", "t train.train_iters=500"), ("train.train_iters", "500")),
        (Command("huggingface", "t", flags=("--max_steps=9",)), ("--max_steps", "9")),
        (Command("megatron_lm", "t --train-iters 120"), None),
        (Command("megatron_lm", "t --train-iters {steps} --log-interval 100"), None),
        (Command("script", "t --train-iters 500000"), None),
    ],
)
def test_a_pasted_number_of_steps_that_a_run_does_not_have_is_found(
    command: Command, other: tuple[str, str] | None
) -> None:
    assert other_steps(RunSpec("command", training=Training(steps=120), command=command)) == other


def test_doubled_braces_are_the_program_s_own() -> None:
    run = """t --run {{seed}}-{seed} --sizes '{"a": {"b": 1}}' {{{nobody}}}"""
    spec = RunSpec("command", command=Command(run=run))
    assert command_words(spec, {})[2:] == ("{seed}-1234", "--sizes", '{"a": {"b": 1}}', "{{nobody}}")
    assert unknown_placeholders(run) == () and unknown_placeholders("{a} {{b}}") == ("a",)


@pytest.mark.parametrize(
    ("command", "graph", "rule"),
    [
        (Command(run="t"), SCOPES, "command.framework"),
        (Command("megatron_lm", "t"), SCOPES, None),
        # Its cell would capture mlp, and be called one of attn and moe_router.
        (Command("megatron_lm", "t --cuda-graph-scope mlp"), SCOPES, "command.graph_flags"),
        (Command("megatron_lm", "t", flags=("--cuda-graph-impl", "local")), SCOPES, "command.graph_flags"),
        (Command("megatron_lm", "t --enable-cuda-graph"), SCOPES, "command.graph_flags"),
        (Command("megatron_lm", "t --enable-cuda-graph"), CudaGraph(), None),
        (Command("megatron_lm", "t --cuda-graph-warmup-steps 3"), SCOPES, None),
        (Command("megatron_bridge", "t model.cuda_graph_impl=local"), SCOPES, "command.graph_flags"),
        (
            Command(run="t --cuda-graph-impl local"),
            CudaGraph("command", name="g", arguments=("-g",)),
            "command.graph_flags",
        ),
        (Command(run="t", eager=("--cuda-graph-impl", "none")), LOCAL, None),
        (Command(run="torchrun --nproc-per-node 8 t.py"), CudaGraph(), "command.ranks"),
        (Command(run="torchrun --nproc_per_node=1 --nnodes=2 t.py"), CudaGraph(), "command.ranks"),
        (Command(run="torchrun --nproc-per-node 1 --nnodes 1:4 t.py --batch 8"), CudaGraph(), None),
        (Command(run="torchrun --nproc-per-node gpu --nnodes {nodes} t.py"), CudaGraph(), None),
        (Command("huggingface", "t --torch_compile True"), CudaGraph("torch_compile"), None),
        (Command("huggingface", "t --torch_compile_mode default"), CudaGraph("torch_compile"), "command.graph_flags"),
    ],
)
def test_what_cannot_run_is_refused(command: Command, graph: CudaGraph, rule: str | None) -> None:
    found = unsupported(RunSpec("command", command=command, cuda_graph=graph, placement=Placement("cuda")))
    assert [reason.rule for reason in found] == ([rule] if rule else [])


def test_a_program_of_the_users_is_profiled_by_its_own_command() -> None:
    (reason,) = unsupported(RunSpec("command", command=Command(run="t"), profile="nsys"))
    assert reason.rule == "command.profile" and "command.run" in reason.remedy


def test_a_setting_that_no_word_of_the_command_has_is_refused() -> None:
    training = Training(steps=50, deterministic=True, optimizer_precision="lean", precision="bf16", learning_rate=1e-3)
    spec = RunSpec("command", command=Command(run="t --lr {learning_rate}"), training=training)
    (reason,) = unsupported(replace(spec, parallelism=Parallelism(dispatcher="allgather")))
    refused = "training.precision=bf16, training.optimizer_precision=lean, parallelism.dispatcher=allgather"
    assert reason.rule == "command.unused" and reason.message.startswith(f"{refused}, but ")
    # torchtitan's own flags contain the seed.
    titan = RunSpec("command", command=Command("torchtitan", "t"), training=Training(seed=5))
    assert not unsupported(titan) and unsupported(replace(titan, command=Command(run="t")))


SCRIPTS = {
    "{python} a.py --also b.py": "a.py",
    "torchrun --standalone --nproc-per-node 2 a.py": "a.py",
    "python3.11 -m torch.distributed.run a.py": "a.py",
    "/usr/bin/env X=1 bash run.sh": "run.sh",
    "GRAPHS=1 python a.py": "a.py",
    "./own --out b.py": "./own",
    "python -m package --config c.py": "",
    "bash -lc 'cd there && python a.py'": "",
    "env X=1 own --out b.py": "",
    "torchrun": "",
}


@pytest.mark.parametrize("line", SCRIPTS)
def test_a_script_is_what_a_launcher_is_given(line: str) -> None:
    assert script_of(shlex.split(line)) == SCRIPTS[line]


def test_a_release_of_megatron_has_its_own_spelling() -> None:
    spec = RunSpec("command", command=Command("megatron_lm", "t"), cuda_graph=SCOPES, megatron_core="0.16")
    assert "--cuda-graph-scope attn moe_router" in " ".join(command_words(spec, {}))


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("{python} -m mine.train --steps 3", "mine.train"),
        ("/opt/bin/python3.12 -W ignore -u -m mine", "mine"),
        ("python train.py -m fast", ""),
        ("python tools/train -m fast", ""),
        ("python -c pass -m fast", ""),
        ("python -m", ""),
        ("bash -m fast", ""),
        ("", ""),
    ],
)
def test_the_module_that_python_starts(words: str, module: str) -> None:
    assert module_of(words.split()) == module
