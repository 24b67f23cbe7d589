"""Test that any text is a recipe or a list of problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.recipe.expand import expand
from orchestrator.recipe.fields import RECIPE, SECTIONS
from tests.unit.orchestrator.recipe.recipe_file import HEAD_LINES, read

WORDS = st.sampled_from([*RECIPE.fields, *SECTIONS, "environment", "sweep", "grid", "points", "preset", "x", "impl",
                         "cuda_graph_scope", "steps", "A_B", "${training.steps}", "tiny_moe", "???", "bf16", "none"])  # fmt: skip
SCALARS = st.one_of(
    WORDS, st.text(max_size=6), st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.dates()
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
SWEEPS = st.fixed_dictionaries({}, optional={
    "grid": TREES | st.dictionaries(st.sampled_from(list(RECIPE.fields)), st.lists(TREES, max_size=3), max_size=3),
    "points": TREES | st.lists(st.dictionaries(st.sampled_from(list(RECIPE.fields)), SCALARS, max_size=3), max_size=3),
})  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(WORDS, TREES, max_size=5), sweep=st.none() | TREES | SWEEPS, whole=st.booleans())
def test_any_tree_is_a_recipe_or_a_list_of_problems(
    tmp_path: Path, fields: dict[str, Any], sweep: Any, whole: bool
) -> None:
    tree = fields | ({} if sweep is None else {"sweep": sweep}) | ({"name": "x", "model": "tiny_moe"} if whole else {})
    only_input_errors(tmp_path, yaml.safe_dump(tree, allow_unicode=True))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("ab:{}[]-,&*!|>'\"#?%\n\t ${}."), max_size=30))
def test_any_text_is_a_recipe_or_a_list_of_problems(tmp_path: Path, text: str) -> None:
    only_input_errors(tmp_path, HEAD_LINES + text)


def only_input_errors(folder: Path, text: str) -> None:
    try:
        cells = expand(read(folder, text), "cpu")
    except InputError as error:
        assert error.problems
        for problem in error.problems:
            assert "r.yaml" in problem.place
            assert problem.message
            assert str(problem).isprintable() or "\n" in str(problem)
    else:
        assert cells
