"""Test overrides of a recipe, and that no secret gets into one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.orchestrator.recipe.recipe_file import HEAD_LINES, problems, read, said


def test_overrides_replace_what_the_file_holds(tmp_path: Path) -> None:
    text = (
        HEAD_LINES
        + "training: {steps: 10, seed: 3}\ncuda_graph_scope: attn\nsweep: {grid: {training.precision: [bf16]}}\n"
    )
    given = ("training.steps=50", "cuda_graph.scope=[mlp]", "environment.NCCL_X=1", "sweep.grid.training.precision=[fp32]",
             "sweep.grid.parallelism.dp=[1,2]", "model.num_layers=1", "training.learning_rate=1e-3", "wandb.tags=[a]")  # fmt: skip
    recipe = read(tmp_path, text, *given)
    assert recipe.base["training"] == {"steps": 50, "seed": 3, "learning_rate": 0.001}
    assert recipe.base["cuda_graph"] == {"scope": ("mlp",)}
    assert recipe.base["environment"] == {"NCCL_X": "1"}
    assert recipe.base["model"] == {"preset": "tiny_dense", "num_layers": 1}
    assert recipe.wandb.tags == ("a",)
    assert recipe.axes == (
        ({"training": {"precision": "fp32"}},),
        ({"parallelism": {"dp": 1}}, {"parallelism": {"dp": 2}}),
    )


def test_an_override_takes_the_place_of_what_stands_around_and_below_it(tmp_path: Path) -> None:
    assert read(tmp_path, HEAD_LINES + "training: 5\n", "training.steps=50").base["training"] == {"steps": 50}
    (problem,) = problems(tmp_path, HEAD_LINES + "training: {steps: 50}\n", "training=5")
    assert problem.place == "command line: training = 5"


def test_a_null_override_takes_axes_away(tmp_path: Path) -> None:
    text = HEAD_LINES + "sweep: {grid: {training.precision: [fp32, bf16], training.seed: [1, 2]}}\n"
    assert read(tmp_path, text, "sweep=null").axes == ()
    assert len(read(tmp_path, text, "sweep.grid.training.seed=null").axes) == 1


@pytest.mark.parametrize(
    ("swept", "override", "axis"),
    [
        ("{grid: {training.precision: [fp32, bf16]}}", "training.precision=bf16", "sweep.grid.training.precision"),
        ("{grid: {training: [{seed: 1}, {seed: 2, steps: 9}]}}", "training={seed: 3}", "sweep.grid.training"),
        ("{points: [{cuda_graph_impl: torch}]}", "cuda_graph_impl=none", "sweep.points"),
        ("{grid: {model: [tiny_moe, tiny_dense]}}", "model=tiny_moe", "sweep.grid.model"),
        ("{grid: {training: [{seed: 1}, {seed: 2, steps: 9}]}}", "training.steps=8", None),
        ("{grid: {training.precision: [bf16]}}", "training.seed=3", None),
    ],
)
def test_an_override_that_no_cell_would_see_is_refused(
    tmp_path: Path, swept: str, override: str, axis: str | None
) -> None:
    text = f"{HEAD_LINES}sweep: {swept}\n"
    if axis is None:
        read(tmp_path, text, override)
        return
    (problem,) = problems(tmp_path, text, override)
    assert problem.place.startswith("command line: ") and problem.message == f"{axis} sets it in every cell"
    read(tmp_path, text, override, f"{axis}=null")


HIDDEN = {
    "an assembled name": "environment: {BAR: API_KEY, FOO: '${oc.env:WANDB_${environment.BAR}}'}\n",
    "an assembled value": "environment: {A: hidden-, B: '${environment.A}from-all'}\n",
    "a value": "data: {path: /x/hidden-from-all/y}\n",
    "a value in an axis": "sweep: {grid: {data.path: [a, hidden-from-all]}, points: [{environment.X: ahidden-from-all}]}\n",
    "a value of a wrong type": "training: {steps: hidden-from-all}\n",
    "the name": "name: hidden-from-all\n",
    "a token as the user of a URL": "environment: {NCCL_X: 'https://hunter2hunter2@host/x'}\n",
    "a slash in a password": "environment: {NCCL_X: 'https://me:hun/hunter2@host/x'}\n",
    "a value in JSON": """environment: {NCCL_X: '{"api_key": "hunter2"}'}\n""",
    "a value in JSON in JSON": r"""environment: {NCCL_X: '"{\"apiKey\": \"hunter2\"}"'}""" + "\n",
    "a value that JSON spells in another way": """environment: {NCCL_X: '["a\\\\b\\"hidden"]'}\n""",
    "a value of a variable that is none of a secret": "environment: {NCCL_X: hunter2000}\n",
    "a header": "environment: {NCCL_X: 'Authorization: Bearer hunter2'}\n",
    "a short name": "environment: {DB_PWD: hunter2}\nenvironment.MYKEY: hunter2\n",
    "a key": "hidden-from-all: 3\n",
    "a variable": "environment: {hidden_from_all: x}\n",
    "a tag": "wandb: {tags: [a, hidden-from-all]}\n",
    "a preset": "model.preset: hidden-from-all\n",
    "a name that is no field": "wandb: {api_key: hunter2}\nHF_TOKEN: hunter2\n",
    "given twice": "environment: {HF_TOKEN: hunter2}\nenvironment.HF_TOKEN: hunter2\n",
    "a name in the middle": "training: {seed: '${${oc.env:HARMLESS}}'}\n",
    "a URL": "environment: {HTTP_PROXY: 'http://me:hunter2@proxy'}\n",
    "a long text": f"environment: {{A: '{'x' * 40} hidden-from-all'}}\n",
}
"""The lines after HEAD_LINES. The shell has the secret hidden-from-all. No message may show it, or hunter2."""


@pytest.mark.parametrize("case", HIDDEN)
def test_no_secret_gets_into_a_recipe_or_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden-from-all")
    monkeypatch.setenv("HARMLESS", "hidden-from-all")
    monkeypatch.setenv("OTHER_TOKEN", "hidden_from_all")
    monkeypatch.setenv("QUOTED_PW", 'a\\b"hidden')
    monkeypatch.setenv("NCCL_Y", '{"password": "hunter2000"}')
    found = problems(tmp_path, HEAD_LINES + HIDDEN[case])
    assert found
    assert not [
        secret
        for secret in ("hidden-from", 'b"hidden', 'b\\"hidden', "hunter2")
        if secret in str(said(tmp_path, found)).replace("_", "-")
    ]


@pytest.mark.parametrize("override", ["environment.HF_TOKEN=[hunter2", "environment.A={x: 1, b: me:hunter2@host"])
def test_no_secret_of_a_wrong_override_is_told(tmp_path: Path, override: str) -> None:
    (problem,) = problems(tmp_path, HEAD_LINES, override)
    assert "=***" in problem.place and "hunter2" not in str(problem)


def test_interpolation_sees_overrides(tmp_path: Path) -> None:
    text = HEAD_LINES + "training: {steps: 10, learning_rate_warmup_steps: '${training.steps}'}\n"
    assert read(tmp_path, text, "training.steps=50").base["training"]["learning_rate_warmup_steps"] == 50


WRONG_OVERRIDES = {
    "training.steps": ("command line: training.steps", "an override is key=value"),
    "=5": ("command line: =5", "an override is key=value"),
    "training.step=5": ("command line: training.step = 5", "no such field"),
    "training.steps=abc": ('command line: training.steps = "abc"', "not a whole number"),
    "training.steps=[": ("command line: training.steps=[", "not YAML"),
    "training=5": ("command line: training = 5", "not a mapping of fields"),
    "sweep.grid.cuda_graph[0].impl=none": (
        "command line: sweep.grid.cuda_graph[0].impl=none",
        "cannot change an item of a list",
    ),
    "training.seed=${nothing}": ("command line: training.seed", "not found"),
    "environment.HF_TOKEN=hunter2": ('command line: environment.HF_TOKEN = "***"', "looks like a secret"),
    "training={steps: 3, steps: 4}": ("command line: training={steps: 3, steps: 4}", "given twice"),
    "name=a b": ('command line: name = "a b"', "not usable"),
}


@pytest.mark.parametrize("override", WRONG_OVERRIDES)
def test_a_wrong_override_is_told_from_the_file(tmp_path: Path, override: str) -> None:
    place, message = WRONG_OVERRIDES[override]
    (problem,) = problems(tmp_path, HEAD_LINES, override)
    assert problem.place.startswith(place)
    assert message in problem.message
    assert problem.fix
    assert "hunter2" not in str(problem)


def test_problems_of_overrides_and_of_the_file_come_together(tmp_path: Path) -> None:
    found = said(tmp_path, problems(tmp_path, HEAD_LINES + "repeats: 0\n", "training.step=5", "oops", "data.kind=x"))
    assert sorted(place for place, _, _ in found) == [
        'command line: data.kind = "x"',
        "command line: oops",
        "command line: training.step = 5",
        "r.yaml:3: repeats = 0",
    ]
