"""Test the interpolations of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.orchestrator.recipe.recipe_file import HEAD_LINES, problems, read


def test_an_interpolation_has_the_value_and_the_type_of_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODES_1", "4")
    monkeypatch.setenv("ODD", "${training.steps}")
    text = (
        HEAD_LINES
        + "training: {steps: 10, seed: '${.steps}', clip_grad: '${oc.env:NODES_1}'}\nrepeats: 1\n"
        + "parallelism: {dp: '${oc.env:NO_SUCH_VARIABLE_X, 2}', tp: '${oc.select:training.none,3}'}\n"
        + "cuda_graph: {scope: [attn]}\nsweep: {points: [{cuda_graph: '${cuda_graph}'}]}\n"
        + "environment: {A: 'at ${training.steps}%', B: '\\${HOME} \\\\${repeats}}', C: '${oc.env:ODD}'}\n"
    )
    recipe = read(tmp_path, text)
    assert recipe.base["training"] == {"steps": 10, "seed": 10, "clip_grad": 4.0}
    assert recipe.base["parallelism"] == {"dp": 2, "tp": 3}
    assert recipe.axes == (({"cuda_graph": {"scope": ("attn",)}},),)
    assert recipe.base["environment"] == {"A": "at 10%", "B": "${HOME} \\1}", "C": "${training.steps}"}


def _refer(name: object) -> str:
    return f"${{environment.A{name}}}"


BOMBS = {
    "characters": [f"A0: {'x' * 20}", *(f"A{i}: '{_refer(i - 1) * 10}'" for i in range(1, 9))],
    "values": ["A0: [x, x]", *(f"A{i}: [{', '.join([repr(_refer(i - 1))] * 10)}]" for i in range(1, 9))],
    "a chain": [f"A{i}: '{_refer(i - 1)}'" for i in range(200, 0, -1)],
    "brackets": [f"A0: '{'${' * 900}'"],
    "levels": ["A0: [[[[[[x]]]]]]", *(f"A{i}: [[[['{_refer(i - 1)}']]]]" for i in range(1, 20))],
}
"""Entries of an environment with a few lines each. If every reference were resolved, they would take hours or all
memory."""


@pytest.mark.parametrize("case", BOMBS)
def test_interpolations_inside_each_other_are_bounded(tmp_path: Path, case: str) -> None:
    lines = [f"  {line}\n" for line in BOMBS[case]]
    assert problems(tmp_path, f"{HEAD_LINES}environment:\n{''.join(lines)}")


def test_a_field_may_refer_to_one_that_refers_to_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBER", "7")
    lines = ["  A0: '${oc.env:NUMBER}'\n", *(f"  A{i}: '{_refer(i - 1)}{_refer(i - 1)}'\n" for i in range(1, 4))]
    recipe = read(tmp_path, f"{HEAD_LINES}environment:\n{''.join(lines)}")
    assert recipe.base["environment"]["A3"] == "7" * 2**3


@pytest.mark.parametrize(
    "inner",
    ["${environment.${repeats}}", "${oc.env:X_${repeats}}", "${oc.env:X,${repeats}}", "${" * 900, "${oc.env:X,{}}"],
)
def test_no_interpolation_is_inside_another(tmp_path: Path, inner: str) -> None:
    (problem,) = problems(tmp_path, HEAD_LINES + f"repeats: 1\nenvironment: {{A: '{inner}'}}\n")
    assert (
        "holds a brace or another interpolation" in problem.message
        and "replace an inner interpolation by its value" in problem.fix
    )


@pytest.mark.parametrize(
    "resolver", ["oc.select:environment", "oc.create:{}", "oc.dict.keys:training", "", ":", ".", "..x:y"]
)
def test_any_resolver_ends_in_a_recipe_or_a_problem(tmp_path: Path, resolver: str) -> None:
    (problem,) = problems(tmp_path, HEAD_LINES + "environment: {A: '${" + resolver + "}'}\n")
    assert problem.place.startswith(f"{tmp_path}/r.yaml:3: environment.A") and problem.fix
