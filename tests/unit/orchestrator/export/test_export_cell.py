"""Test cells as flags of Megatron-LM and of Megatron Bridge: the names are those of their releases, and nothing is
omitted silently."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from analysis.verdict.verdict import STEP_CHECKED
from launch.contract.spec import CudaGraph, Data, Fault, MegatronCore, Model, Parallelism, RunSpec, Training
from launch.megatron_config.transformer_config import data_parallel_settings, optimizer_settings, transformer_settings
from orchestrator.cli.main import main
from orchestrator.export.export_cell import NOT_EXPRESSED, Format, export
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load
from tests.presets import PRESETS, preset
from tests.records import AttemptRecord, write_sweep

RECIPES = Path(__file__).parents[4] / "recipes"
GOLDEN = Path(__file__).parents[3] / "golden"
FLAGS: dict[str, str] = json.loads((GOLDEN / "megatron_lm_flags.json").read_text())["core_v0.16.1"]
"""The number of words that follow each flag: none, one, or some."""
MAINS: dict[str, str] = json.loads((GOLDEN / "megatron_lm_flags.json").read_text())["main"]
NAMES: dict[str, list[str]] = json.loads((GOLDEN / "megatron_bridge_names.json").read_text())["megatron-bridge 0.3.1"]

MOE = Model(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16)
ROUTED = replace(
    MOE,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_aux_loss_coeff=1e-3,
    moe_z_loss_coeff=1e-3,
    moe_shared_expert_ffn_hidden_size=8,
    moe_expert_capacity_factor=1.0,
    moe_pad_expert_input_to_capacity=True,
)
LAYOUT = Parallelism(
    tp=2, pp=2, vpp=2, ep=2, sequence_parallel=True, schedule="interleaved", distributed_optimizer=True
)
SPECS = {
    **{name: RunSpec(model=preset(name)) for name in PRESETS},
    "routed": RunSpec(model=ROUTED),
    "tied": RunSpec(model=Model(tie_embeddings=True, rope_scaling="llama3", rope_original_max_position=8192)),
    "overlapped": RunSpec(
        parallelism=Parallelism(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    ),
    "experts' exchange overlapped": RunSpec(
        model=MOE,
        parallelism=Parallelism(dp=2, ep=2, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True),
        training=Training(precision="bf16"),
    ),
    "in 8 bits": RunSpec(training=Training(precision="bf16", fp8="current")),
    "laid out": RunSpec(model=MOE, parallelism=LAYOUT, data=Data(kind="synthetic")),
    "recomputed": RunSpec(training=Training(recompute="full", precision="bf16", gradient_precision="bf16")),
    "lean": RunSpec(
        parallelism=Parallelism(dp=2, distributed_optimizer=True),
        training=Training(precision="bf16", gradient_precision="bf16", optimizer_precision="lean"),
    ),
    "recomputed in part": RunSpec(training=Training(recompute="selective", deterministic=True)),
    "indexed": RunSpec(data=Data(kind="indexed", path="/data/my corpus")),
    "whole step": RunSpec(cuda_graph=CudaGraph("full_iteration")),
    "whole step over ranks": RunSpec(
        model=MOE, parallelism=Parallelism(dp=2, ep=2), cuda_graph=CudaGraph("full_iteration")
    ),
    "whole layers": RunSpec(cuda_graph=CudaGraph("local")),
    "parts": RunSpec(cuda_graph=CudaGraph("transformer_engine", ("attn", "mlp"))),
}


def flags_of(spec: RunSpec, release: MegatronCore = "0.16") -> dict[str, list[str]]:
    """Return the words that a shell would pass on."""
    flags: dict[str, list[str]] = {}
    for word in shlex.split(export(replace(spec, megatron_core=release), "megatron-lm").text.replace("\\\n", "")):
        if word.startswith("--"):
            assert word not in flags
            flags[word] = []
        else:
            flags[[*flags][-1]].append(word)
    return flags


def overrides_of(spec: RunSpec, release: MegatronCore = "0.16") -> tuple[dict[str, str], dict[str, str]]:
    """Return the harness's flags, and the overrides, including the one that only the harness has."""
    text = export(replace(spec, megatron_core=release), "bridge").text.replace("\\\n", "")
    (*flags, override), overrides = (shlex.split(part, comments=True) for part in text.split("# overrides"))
    return dict(zip(flags[::2], flags[1::2], strict=True)), dict(
        word.split("=", 1) for word in (*overrides, override) if "=" in word
    )


