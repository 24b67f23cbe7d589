"""Test that ``init`` reads what ``export`` prints, names what it does not understand, and knows Megatron-LM's defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.contract.spec import MegatronCore, RunSpec
from launch.support.rule import RELEASES
from orchestrator.cli.main import main
from orchestrator.errors import InputError
from orchestrator.export.export_cell import export
from orchestrator.export.flag_meanings import as_overrides
from orchestrator.export.read_flags import read_command
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load
from tests.unit.orchestrator.export.test_export_cell import SPECS

NOT_IN_FLAGS = {"gpt_oss_20b", "gpt_oss_120b"}
"""There are no flags for YaRN."""


def spec_of(text: str, folder: Path) -> RunSpec:
    """Return the spec of the recipe ``text``: that of its graphed cell, or of its only cell."""
    path = folder / "recipe.yaml"
    path.write_text(text)
    return [cell.spec for cell in expand(load(path), "cuda") if not cell.is_added_baseline][-1]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", sorted(SPECS.keys() - NOT_IN_FLAGS))
def test_what_export_prints_is_read_back(name: str, release: MegatronCore, tmp_path: Path) -> None:
    printed = export(replace(SPECS[name], megatron_core=release), "megatron-lm").text
    read = read_command(f"pretrain_gpt.py {printed}")
    again = export(replace(spec_of(read.text, tmp_path), megatron_core=release), "megatron-lm").text
    assert sorted(again.split(" \\\n")) == sorted(printed.split(" \\\n"))
    assert [note for note in read.notes if "not given" not in note] == []


@pytest.mark.parametrize("release", RELEASES)
def test_dropout_is_translated_both_ways(release: MegatronCore, tmp_path: Path) -> None:
    model = replace(SPECS["qwen3_30b_a3b"].model, attention_dropout=0.1, hidden_dropout=0.25)
    printed = export(replace(SPECS["qwen3_30b_a3b"], model=model, megatron_core=release), "megatron-lm").text
    assert "--attention-dropout 0.1" in printed and "--hidden-dropout 0.25" in printed
    again = spec_of(read_command(f"pretrain_gpt.py {printed}").text, tmp_path).model
    assert (again.attention_dropout, again.hidden_dropout) == (0.1, 0.25)


@pytest.mark.parametrize(("flag", "release"), [("override", "0.16"), ("layer", "0.19")])
def test_a_hybrid_pattern_gives_the_layers(flag: str, release: str, tmp_path: Path) -> None:
    words = "--hidden-size 256 --num-attention-heads 4 --seq-length 64"
    spec = spec_of(read_command(f"pretrain_mamba.py --hybrid-{flag}-pattern 'M*-M' {words}").text, tmp_path)
    assert (spec.model.hybrid_override_pattern, spec.model.num_layers, spec.megatron_core) == ("M*-M", 4, release)


COMMAND = """torchrun --nproc-per-node 8 --nnodes=2 pretrain_gpt.py \\
 --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --train-iters 60 --global-batch-size 32 --lr 1e-4 \\
 --tensor-model-parallel-size 2 --tokenizer-type NullTokenizer --vocab-size 32000 --bf16 --swiglu --num-experts 16 \\
 --moe-ffn-hidden-size 512 --cuda-graph-impl transformer_engine --cuda-graph-modules moe_router attn --log-interval 1 \\
 --hidden-dropout 0 --moe-expert-rank-capacity-factor 1.5"""


def test_a_command_line_is_read_with_megatrons_defaults(tmp_path: Path) -> None:
    read = read_command(COMMAND)
    spec = spec_of(read.text, tmp_path)
    assert (spec.engine, spec.megatron_core, spec.placement.nodes, spec.placement.ranks_per_node) == (
        "megatron",
        "0.19",
        2,
        8,
    )
    assert (spec.cuda_graph.impl, spec.cuda_graph.scope) == ("transformer_engine", ("attn", "moe_router"))
    assert (spec.model.kv_channels, spec.model.num_query_groups, spec.model.ffn_hidden_size) == (64, 16, 2688)
    assert spec.model.vocab_size == 32256, "32,001 tokens, padded to 128 * tp"
    assert spec.model.add_bias_linear and spec.model.tie_embeddings and spec.parallelism.dispatcher == "allgather"
    assert (spec.training.adam_beta2, spec.training.gradient_accumulation_fusion) == (0.999, True)
    assert (spec.model.attention_dropout, spec.model.hidden_dropout) == (0.1, 0.0), "the first is not given"
    assert spec.parallelism.etp == spec.parallelism.tp == 2, "Megatron-Core's default"


def test_what_the_recipe_has_a_value_of_and_the_command_has_not_is_said(tmp_path: Path) -> None:
    read = read_command(f"x.py {MODEL}")
    notes = "\n".join(read.notes)
    for field in ("model.vocab_size=256", "training.steps=120", "training.learning_rate=", "data.kind="):
        assert f"is not given; the recipe has {field}" in notes
    assert "model.vocab_size=256: set it to your job's" in notes
    assert "set resources.nodes and resources.gpus_per_node" in notes
    assert spec_of(read.text, tmp_path).training.steps >= 110, "a verdict of EQUIVALENT takes 100 after the capture"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("pretrain_gpt.py", "pretrain_gpt"),
        ("x/own.py --tokenizer-model Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("own.py --tokenizer-model /x/tokenizer.model", "own"),
        ("", "from_megatron_flags"),
    ],
)
def test_a_recipe_has_the_name_of_its_model_or_script(flags: str, name: str) -> None:
    assert read_command(f"{flags} {MODEL}").text.startswith(f"name: {name}\n")


@pytest.mark.parametrize("tp", [1, 2])
def test_sequence_parallel_without_tp_is_off_as_in_megatron(tp: int, tmp_path: Path) -> None:
    read = read_command(f"x.py {MODEL} --sequence-parallel --tensor-model-parallel-size {tp}")
    assert spec_of(read.text, tmp_path).parallelism.sequence_parallel == (tp > 1)
    assert "sequence-parallel" not in "".join(read.notes)


@pytest.mark.parametrize(
    ("warmup", "lower"), [(500, ", and training.learning_rate_warmup_steps=120 or fewer"), (9, "")]
)
def test_a_whole_training_gets_steps_and_a_warm_up_that_a_sweep_accepts(warmup: int, lower: str) -> None:
    notes = read_command(f"x.py {MODEL} --train-iters 5000 --lr-warmup-iters {warmup}").notes
    assert any(note.endswith(f"set training.steps=120{lower}") for note in notes)


@pytest.mark.parametrize(
    ("words", "path"),
    [("/a", "/a"), ("1.0 /a", "/a"), ("0.7 /a 0.3 /b", "/a"), ("0.3 /a 0.7 /b", "/b"), ("/a /b", "/a")],
)
def test_of_a_blend_the_heaviest_data_set_is_kept_and_the_rest_is_said(words: str, path: str, tmp_path: Path) -> None:
    read = read_command(f"pretrain_gpt.py {MODEL} --data-path {words}")
    assert spec_of(read.text, tmp_path).data.path == path
    said = f"--data-path {words}: the recipe's cells train with --data-path {path}"
    assert (said in read.notes) == (words != path)


def test_what_a_recipe_does_not_express_is_said() -> None:
    notes = "\n".join(read_command(COMMAND).notes)
    assert "--normalization is not given: Megatron-LM's default is LayerNorm, the recipe has RMSNorm" in notes
    assert "dropout" not in notes and ("--moe-router-dtype" in notes) == ("--num-experts" in COMMAND)
    assert "without --moe-paged-stash: Megatron-Core 0.19.2 silently drops tokens above it" in notes
    assert "without a counterpart in a recipe: --log-interval 1" in notes


def test_an_optimizer_is_lean_if_both_its_moments_are(tmp_path: Path) -> None:
    read = read_command(
        f"x.py {MODEL} --bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --use-precision-aware-optimizer"
    )
    assert spec_of(read.text, tmp_path).training.optimizer_precision == "lean"
    assert "precision of the whole" not in "".join(read.notes)


def test_a_graph_of_the_optimizer_is_read_with_its_kernels_and_release(tmp_path: Path) -> None:
    command = f"x.py {MODEL} --bf16 --cuda-graph-impl full_iteration --optimizer-cuda-graph"
    read = read_command(command)
    spec = spec_of(read.text, tmp_path)
    assert (spec.cuda_graph.impl, spec.cuda_graph.optimizer, spec.megatron_core) == ("full_iteration", True, "0.19")
    assert spec.training.capturable_optimizer and "optimizer-cuda-graph" not in "".join(read.notes)
    assert as_overrides(["--optimizer-cuda-graph"]) == [
        "cuda_graph.optimizer=true",
        "training.capturable_optimizer=true",
    ]


def test_the_spellings_of_before_are_read(tmp_path: Path) -> None:
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-layers-per-virtual-pipeline-stage 1"
    spec = spec_of(read_command(f"pretrain_gpt.py {flags} --enable-cuda-graph").text, tmp_path)
    assert (spec.cuda_graph.impl, spec.cuda_graph.scope, spec.parallelism.vpp) == ("local", (), 2)
    whole = spec_of(
        read_command(f"x.py {flags} --cuda-graph-impl local --cuda-graph-scope full_iteration").text, tmp_path
    )
    assert (whole.cuda_graph.impl, whole.cuda_graph.scope, whole.megatron_core) == ("full_iteration", (), "0.16")


def test_pasted_flags_are_answered_with_the_line_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_overrides(["--enable-cuda-graph", "--seq-length", "64"]) == [
        "cuda_graph.impl=local",
        "training.sequence_length=64",
    ]
    with pytest.raises(SystemExit):
        main(
            [
                "plan",
                "recipes/gpt_oss_20b.yaml",
                "--cuda-graph-impl",
                "transformer_engine",
                "--cuda-graph-scope",
                "attn",
                "mlp",
            ]
        )
    said = capsys.readouterr().err
    assert "for flags of Megatron write cuda_graph.impl=transformer_engine 'cuda_graph.scope=[attn,mlp]'" in said


@pytest.mark.parametrize("command", ["", "pretrain_gpt.py", "pretrain_gpt.py --num-layers two", "x.py --lr '1"])
def test_a_command_that_is_none_is_refused(command: str) -> None:
    with pytest.raises(InputError):
        read_command(command)


MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4"
REFUSED = {
    f"{MODEL} --data-path": "--data-path: it has no value",
    f"{MODEL} --softmax-type": "--softmax-type: it has no value",
    f"{MODEL} --softmax-type off-by-one": "--softmax-type off-by-one: no recipe takes this value",
    f"{MODEL} --lr-decay-style": "--lr-decay-style: it has no value",
    f"{MODEL} --window-size foo": "--window-size foo: no recipe takes this value",
    f"{MODEL} --vocab-size": "--vocab-size: it is not a positive",
    f"{MODEL} --vocab-size abc": "--vocab-size abc: it is not a positive",
    f"{MODEL} --vocab-size 9 --make-vocab-size-divisible-by 0": "--make-vocab-size-divisible-by 0: it is not a positive",
    f"{MODEL} --vocab-size 9 --tensor-model-parallel-size 0": "--tensor-model-parallel-size 0: it is not a positive",
    f"{MODEL} --num-layers-per-virtual-pipeline-stage 0": "--num-layers-per-virtual-pipeline-stage 0: it is not a pos",
    f"{MODEL} --num-layers-per-virtual-pipeline-stage x": "--num-layers-per-virtual-pipeline-stage x: it is not a pos",
    f"{MODEL} --num-layers-per-virtual-pipeline-stage 3": "--num-layers-per-virtual-pipeline-stage 3: a pipeline stage has 8",
    "--hidden-size 64 --num-attention-heads 4 --num-layers-per-virtual-pipeline-stage 2": "--num-layers: it is missing",
    "--hidden-size 64 --num-attention-heads 0": "--num-attention-heads 0: it is not a positive",
    "--num-layers 8": "--num-attention-heads: it is missing",
    "--num-layers 8 --num-attention-heads 4": "--hidden-size: it is missing",
    "--num-layers eight": "--num-layers eight: model.num_layers=eight: not a whole number",
    "--num-layers $LAYERS": "--num-layers $LAYERS: the shell has not expanded $LAYERS",
    f"{MODEL} --bf16 ${{MOE_ARGS[@]}}": "the shell has not expanded ${MOE_ARGS[@]}",
    "$GPT_ARGS --bf16": "the shell has not expanded $GPT_ARGS",
    f"{MODEL} --bf16 false": "--bf16 false: Megatron-LM's flag takes no value",
    f"{MODEL} --bf16 --fp16": "--fp16: --bf16 is given too",
    f"{MODEL} --moe-token-dispatcher-type flex": "HybridEP)\n    run your own program with it by engine: command",
    f"{MODEL} --moe-token-dispatcher-type x": "not one of allgather, alltoall\n    write one of them",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_wrong_flag_is_named_with_its_value(flags: str) -> None:
    with pytest.raises(InputError) as caught:
        read_command(f"pretrain_gpt.py {flags}")
    assert REFUSED[flags] in str(caught.value)


EXPERTS = f"{MODEL} --num-experts 4 --moe-router-dtype fp32"
ROUTER = "--moe-router-dtype is not given: Megatron-LM's default is that of the weights, the recipe has fp32"
NOTED = {
    f"x.py {MODEL} --num-experts 4": ROUTER,
    f"x.py {MODEL} --num-experts 4 --moe-router-dtype fp64": "--moe-router-dtype fp64: the recipe's cells train with",
    f"x.py {MODEL} --mtp-num-layers 1": "--mtp-num-layers 1: no engine here has multi-token prediction: run your own",
    f"x.py {MODEL} --exp-avg-sq-dtype bf16": "--exp-avg-sq-dtype bf16: a recipe names the precision of the whole",
    f"x.py {MODEL} --exp-avg-dtype bf16": "--exp-avg-dtype bf16: a recipe names the precision of the whole",
    f"x.py {MODEL} -p 3": "without a counterpart in a recipe: -p 3",
    f"cd x && x.py {MODEL} 2>&1 | tee --append log; echo --lr 2": "",
    f"x.py {MODEL} > log --eval-iters 3": "",
    f"x.py --num-layers 4 {MODEL}": "--num-layers is given 2 times, and the last counts: --num-layers 8",
    f"x.py {EXPERTS} --moe-layer-freq '([0]*3+[1]*5)'": "--moe-layer-freq ([0]*3+[1]*5): the recipe's cells train",
    f"x.py {EXPERTS} --moe-layer-freq '[[1]]'": "--moe-layer-freq [[1]]: the recipe's cells train",
    f"srun torchrun --nnodes=$N x.py {MODEL}": "--nnodes $N is not a number: set resources.nodes in the recipe",
    f"torchrun --nproc-per-node gpu x.py {MODEL}": "--nproc-per-node gpu is not a number: set resources.gpus_per_node",
}


@pytest.mark.parametrize("command", NOTED)
def test_what_a_command_leaves_open_is_noted(command: str) -> None:
    usual = read_command(f"x.py {MODEL}")
    read = read_command(command)
    notes = [note for note in read.notes if note not in usual.notes]
    assert [note[: len(NOTED[command])] for note in notes] == ([NOTED[command]] if NOTED[command] else [])
    assert "experts" in command or read.text == usual.text


@pytest.mark.parametrize(("pattern", "every"), [("([1]+[0])*4", 2), ("[1]*8", 1), ("4", 4), ("[1, 0, 0]*2+[1,0]", 3)])
def test_megatrons_pattern_of_layers_is_a_frequency(pattern: str, every: int, tmp_path: Path) -> None:
    read = read_command(f"x.py {MODEL} --num-experts 4 --moe-layer-freq '{pattern}'")
    assert spec_of(read.text, tmp_path).model.moe_layer_freq == every
    assert "moe-layer-freq" not in "".join(read.notes)


@pytest.mark.parametrize("steps, is_said", [(120, False), (500_000, True)])
def test_the_steps_of_a_whole_training_are_noted(steps: int, is_said: bool) -> None:
    notes = read_command(
        f"pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 8 --train-iters {steps}"
    ).notes
    assert any("set training.steps=120" in note for note in notes) == is_said


def test_a_file_is_no_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text("pretrain_gpt.py --num-layers 8")
    assert main(["init", "--from-megatron-flags", str(script)]) == 1
    assert f'--from-megatron-flags "$(cat {script})"' in capsys.readouterr().err
