"""Test reading recipes as a whole: a correct file becomes a Recipe, and all mistakes are reported at once, with their
fixes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import MOST_RUNS, load
from tests.unit.orchestrator.recipe.recipe_file import HEAD_LINES, problems, read, said

ROOT = Path(__file__).parents[4]
RECIPES = sorted([*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "recipes/exhibits").glob("*.yaml")])


def test_problems_are_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "sweep: {grid: {training.sead: [1]}}\nrepeats: 0\nmodel: {preset: nowhere}\ntraining: {steps: x}\nname: a b\n"
    )
    places = [place for place, _, _ in said(tmp_path, problems(tmp_path, text, "training.zeal=1"))]
    assert [place.split(" ")[0] for place in places] == [*(f"r.yaml:{line}:" for line in (1, 2, 3, 4, 5)), "command"]


# The lines after HEAD_LINES, and the problems that they cause. Each problem is (place, message, fix), and each text is
# a fragment.
WRONG: Mapping[str, tuple[str, list[tuple[str, str, str]]]] = {
    "unknown keys at each level": (
        "modle: 3\ntraining: {step: 5}\nparalelism: {dp: 2}\nsteps: 9\nfoo: 1\n",
        [
            ("r.yaml:3: modle = 3", "no such field", "did you mean 'model'?"),
            ("r.yaml:4: training.step = 5", "no such field", "did you mean 'steps'?"),
            ("r.yaml:5: paralelism.dp = 2", "no such field", "did you mean 'parallelism.dp'?"),
            ("r.yaml:6: steps = 9", "no such field", "did you mean 'training.steps'?"),
            ("r.yaml:7: foo = 1", "no such field", "known: cluster, command, cuda_graph"),
        ],
    ),
    "settings that no engine has": (
        "cfg: {model: {multi_latent_attention: true, kv_lora_rank: 512, mtp_num_layers: 1}}\n"
        "parallelism: {dispatcher: flex, moe_enable_deepep: true}\nmoe_token_dispatcher_type: flex\n"
        "training: {enable_autocast: true}\n"
        "cuda_graph: {num_warmup_iters: 11}\ncuda_graph_share_io_buffers: true\ncuda_graph_use_single_mempool: true\n"
        "cuda_graph_num_warmup_steps: 3\n",
        [
            ("r.yaml:3: model.multi_latent_attention = true", "multi-latent attention", "engine: command (docs/your_own_job.md)"),
            ("r.yaml:3: model.kv_lora_rank = 512", "multi-latent attention", "engine: command"),
            ("r.yaml:3: model.mtp_num_layers = 1", "multi-token prediction", "engine: command"),
            ('r.yaml:4: parallelism.dispatcher = "flex"', "the flex dispatcher", "engine: command"),
            ("r.yaml:4: parallelism.moe_enable_deepep = true", "the flex dispatcher", "engine: command"),
            ('r.yaml:5: moe_token_dispatcher_type = "flex"', "the flex dispatcher", "engine: command"),
            ("r.yaml:6: training.enable_autocast = true", "autocasts", "training.precision: bf16"),
            ("r.yaml:7: cuda_graph.num_warmup_iters = 11", "PyTorch's DDP", "cuda_graph.warmup_steps: 3"),
            ("r.yaml:8: cuda_graph_share_io_buffers = true", "share buffers by themselves", "leave it out"),
            ("r.yaml:9: cuda_graph_use_single_mempool = true", "keeps apart", "leave it out"),
            ("r.yaml:10: cuda_graph_num_warmup_steps = 3", "no such field", "write cuda_graph.warmup_steps"),
        ],
    ),
    "settings of Bridge's guide that recipes need not name": (
        "cfg:\n  model: {use_te_rng_tracker: true, bf16: true, recompute_method: uniform, cuda_graph_retain_backward_graph: true}\n"
        "  rng: {te_rng_tracker: true}\n  rerun_state_machine: {check_for_nan_in_loss: false}\n"
        "  ddp: {check_for_nan_in_grad: false}\nfp8: hybrid\ntraining: {fp8: mxfp8, fp8_recipe: tensorwise}\n"
        "moe_token_dispatcher_type: alltoall\n",
        [
            ("r.yaml:4: model.use_te_rng_tracker = true", "always has Transformer Engine's tracker", "leave it out"),
            ("r.yaml:4: model.bf16 = true", "precision by one field", "training.precision: bf16"),
            ('r.yaml:4: model.recompute_method = "uniform"', "the input of each layer", "training.recompute: full"),
            ("r.yaml:4: model.cuda_graph_retain_backward_graph = true", "once", "leave it out"),
            ("r.yaml:5: rng.te_rng_tracker = true", "always has Transformer Engine's tracker", "leave it out"),
            ("r.yaml:6: rerun_state_machine.check_for_nan_in_loss = false", "outside of its graph", "leave it out"),
            ("r.yaml:7: ddp.check_for_nan_in_grad = false", "outside of its graph", "leave it out"),
            ('r.yaml:8: fp8 = "hybrid"', "the format is always hybrid", "training.fp8: delayed, or current"),
            ('r.yaml:9: training.fp8 = "mxfp8"', "the format is always hybrid", "training.fp8: delayed, or current"),
            ('r.yaml:9: training.fp8_recipe = "tensorwise"', "the format is always hybrid", "training.fp8: delayed, or current"),
            ('r.yaml:10: moe_token_dispatcher_type = "alltoall"', "no such field", "write parallelism.dispatcher"),
        ],
    ),
    "settings of the sources that no engine has": (
        "cfg: {model: {peft: lora, fp4: e2m1, vision_cuda_graph: true, variable_seq_lengths: true, cpu_offloading_num_layers: 4}}\n"
        "fine_grained_activation_offloading: true\ninference_cuda_graph_scope: block\nmoe_paged_stash: true\n"
        "training: {rampup_batch_size: 8, optimizer_cpu_offload: true, fp16: true}\ncuda_graph_granularity: chunk\n"
        "peft: {scheme: lora}\ncuda_graph: {granularity: chunk}\n",
        [
            ('r.yaml:3: model.peft = "lora"', "LoRA", "by engine: command (docs/your_own_job.md), or leave it out"),
            ('r.yaml:3: model.fp4 = "e2m1"', "Blackwell", "engine: command"),
            ("r.yaml:3: model.vision_cuda_graph = true", "images", "engine: command"),
            ("r.yaml:3: model.variable_seq_lengths = true", "different lengths", "engine: command"),
            ("r.yaml:3: model.cpu_offloading_num_layers = 4", "offloading", "engine: command"),
            ("r.yaml:4: fine_grained_activation_offloading = true", "offloading", "engine: command"),
            ('r.yaml:5: inference_cuda_graph_scope = "block"', "inference", "engine: command"),
            ("r.yaml:6: moe_paged_stash = true", "paged stash", "engine: command"),
            ("r.yaml:7: training.rampup_batch_size = 8", "changes during a run", "engine: command"),
            ("r.yaml:7: training.optimizer_cpu_offload = true", "offloading", "engine: command"),
            ("r.yaml:7: training.fp16 = true", "loss scaling", "engine: command"),
            ('r.yaml:8: cuda_graph_granularity = "chunk"', "no such field", "leave it out"),
            ('r.yaml:9: peft.scheme = "lora"', "LoRA", "engine: command"),
            ('r.yaml:10: cuda_graph.granularity = "chunk"', "no such field", "leave it out"),
        ],
    ),
    "wrong types": (
        "training:\n  steps: abc\n  learning_rate: [1]\n  deterministic: 3\n  precision: fp16\n  seed: true\nrepeats: 1.5\nresources: {device: gpu}\n",
        [
            ('r.yaml:4: training.steps = "abc"', "not a whole number", "write a whole number"),
            ("r.yaml:5: training.learning_rate = [1]", "not a number", "write a number"),
            ("r.yaml:6: training.deterministic = 3", "not true or false", "write true or false"),
            ('r.yaml:7: training.precision = "fp16"', "not one of fp32, bf16", "did you mean 'bf16'?"),
            ("r.yaml:8: training.seed = true", "not a whole number", "write a whole number"),
            ("r.yaml:9: repeats = 1.5", "not a whole number", "write a whole number"),
            ('r.yaml:10: resources.device = "gpu"', "not one of auto, cpu, cuda", "write cuda"),
        ],
    ),
    "null where it makes no sense": (
        "training: {steps: null}\nparallelism:\nengine: null\nsweep:\nenvironment: null\ndata: {path: null}\n",
        [
            ("r.yaml:3: training.steps = null", "not a whole number", "leave it out"),
            ("r.yaml:4: parallelism = null", "empty section", "leave it out, or give it fields: tp, pp"),
            ("r.yaml:5: engine = null", "not one of torch_native, megatron", "write one of them"),
            ("r.yaml:6: sweep = null", "not a mapping of at least one axis", "leave it out"),
            ("r.yaml:7: environment = null", "not a mapping", "environment: {NAME"),
        ],
    ),
    "lists and scalars for sections, lists for scalars": (
        "training: [a]\nexpect: CUDA_OOM\nrepeats: [1]\nenvironment: abc\ncuda_graph: torch\n",
        [
            ('r.yaml:3: training = ["a"]', "not a mapping of fields", "give it fields: steps,"),
            ('r.yaml:4: expect = "CUDA_OOM"', "not a mapping of fields", "give it fields: outcome, phase"),
            ("r.yaml:5: repeats = [1]", "not a whole number", "write a whole number"),
            ('r.yaml:6: environment = "abc"', "not a mapping", "environment: {NAME"),
            ('r.yaml:7: cuda_graph = "torch"', "not a mapping of fields", "give it fields: impl, scope"),
        ],
    ),
    "a value left open": ("training:\n  steps: ???\n", [("r.yaml:4: training.steps", "not a whole number", "write")]),
    "numbers out of range": (
        "repeats: 0\nresources: {nodes: 0, gpus_per_node: -1, threads_per_rank: 0, minutes_per_run: 0,\n"
        "  hang_minutes: -3}\nequivalence: {loss: -1}\n",
        [
            ("r.yaml:3: repeats = 0", "at least 1", "leave it out"),
            ("r.yaml:4: resources.nodes = 0", "at least 1", ""),
            ("r.yaml:4: resources.gpus_per_node = -1", "at least 0", ""),
            ("r.yaml:4: resources.threads_per_rank = 0", "at least 1", ""),
            ("r.yaml:4: resources.minutes_per_run = 0", "above 0", ""),
            ("r.yaml:5: resources.hang_minutes = -3", "above 0", ""),
            ("r.yaml:6: equivalence.loss = -1", "at least 0", ""),
        ],
    ),
    "numbers that are none": (
        "training: {learning_rate: .nan, weight_decay: .inf, seed: 99999999999999999999}\nequivalence: {loss: .nan}\n"
        "resources: {minutes_per_run: .inf}\n",
        [
            ("r.yaml:3: training.learning_rate = NaN", "not a finite number", ""),
            ("r.yaml:3: training.weight_decay = Infinity", "not a finite number", ""),
            ("r.yaml:3: training.seed = 9999", "64 bits", ""),
            ("r.yaml:4: equivalence.loss = NaN", "not a finite number", ""),
            ("r.yaml:5: resources.minutes_per_run = Infinity", "not a finite number", ""),
        ],
    ),
    "an expectation of no outcome": (
        "expect: {outcome: OOM, phase: capturing}\n",
        [
            ('r.yaml:3: expect.outcome = "OOM"', "not one of COMPLETED, CUDA_OOM", "write one of them"),
            ('r.yaml:3: expect.phase = "capturing"', "not one of init", "did you mean 'capture'?"),
        ],
    ),
    "secrets, and what is no variable": (
        "environment: {HF_TOKEN: hunter2, A-B: '1', NCCL_X: true, NCCL_Y: [1]}\n",
        [
            ('r.yaml:3: environment.HF_TOKEN = "***"', "looks like a secret", "set it in the shell"),
            ('r.yaml:3: environment.A-B = "1"', "not the name of an environment variable", "letters"),
            ("r.yaml:3: environment.NCCL_X = true", "not the text of a variable", "write it in quotes"),
            ("r.yaml:3: environment.NCCL_Y = [1]", "not the text of a variable", "write it in quotes"),
        ],
    ),
    "what is no published figure": (
        "published: {eager: 467, graphed: ''}\n",
        [
            ("r.yaml:3: published.eager = 467", "not a published figure", "467 to 520 ms"),
            ('r.yaml:3: published.graphed = ""', "not a published figure", "with its unit"),
        ],
    ),
    "a token by its form": (
        "environment: {NCCL_X: --key hf_0123456789abcdefgh}\n",
        [('r.yaml:3: environment.NCCL_X = "***"', "looks like a secret (a token hf_...)", "set it in the shell")],
    ),
    "a secret by interpolation": (
        "environment: {NCCL_X: '${oc.env:HF_TOKEN}'}\n",
        [("r.yaml:3: environment.NCCL_X", "$HF_TOKEN looks like a secret", "remove it")],
    ),
    "interpolations": (
        "training:\n  steps: ${nothing}\n  seed: ${oc.env:NO_SUCH_VARIABLE_X}\n  clip_grad: ${.adam_beta1}\n"
        "  adam_beta1: ${.clip_grad}\n  weight_decay: '${oops'\n",
        [
            ("r.yaml:4: training.steps", "'nothing' not found", "a field of this file"),
            ("r.yaml:5: training.seed", "NO_SUCH_VARIABLE_X", ""),
            ("r.yaml:6: training.clip_grad", "refers to itself", "write the value out"),
            ("r.yaml:7: training.adam_beta1", "refers to itself", "write the value out"),
            ("r.yaml:8: training.weight_decay", "has no end", "close ${ with }"),
        ],
    ),
    "given twice": (
        "training: {steps: 50, steps: 60}\nrepeats: 1\nrepeats: 2\ntraining.seed: 1\ntraining.seed: 2\n",
        [
            ("r.yaml:3: training.steps", "given twice (first in line 3)", "keep one"),
            ("r.yaml:5: repeats", "given twice (first in line 4)", "keep one"),
            ("r.yaml:7: training.seed", "given twice (first in line 6)", "keep one"),
        ],
    ),
    "dotted and nested contradict": (
        "training.steps: 50\ntraining: {steps: 60}\ndata: 3\ndata.kind: text\n",
        [
            ("r.yaml:4: training.steps = 60", "training.steps is given twice", "keep one"),
            ("r.yaml:5: data = 3", "not a mapping of fields", "give it fields: kind"),
            ('r.yaml:6: data.kind = "text"', "data.kind is given twice", "keep one"),
        ],
    ),
    "an axis inside a sweep that is none": (
        "sweep: 3\nsweep.grid.training.seed: ['${training.steps}']\n",
        [
            ("r.yaml:3: sweep = 3", "not a mapping of at least one axis", "grid"),
            ("r.yaml:4: sweep.grid.training.seed", "sweep.grid.training.seed is given twice", "keep one"),
        ],
    ),
    "two spellings contradict": (
        "cuda_graph: {impl: local, scope: [attn]}\ncuda_graph_modules: [mlp]\ncuda_graph_scope: moe\n",
        [
            ('r.yaml:4: cuda_graph_modules = ["mlp"]', "cuda_graph.scope is given twice", "keep one"),
            ('r.yaml:5: cuda_graph_scope = "moe"', "cuda_graph.scope is given twice", "keep one"),
        ],
    ),
    "scopes that no model has": (
        "cuda_graph.scope: attention\nsweep.grid.cuda_graph: [{scope: [full_iteration]}, {scope: [moe, xyz]}]\n",
        [
            ('r.yaml:3: cuda_graph.scope[0] = "attention"', "not one of attn, mlp, moe, ", "did you mean 'attn'?"),
            ('r.yaml:4: sweep.grid.cuda_graph[1].scope[1] = "xyz"', "not one of attn", "or [] for the whole layer"),
        ],
    ),
    "keys that are no text": (
        "3: 4\ntrue: 5\nnull: 6\n[a, b]: 7\ntraining: {1: 2}\n",
        [
            ("r.yaml:3", "the key 3 is not text", "quotes"),
            ("r.yaml:4", "the key true is not text", "quotes"),
            ("r.yaml:5", "the key null is not text", "quotes"),
            ("r.yaml:6", "the key of a list or mapping is not text", "quotes"),
            ("r.yaml:7: training", "the key 1 is not text", "quotes"),
        ],
    ),
    "tags": (
        "training: {steps: !!binary aGk=}\nfoo: !!python/object/apply:os.system [echo]\n",
        [
            ("r.yaml:3: training.steps", "the tag", "plain value"),
            ('r.yaml:3: training.steps = "aGk="', "not a whole number", ""),
            ("r.yaml:4: foo", "the tag", "plain value"),
            ('r.yaml:4: foo = ["echo"]', "no such field", ""),
        ],
    ),
    "axes": (
        "sweep:\n  grid:\n    training.steps: 5\n    training.step: [1, 2]\n    training.seed: [a, 1, null]\n"
        "    foo.bar: [1]\n    name: [a, b]\n    repeats: [1]\n    wandb.mode: [offline]\n    training.precision: []\n"
        "    data: [{kind: text}, 5]\n    cuda_graph.scope: [attn, mlp]\n    model.preset: [tiny_moe, nope]\n",
        [
            ("r.yaml:5: sweep.grid.training.steps = 5", "a list of at least one value", "[first, second]"),
            ("r.yaml:6: sweep.grid.training.step = [1, 2]", "no such field", "did you mean 'steps'?"),
            ('r.yaml:7: sweep.grid.training.seed[0] = "a"', "not a whole number", ""),
            ("r.yaml:7: sweep.grid.training.seed[2] = null", "not a whole number", ""),
            ("r.yaml:8: sweep.grid.foo.bar = [1]", "no such field", "known: "),
            ("r.yaml:9: sweep.grid.name", "belongs to the whole sweep", "another recipe"),
            ("r.yaml:10: sweep.grid.repeats", "belongs to the whole sweep", "another recipe"),
            ("r.yaml:11: sweep.grid.wandb.mode", "belongs to the whole sweep", "another recipe"),
            ("r.yaml:12: sweep.grid.training.precision = []", "a list of at least one value", ""),
            ("r.yaml:13: sweep.grid.data[1] = 5", "not a mapping of fields", "give it fields: kind"),
            ("r.yaml:14: sweep.grid.cuda_graph.scope", "a list of lists", "[[attn], [mlp]] are two values"),
            ('r.yaml:15: sweep.grid.model.preset[1] = "nope"', "no such preset", "known: "),
        ],
    ),
    "points": (
        "sweep:\n  points:\n    - 3\n    - {}\n    - {foo: 1}\n    - {training.steps: [1]}\n    - {repeats: 3}\n"
        "    - {cuda_graph_impl: torch, cuda_graph.impl: local}\n",
        [
            ("r.yaml:5: sweep.points[0] = 3", "a point is a mapping", "points: ["),
            ("r.yaml:6: sweep.points[1] = {}", "a point is a mapping", "points: ["),
            ("r.yaml:7: sweep.points[2].foo = 1", "no such field", "known: "),
            ("r.yaml:8: sweep.points[3].training.steps = [1]", "not a whole number", ""),
            ("r.yaml:9: sweep.points[4].repeats = 3", "belongs to the whole sweep", "another recipe"),
            ("r.yaml:10: sweep.points[5].cuda_graph.impl", "given twice", "keep one"),
        ],
    ),
    "a forgotten grid": (
        "sweep: {cuda_graph.impl: [none, torch_compile], gird: {training.seed: [1]}}\n",
        [
            ("r.yaml:3: sweep.cuda_graph.impl", "an axis belongs under grid", "sweep: {grid: {cuda_graph.impl: [...]}}"),
            ("r.yaml:3: sweep.gird.training.seed", "no such field", ""),
        ],
    ),
    "an empty sweep": ("sweep: {}\n", [("r.yaml:3: sweep = {}", "not a mapping of at least one axis", "leave it out")]),
    "empty axes": (
        "sweep: {grid: {}, points: []}\n",
        [("r.yaml:3: sweep.grid = {}", "not a mapping of at least one axis", "leave it out"), ("sweep.points = []", "at least one", "points: [")],
    ),
    "a sweep that is a list": ("sweep: [a]\n", [("r.yaml:3: sweep = ", "not a mapping of at least one axis", "grid")]),
    "a grid that is a list, points that are a mapping": (
        "sweep: {grid: [1], points: {a: 1}}\n",
        [("sweep.grid = [1]", "not a mapping of at least one axis", "grid"), ("sweep.points.a = 1", "not a list of at least one mapping", "points")],
    ),
    "two axes over one field": (
        "sweep: {grid: {cuda_graph: [{impl: torch}], cuda_graph.impl: [local]}, points: [{cuda_graph_impl: none}]}\n",
        [
            ("r.yaml:3: sweep.grid.cuda_graph.impl", "sets cuda_graph.impl, and so does sweep.grid.cuda_graph", "keep"),
            ("r.yaml:3: sweep.points", "sets cuda_graph.impl, and so does sweep.grid.cuda_graph", "keep"),
        ],
    ),
    "an empty key, and one that looks like an index": (
        '"": {"]": 1}\n', [("r.yaml: .] = 1", "no such field", "known")],
    ),
    "control characters": (
        '"\\e[31mred": 4\n', [("r.yaml:3: \\x1b[31mred = 4", "no such field", "known")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_every_problem_is_found_with_its_place_and_way_out(tmp_path: Path, case: str) -> None:
    text, expected = WRONG[case]
    found = said(tmp_path, problems(tmp_path, HEAD_LINES + text))
    assert len(found) == len(expected), found
    for (place, message, remedy), (place_part, message_part, remedy_part) in zip(found, expected, strict=True):
        assert place_part in place
        assert message_part in message, place
        assert remedy_part in remedy, place
        assert remedy, place


# Files that cannot be read to their end.
UNREADABLE: Mapping[str, tuple[str | bytes, str, str]] = {
    "empty": ("", "r.yaml", "the file is empty"),
    "comments only": ("# nothing\n", "r.yaml", "the file is empty"),
    "a list": ("- a\n- b\n", "r.yaml:1", "not a mapping of fields"),
    "a word": ("hello\n", "r.yaml:1", "not a mapping of fields"),
    "a number": ("3\n", "r.yaml:1", "not a mapping of fields"),
    "an open bracket": ("name: x\nmodel: {preset: [\n", "r.yaml:2", "not YAML"),
    "a colon too many": ("name: x\n  model: 3\n", "r.yaml:2", "not YAML"),
    "tabs": ("name: x\ntraining:\n\tsteps: 3\n", "r.yaml:3", "not YAML"),
    "two documents": (f"{HEAD_LINES}---\nname: y\n", "r.yaml:3", "another document"),
    "an unknown alias": ("name: *x\n", "r.yaml:1", "undefined alias"),
    "a control character": ("name: x\nmodel: \x00\n", "r.yaml:2", "control characters"),
    "latin-1": (b"model: 3\nname: caf\xe9\n", "r.yaml:2", "not UTF-8"),
    "UTF-16": ("name: x\n".encode("utf-16"), "r.yaml:1", "not UTF-8"),
    "nested too deep": (f"a: {'[' * 60}{']' * 60}\n", "r.yaml:1", "nested deeper"),
    "nested without end": ("a: " + "[" * 100_000, "r.yaml:1", "nest"),  # libyaml may have a limit of its own
    "an alias of itself": ("a: &a {b: *a}\n", "r.yaml:1", "aliases contain themselves"),
    "an alias bomb": (
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)),
        "r.yaml:7", "more than 1,000,000 values",
    ),
    "an alias bomb of long text": (
        f"a0: &a0 ['{'x' * 20_000}']\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 6)),
        "r.yaml:5", "more than 1,000,000 values",
    ),
    "a number of thousands of digits": (f"seed: {'9' * 5000}\n", "r.yaml", "thousands of digits"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_cannot_be_read_is_one_problem(tmp_path: Path, case: str) -> None:
    text, place, message = UNREADABLE[case]
    (problem,) = said(tmp_path, problems(tmp_path, text))
    assert problem[0] == place
    assert message in problem[1]


def test_a_tab_is_named_as_such(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "name: x\ntraining:\n\tsteps: 3\n")
    assert problem.fix == "line 3 is indented with a tab: YAML wants spaces"


def test_a_missing_file_names_the_one_that_was_probably_meant(tmp_path: Path) -> None:
    (tmp_path / "tiny_moe.yaml").write_text(HEAD_LINES)
    with pytest.raises(InputError, match=r"no such file or directory\n    did you mean '.*tiny_moe.yaml'"):
        load(tmp_path / "tiny_mo.yaml")
    with pytest.raises(InputError, match="is a directory"):
        load(tmp_path)
    with pytest.raises(InputError, match=r"repeats=2: not a recipe\n    write the recipe first: RECIPE repeats=2"):
        load(Path("repeats=2"))


@pytest.mark.parametrize("written", ["recipes/exhibits/local_inputs.yaml", "local_inputs", "local_inputs.yaml"])
def test_a_shipped_recipe_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(Path(written)).name == "local_inputs"


def test_name_and_model_are_asked_for(tmp_path: Path) -> None:
    places = [(place, remedy) for place, _, remedy in said(tmp_path, problems(tmp_path, "repeats: 2\n"))]
    assert places == [
        ("r.yaml: name", "write name: tiny_moe"),
        ("r.yaml: model", "write model: {preset: tiny_moe}, or its fields"),
    ]


def test_an_axis_over_models_is_a_model(tmp_path: Path) -> None:
    recipe = read(tmp_path, "name: x\nsweep: {grid: {model: [tiny_dense, {preset: tiny_moe, num_layers: 1}]}}\n")
    assert recipe.axes == (({"model": {"preset": "tiny_dense"}}, {"model": {"preset": "tiny_moe", "num_layers": 1}}),)
    assert set(recipe.presets) == {"tiny_dense", "tiny_moe"}


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "x\n", " ", "", "a" * 65])
def test_a_name_is_the_name_of_a_folder(tmp_path: Path, name: str) -> None:
    (problem,) = problems(tmp_path, f"name: {json.dumps(name)}\nmodel: tiny_dense\n")
    assert "r.yaml:1: name" in problem.place
    assert problem.message == "not usable as the name of a folder"


def test_a_bare_yes_is_no_name(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "name: yes\nmodel: tiny_dense\n")
    assert (problem.message, problem.fix) == ("not text", "write it in quotes: 'True'")


BROKEN_PRESETS = {
    "broken": ("num_layers: [\n", "models/broken.yaml:1", "not YAML"),
    "empty": ("", "models/empty.yaml", "the file is empty"),
    "listed": ("- 3\n", "models/listed.yaml:1", "not a mapping"),
    "nested": ("num_layers: 2\npreset: tiny_moe\n", 'models/nested.yaml:2: preset = "tiny_moe"', "cannot name another"),
    "unknown": ("\nnum_layer: 3\n", "models/unknown.yaml:2: num_layer = 3", "no such field"),
    "typed": ("hidden_size: abc\n", 'models/typed.yaml:1: hidden_size = "abc"', "not a whole number"),
}


@pytest.mark.parametrize("name", BROKEN_PRESETS)
def test_a_broken_preset_is_reported_beside_the_recipes_own_problems(tmp_path: Path, name: str) -> None:
    text, place, message = BROKEN_PRESETS[name]
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / f"{name}.yaml").write_text(text)
    found = said(tmp_path, problems(tmp_path, f"name: x\nmodel: {name}\ntraining: {{step: 3}}\n"))
    (own,) = (problem for problem in found if problem[0].startswith("models/"))
    assert own[0] == place
    assert message in own[1]
    assert [p for p, _, _ in found if p.startswith("r.yaml")] == ["r.yaml:3: training.step = 3"]


@pytest.mark.parametrize("name", ["tiny_mo", "../tiny_moe", "''"])
def test_an_unknown_preset_names_what_there_is(tmp_path: Path, name: str) -> None:
    (problem,) = problems(tmp_path, f"name: x\nmodel: {{preset: {name}}}\n")
    assert problem.message == "no such preset"
    assert "tiny_moe" in problem.fix


def test_a_preset_beside_the_recipe_goes_before_one_that_ships(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny_moe.yaml").write_text("num_layers: 7\n")
    assert read(tmp_path, "name: x\nmodel: tiny_moe\n").presets == {"tiny_moe": {"num_layers": 7}}


def test_a_sweep_beyond_all_measure_is_refused_with_its_numbers(tmp_path: Path) -> None:
    seeds = ", ".join(map(str, range(1, 401)))
    text = HEAD_LINES + f"repeats: 3\nsweep: {{grid: {{training.seed: [{seeds}], training.steps: [{seeds}]}}}}\n"
    (problem,) = problems(tmp_path, text)
    assert problem.message == (
        f"400 (training.seed) x 400 (training.steps) x 3 repeats are 480,000 runs, above {MOST_RUNS:,}"
    )
    assert problem.fix == "shorten an axis, or lower repeats", "if each axis has one value, only fewer repeats help"
    (problem,) = problems(tmp_path, HEAD_LINES + "repeats: 100001\n")
    assert problem.message == "100001 repeats are 100,001 runs, above 100,000"
    assert read(tmp_path, HEAD_LINES + "repeats: 100000\n").repeats == MOST_RUNS


def test_values_come_in_their_fields_types(tmp_path: Path) -> None:
    text = (
        "name: 2024\nmodel: tiny_dense\ntraining: {steps: '50', learning_rate: 1e-3, weight_decay: 1, deterministic: 'yes'}\n"
        "cuda_graph: {impl: transformer_engine, scope: 'attn, mlp'}\ndata: {path: 2024-01-01}\n"
        "environment: {NCCL_X: 0, NCCL_Y: 1.5}\nexpect: {phase: null}\nwandb: {tags: [1, b]}\n"
    )
    recipe = read(tmp_path, text)
    assert recipe.name == "2024"
    training = recipe.base["training"]
    assert training == {"steps": 50, "learning_rate": 0.001, "weight_decay": 1.0, "deterministic": True}
    assert isinstance(training["weight_decay"], float)
    assert recipe.base["cuda_graph"]["scope"] == ("attn", "mlp")
    assert recipe.base["data"] == {"path": "2024-01-01"}
    assert recipe.base["environment"] == {"NCCL_X": "0", "NCCL_Y": "1.5"}
    assert recipe.wandb.tags == ("1", "b")


def test_anchors_and_merge_keys_are_yaml(tmp_path: Path) -> None:
    text = HEAD_LINES + "training: &t {steps: 50, seed: 1}\nsweep: {points: [{training: {<<: *t, seed: 2}}]}\n"
    assert read(tmp_path, text).axes == (({"training": {"steps": 50, "seed": 2}},),)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recorded_text_of_a_shipped_recipe_is_the_recipe(tmp_path: Path, path: Path) -> None:
    recipe = load(path)
    again = read(tmp_path, recipe.text)
    assert dataclasses.replace(again, file=recipe.file) == recipe


REFERENCE = (ROOT / "docs" / "recipes.md").read_text()


def test_the_references_example_is_a_recipe(tmp_path: Path) -> None:
    example = REFERENCE.partition("```yaml\n")[2].partition("```")[0]
    assert len(expand(read(tmp_path, example), "cpu")) == 8


def test_the_name_of_a_file_of_this_folder_is_understood_without_its_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"mine: no such file or directory\n    did you mean 'mine.yaml'"):
        load(Path("mine"))