@pytest.mark.parametrize("name", SPECS)
def test_flags_are_those_of_the_release(name: str) -> None:
    for flag, words in flags_of(SPECS[name]).items():
        assert FLAGS[flag] in (["none"], ["one", "some"], ["some"])[min(len(words), 2)]


@pytest.mark.parametrize("name", SPECS)
def test_names_are_those_of_bridge(name: str) -> None:
    harness, overrides = overrides_of(SPECS[name])
    assert set(harness) <= set(NAMES["performance harness"])
    of_core = {"model": transformer_settings, "optimizer": optimizer_settings, "ddp": data_parallel_settings}
    assert overrides.pop("comm_overlap") == "null", "it would overrule what is said of exchanges"
    for override in overrides:
        section, field = override.split(".")
        # Another test compares these names with Megatron-Core.
        known = of_core[section](SPECS[name]) if section in of_core else {}
        assert field in NAMES.get(section, []) or field in known


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "gpt_oss_20b"])
def test_the_activation_is_fused_where_a_capture_can_hold_it(name: str) -> None:
    """Megatron-Core's fused quick-GeGLU copies a number from the host in each call."""
    fused = name != "gpt_oss_20b"
    assert transformer_settings(SPECS[name])["bias_activation_fusion"] == fused
    assert ("--no-bias-gelu-fusion" in flags_of(SPECS[name])) != fused
    assert overrides_of(SPECS[name])[1]["model.bias_activation_fusion"] == str(fused).lower()


def test_a_zero_is_said() -> None:
    flags = flags_of(RunSpec(training=Training(weight_decay=0.0)))
    assert flags["--hidden-dropout"] == flags["--attention-dropout"] == flags["--weight-decay"] == ["0.0"]
    assert flags["--lr-warmup-iters"] == ["0"]
    _, overrides = overrides_of(RunSpec())
    assert overrides["model.hidden_dropout"] == "0.0"
    # A recipe of Bridge may turn recomputation on.
    assert overrides["model.recompute_granularity"] == "null"


@pytest.mark.parametrize(
    ("graph", "released", "later"),
    [
        (CudaGraph("full_iteration"), ("local", ["full_iteration"]), ("full_iteration", [])),
        (CudaGraph("local"), ("local", []), ("local", [])),
        (
            CudaGraph("transformer_engine", ("attn", "mlp")),
            ("transformer_engine", ["attn", "mlp"]),
            ("transformer_engine", ["attn", "mlp"]),
        ),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_graph_settings_are_spelt_as_the_release_does(graph: CudaGraph, released: Any, later: Any) -> None:
    spec = RunSpec(cuda_graph=graph)
    before, after = flags_of(spec), flags_of(spec, "0.19")
    assert (before["--cuda-graph-impl"][0], before.get("--cuda-graph-scope", [])) == released
    assert (after["--cuda-graph-impl"][0], after.get("--cuda-graph-modules", [])) == later
    assert set(after) <= set(FLAGS) | set(MAINS)
    harness, overrides = overrides_of(spec, "0.19")
    said = (harness.get("--cuda_graph_impl"), harness.get("--cuda_graph_scope"))
    # The harness cannot name whole layers, and stops at an implementation without a scope.
    assert said == ((released[0], ",".join(released[1])) if released[1] else (None, None))
    assert overrides["model.cuda_graph_modules"] == f"[{','.join(later[1])}]"


def test_megatron_lm_starts_with_a_whole_step_over_expert_parallel_ranks() -> None:
    """core_v0.16.1 asserts an inference flag there (megatron/training/arguments.py:1158). Its main branch no longer
    does."""
    asked, spec = "--moe-pad-experts-for-cuda-graph-inference", SPECS["whole step over ranks"]
    assert flags_of(spec)[asked] == []
    parts = CudaGraph("transformer_engine", ("attn",))
    for other in (replace(spec, parallelism=Parallelism()), replace(spec, cuda_graph=parts)):
        assert asked not in flags_of(other)
    assert asked not in flags_of(spec, "0.19")


def test_the_main_branch_is_not_asked_for_the_loss_that_it_refuses() -> None:
    """Since core_v0.18.2, megatron/training/arguments.py refuses Transformer Engine's loss. No release may get a fused
    loss that returns float32 gradients in bfloat16, or that it refuses as not deterministic."""
    fused = RunSpec(training=Training(precision="bf16"))
    for release in ("0.16", "0.19"):
        assert flags_of(fused, release)["--cross-entropy-fusion-impl"] == ["native"]
        assert overrides_of(fused, release)[1]["model.cross_entropy_fusion_impl"] == "native"
        assert "--cross-entropy-loss-fusion" in flags_of(fused, release)
        for training in (Training(), Training(precision="bf16", deterministic=True)):
            assert "--cross-entropy-loss-fusion" not in flags_of(RunSpec(training=training), release)


def test_fusions_that_a_recipe_asks_for_are_asked_for() -> None:
    plain = SPECS["qwen3_30b_a3b"]
    fused = replace(plain, training=replace(plain.training, gradient_accumulation_fusion=True, moe_router_fusion=True))
    assert "--no-gradient-accumulation-fusion" in flags_of(plain) and "--moe-router-fusion" not in flags_of(plain)
    assert "--no-gradient-accumulation-fusion" not in flags_of(fused) and "--moe-router-fusion" in flags_of(fused)
    for spec, value in ((plain, "false"), (fused, "true")):
        for name in ("gradient_accumulation_fusion", "moe_router_fusion"):
            assert overrides_of(spec)[1][f"model.{name}"] == value
        targets: tuple[Format, ...] = ("megatron-lm", "bridge")
        for target in targets:
            assert any("Apex" in note for note in export(spec, target).notes) == (spec is fused)


def test_what_a_run_sets_beside_expandable_segments_is_asked_of_the_job() -> None:
    """Rule capture.expandable_segments accepts a graphed cell that leaves the variable to the run."""
    expanding = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    graphed = replace(SPECS["whole step"], environment=expanding)
    asked = "NCCL_GRAPH_REGISTER: set it to 0 in the job"
    for other, expected in (
        (graphed, True),
        (replace(graphed, cuda_graph=CudaGraph()), False),
        (replace(graphed, environment={}), False),
        (replace(graphed, environment={**expanding, "NCCL_GRAPH_REGISTER": "0"}), False),
    ):
        assert any(note.startswith(asked) for note in export(other, "megatron-lm").notes) == expected


def test_values_are_words_of_a_shell_and_of_hydra() -> None:
    flags = flags_of(replace(SPECS["gpt_oss_20b"], data=Data(kind="indexed", path="/data/my corpus")))
    assert flags["--data-path"] == ["/data/my corpus"]
    assert (flags["--tokenizer-type"], flags["--vocab-size"]) == (["NullTokenizer"], ["201087"])
    assert flags["--padded-vocab-size"] == ["201088"]
    assert not {"--mock-data", "--data-path", "--tokenizer-type"} & set(flags_of(RunSpec(data=Data(kind="text"))))
    assert flags["--window-size"] == ["127,0"]
    _, overrides = overrides_of(SPECS["gpt_oss_20b"])
    assert overrides["model.window_size"] == "[127,0]"
    assert overrides["model.add_bias_linear"] == "true"


NOTED: dict[str, dict[str, Any]] = {
    "model.weights": {"model": Model(weights="/a/checkpoint")},
    "parallelism.cp": {"model": Model(attention_sinks=True), "parallelism": Parallelism(cp=2)},
    "training.learning_rate_warmup_steps": {"training": Training(learning_rate_warmup_steps=2)},
    "training.compile": {"training": Training(compile="elementwise")},
    "training.attention_backend": {"training": Training(attention_backend="flex")},
    "training.gradient_accumulation_fusion": {
        "training": Training(precision="bf16", gradient_accumulation_fusion=True)
    },
    "training.deterministic": {"training": Training(deterministic=True)},
    "training.cpu_offloading": {"training": Training(cpu_offloading=True)},
    "training.variable_sequence_lengths": {"training": Training(variable_sequence_lengths=True)},
    "data.kind": {"data": Data(kind="text")},
    "data.packed_sequences": {"data": Data(kind="synthetic", packed_sequences=True, eod_token=0)},
    "cuda_graph.impl": {"cuda_graph": CudaGraph("torch", ("attn",))},
    "cuda_graph.optimizer": {"cuda_graph": CudaGraph("full_iteration", optimizer=True)},
    "training.capturable_optimizer": {"training": Training(precision="bf16", capturable_optimizer=True)},
    "cuda_graph.mend": {"cuda_graph": CudaGraph("local", ("attn",), mend=("local_inputs",))},
    "fault.kind": {"fault": Fault("nan")},
    "model.rope_scaling": {"model": Model(rope_scaling="llama3", rope_original_max_position=4096)},
    "model.moe_router_normalize_topk": {
        "model": replace(MOE, moe_router_score_function="sigmoid", moe_router_normalize_topk=False)
    },
    "model.moe_shared_expert_ffn_hidden_size": {
        "model": replace(MOE, moe_shared_expert_ffn_hidden_size=8, add_bias_linear=True),
        "training": Training(),  # In fp32, routers read their bias as it is.
    },
    "model.add_bias_linear": {"model": replace(MOE, add_bias_linear=True)},
    "parallelism.tp": {"model": MOE, "parallelism": Parallelism(tp=2, sequence_parallel=True)},
    "parallelism.overlap_moe_expert_parallel_comm": {
        "model": replace(MOE, moe_layer_freq=2),
        "parallelism": Parallelism(dp=2, ep=2, overlap_moe_expert_parallel_comm=True),
    },
    "parallelism.pp": {"parallelism": Parallelism(pp=2), "cuda_graph": CudaGraph("full_iteration")},
    "parallelism.schedule": {"parallelism": Parallelism(pp=2, schedule="gpipe")},
    "training.recompute": {
        "training": Training(precision="bf16", recompute="selective"),
        "cuda_graph": CudaGraph("transformer_engine", ("attn",)),
    },
    "environment.NCCL_DEBUG": {"environment": {"NCCL_DEBUG": "WARN"}},
}


@pytest.mark.parametrize("to", ["megatron-lm", "bridge"])
@pytest.mark.parametrize("field", NOTED)
def test_what_is_not_said_is_told(field: str, to: Format) -> None:
    spec = replace(RunSpec(data=Data(kind="synthetic"), training=Training(precision="bf16")), **NOTED[field])
    plain = set(export(replace(RunSpec(data=Data(kind="synthetic")), training=spec.training), to).notes)
    notes = export(spec, to).notes
    assert [note for note in notes if note.startswith(f"{field}=")]
    others = [note for note in set(notes) - plain if "CUDA_DEVICE_MAX_CONNECTIONS" not in note]
    assert field.startswith("training") or len(others) == 1


def test_every_row_has_a_case() -> None:
    assert {field for field, _, _ in NOT_EXPRESSED} <= set(NOTED)


def test_what_one_target_alone_lacks() -> None:
    (note,) = export(replace(SPECS["gpt_oss_20b"], data=Data(kind="synthetic")), "megatron-lm").notes
    assert note.startswith("model.rope_scaling=yarn")
    fractional = RunSpec(model=Model(rotary_base=0.5), data=Data(kind="synthetic"))
    assert export(fractional, "megatron-lm").notes[0].startswith("model.rotary_base=0.5")
    in_8_bits = replace(SPECS["in 8 bits"], data=Data(kind="synthetic"))
    assert flags_of(in_8_bits)["--fp8-recipe"] == ["tensorwise"]
    (note,) = export(in_8_bits, "bridge").notes
    assert note.startswith("training.fp8=current") and "fp8_recipe=tensorwise" in note
    whole = RunSpec(cuda_graph=CudaGraph("local"), data=Data(kind="indexed", path="x"))
    starts = {
        release: {note.partition(":")[0] for note in export(replace(whole, megatron_core=release), "bridge").notes}
        for release in get_args(MegatronCore)
    }
    assert starts["0.19"] >= {"training.precision=fp32", "data.path"}
    assert [start for start in starts["0.16"] - starts["0.19"] if start.startswith("cuda_graph.impl=local, ")], (
        "fixed since"
    )


@pytest.mark.parametrize("to", ["megatron-lm", "bridge"])
@pytest.mark.parametrize(
    "graph", [CudaGraph(), CudaGraph("transformer_engine", ("attn",)), CudaGraph("full_iteration")]
)
def test_gradients_that_a_job_would_lose_are_told_of(graph: CudaGraph, to: Format) -> None:
    """This holds for any release of Megatron, because the fault is in Transformer Engine."""
    training = Training(precision="bf16", gradient_accumulation_fusion=True, global_batch_size=4, micro_batch_size=2)
    spec = RunSpec(engine="megatron", training=training, cuda_graph=graph, data=Data(kind="synthetic"))
    for release in get_args(MegatronCore):
        told = [
            note
            for note in export(replace(spec, megatron_core=release), to).notes
            if "one graph replays all micro-batches" in note
        ]
        assert bool(told) == (graph.impl == "transformer_engine")


def test_the_graph_of_the_optimizer_is_printed_for_the_release_that_has_it() -> None:
    training = Training(precision="bf16", capturable_optimizer=True)
    spec = RunSpec(engine="megatron", megatron_core="0.19", training=training, data=Data(kind="synthetic"))
    captured = replace(spec, cuda_graph=CudaGraph("full_iteration", optimizer=True))
    assert flags_of(captured, "0.19")["--optimizer-cuda-graph"] == []
    assert overrides_of(captured, "0.19")[1]["optimizer.optimizer_cuda_graph"] == "true"
    (note,) = (note for note in export(captured, "megatron-lm").notes if "optimizer" in note)
    assert "needs Transformer Engine 2.14 or later" in note
    for other in (spec, replace(captured, megatron_core="0.16")):
        assert "--optimizer-cuda-graph" not in flags_of(other, other.megatron_core)
        assert any("optimizer" in note for note in export(other, "bridge").notes)


@pytest.mark.parametrize("to", ["megatron-lm", "bridge"])
@pytest.mark.parametrize("engine", ["torch_native", "megatron"])
def test_what_rules_reject_on_megatron_is_told_of_whichever_engine_the_cell_is(engine: Any, to: Format) -> None:
    """torch_native captures dropless experts, but a job with these flags fails in its capture."""
    spec = RunSpec(
        engine=engine,
        model=MOE,
        training=Training(precision="bf16"),
        data=Data(kind="synthetic"),
        fault=Fault("input_freed", 1),
    )
    whole = replace(spec, cuda_graph=CudaGraph("full_iteration", optimizer=engine == "torch_native"))
    padded = replace(whole, model=replace(MOE, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True))
    on_two = replace(padded, parallelism=Parallelism(dp=2, ep=2))
    for cell, rules in ((whole, ["capture.megatron_expert_sync"]), (padded, []), (on_two, []), (spec, [])):
        told = [note for note in export(cell, to).notes if note.startswith("[")]
        assert [note[1:].partition("]")[0] for note in told] == rules
        assert all(". Set cuda_graph.impl=transformer_engine" in note for note in told)
    compiled = replace(spec, cuda_graph=CudaGraph("torch_compile"))
    assert not [note for note in export(compiled, to).notes if note.startswith("[")], "printed as eager"


def test_bridges_own_recipes_do_not_overrule_the_cell() -> None:
    """Each of these recipes sets them to other values than the cell, in a place that takes precedence (0.3.1)."""
    _, overrides = overrides_of(RunSpec(training=Training(weight_decay=0.05)))
    assert overrides["model.moe_router_force_load_balancing"] == "false", "the harness's recipes route at random"
    decay = [overrides[f"scheduler.{name}_weight_decay"] for name in ("start", "end")]
    assert decay == [overrides["optimizer.weight_decay"]] * 2 == ["0.05"] * 2
    assert overrides["scheduler.weight_decay_incr_style"] == "constant"
    assert overrides["mixed_precision.grad_reduce_in_fp32"] == "true"
    _, in_16_bits = overrides_of(SPECS["recomputed"])
    assert in_16_bits["mixed_precision.grad_reduce_in_fp32"] == in_16_bits["ddp.grad_reduce_in_fp32"] == "false"


def test_the_harness_splits_sequences_where_the_cell_does() -> None:
    alone = RunSpec(parallelism=Parallelism(tp=2), data=Data(kind="synthetic"), training=Training(precision="bf16"))
    harness, overrides = overrides_of(alone)
    assert "--tensor_model_parallel_size" not in harness, "sequence_parallel would come with it"
    assert overrides["model.tensor_model_parallel_size"] == "2"
    assert overrides["model.sequence_parallel"] == "false"
    (note,) = export(alone, "bridge").notes
    assert note.startswith("parallelism.sequence_parallel=false")
    assert overrides_of(SPECS["laid out"])[0]["--tensor_model_parallel_size"] == "2"


def test_a_vocabulary_without_a_tokenizer_is_said_to_the_harness() -> None:
    harness, _ = overrides_of(RunSpec(data=Data(kind="synthetic")))
    assert (harness["--tokenizer_type"], harness["--vocab_size"]) == ("NullTokenizer", "255")
    assert "--tokenizer_type" not in overrides_of(RunSpec())[0]


def test_megatron_lm_starts_with_one_queue_where_ranks_share_layers_or_sequences() -> None:
    told = "CUDA_DEVICE_MAX_CONNECTIONS"
    beside = Parallelism(tp=2, dp=2, ep=2, sequence_parallel=True, overlap_moe_expert_parallel_comm=True)
    for layout, environment, noted in (
        (Parallelism(dp=2), {}, False),
        (Parallelism(tp=2), {}, True),
        (Parallelism(cp=2), {told: "8"}, True),
        (Parallelism(tp=2), {told: "1"}, False),
        (beside, {}, False),
    ):
        spec = RunSpec(model=MOE, parallelism=layout, environment=environment)
        assert any(f"set {told}=1" in note for note in export(spec, "megatron-lm").notes) is noted
        assert not any(f"set {told}=1" in note for note in export(spec, "bridge").notes)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_is_printed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for to in ("megatron-lm", "bridge"):
        assert main(["export", str(path), "--to", to]) == 0
        printed = capsys.readouterr()
        labels = [cell.label for cell in expand(load(path), "cuda") if not cell.is_added_baseline]
        assert [line[2:] for line in printed.out.splitlines() if line[2:] in labels] == labels
        assert all(line.startswith("note on ") for line in printed.err.splitlines())


def test_twins_are_printed_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "qwen3_8l.yaml")
    picked = ["--only", "cuda_graph.impl=none", "--only", "training.compile=none"]
    assert main(["export", recipe, "--to", "megatron-lm", *picked]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# eager")
    assert "--cuda-graph-impl none" in printed


def test_the_best_cell_of_a_sweep_is_the_fastest_that_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def wrong(run: AttemptRecord) -> None:
        if run.spec.cuda_graph.impl == "torch":
            for row in run.metrics[5:]:
                row["loss"] += 1.0

    write_sweep(tmp_path / "sweeps" / "mine", impls=("torch", "full_iteration"), device="cuda", edit=wrong)
    words = ["export", "mine", "--best", "--to", "megatron-lm"]
    assert main(words) == 1 and "there is no report" in capsys.readouterr().err
    main(["report", "mine"])
    capsys.readouterr()
    assert main(words) == 0
    exported = capsys.readouterr().out
    assert exported.startswith("# full_iteration") and exported.count("# ") == 1
    assert main([*words, "training.steps=3"]) == 1 and "leave out" in capsys.readouterr().err


def test_without_a_best_cell_it_is_said_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = write_sweep(tmp_path / "sweeps" / "mine", impls=("torch", "full_iteration"), device="cuda")
    main(["report", "mine"])
    report = json.loads((sweep.report / "report.json").read_text())
    report["rankings"] = []
    eager, first, second = report["cells"]
    first["verdict"] |= {"verdict": "DIVERGED"}
    second["verdict"] |= {"verdict": STEP_CHECKED}
    second["speed"] = None
    (sweep.report / "report.json").write_text(json.dumps(report))
    capsys.readouterr()
    assert main(["export", "mine", "--best", "--to", "bridge"]) == 1
    said = capsys.readouterr().err
    assert f"fastest: {first['label']} is DIVERGED; no speed of {second['label']} was judged\n" in said
    assert eager["label"] not in said
