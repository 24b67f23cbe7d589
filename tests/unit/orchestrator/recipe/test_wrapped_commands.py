"""Test that two command lines become one recipe, whose cells run exactly these words."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from launch.contract.plan import Margins
from launch.frameworks.command_line import command_words
from orchestrator.errors import InputError
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load
from orchestrator.recipe.wrapped_commands import WrappedCommands

PAIRS = [
    ("python t.py --x 'a b'", "python t.py --x 'a b' --graphs", ""),
    ("python t.py --graphs 0 --x", "python t.py --graphs 1 --x", ""),
    ('GRAPHS=0 python t.py \'{"a": {"b": 1}}\'', 'GRAPHS=1 python t.py \'{"a": {"b": 1}}\'', "env "),
    ("torchrun t.py --no-graphs", "torchrun t.py", ""),
    ("python t.py", "GRAPH=1 python t.py --graphs", "env "),
    ("GR=0 python t.py", "python t.py", "env "),
]


def wrapped(eager: str, graphed: str) -> WrappedCommands:
    return WrappedCommands(eager, graphed, "/tmp", "", steps=110, repeats=2, ranks=2, margins=Margins())


@pytest.mark.parametrize(("eager", "graphed", "before"), PAIRS)
def test_each_side_runs_its_own_words(tmp_path: Path, eager: str, graphed: str, before: str) -> None:
    path = tmp_path / "wrap.yaml"
    path.write_text(wrapped(eager, graphed).recipe)
    cells = expand(load(path), "cpu")
    assert [command_words(cell.spec, {}) for cell in cells] == [
        tuple(shlex.split(before + side)) for side in (eager, graphed)
    ]
    assert cells[0].spec.workload_id == cells[1].spec.workload_id
    assert cells[0].spec.parallelism.world_size == 2


@pytest.mark.parametrize("other", [{"steps": 20}, {"ranks": 1}])
def test_runs_that_an_earlier_sweep_has_not_get_another_name(other: dict[str, int]) -> None:
    one = wrapped("python t.py", "python t.py --graphs")
    assert dataclasses.replace(one, **other).recipe.splitlines()[0] != one.recipe.splitlines()[0]  # type: ignore[arg-type]
    assert dataclasses.replace(one, repeats=9).recipe.splitlines()[0] == one.recipe.splitlines()[0]


@pytest.mark.parametrize(
    ("eager", "graphed", "message"),
    [
        ("a b", "a b", "it is the eager command"),
        ("a --x 1 --y", "a --y --x=1", "the eager command's words"),
        ("a", "b", "begins with 'b'"),
        ("a", "a 'b", "quotes"),
        ("", "a", "empty"),
        (
            "a --x 1 > e.log",
            "a --x 1 --graph > g.log",
            "--eager: without a shell, the program would get > as an argument",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(eager: str, graphed: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _ = wrapped(eager, graphed).recipe


MEGATRON = "python t.py --train-iters 9"


@pytest.mark.parametrize(
    ("eager", "graphed", "name"),
    [
        ("python t.py --lr 1e-3", "python t.py --g --lr=1e-4", "lr"),
        ("python t.py --lr=1e-3 x", "python t.py --lr=1e-3 --g x", ""),
        ("python t.py --lr -1", "python t.py --lr -2 --g", "lr"),
        ("python t.py --x", "python t.py --g --lr 1e-4 --x", "lr"),
        ("python t.py --compile --mode default", "python t.py --compile --mode reduce-overhead", ""),
        ("python t.py", "python t.py --compile --mode reduce-overhead", ""),
        ("python t.py --mode eager --fast", "python t.py --mode cudagraph --fast", ""),
        ("python t.py --eager", "python t.py --graphs", ""),
        ("python t.py --out eager_1", "python t.py --out graphs_1 --graphs", "out"),
        ("python t.py", "python t.py --compile --lr 0.1", "lr"),
        ("python t.py --amp", "python t.py --compile", "amp"),
        ("python t.py optim.lr=1 graphs=0", "python t.py +optim.lr=2 graphs=1", "optim.lr"),
        ("python t.py model/kind=a", "python t.py model/kind=b g=1", "model/kind"),
        ("python t.py -b32", "python t.py -b64 --g", "b"),
        ("SEED=1 python t.py", "SEED=2 GRAPHS=1 python t.py", "SEED"),
        ("bash -c 'python t.py --lr 1'", "bash -c 'python t.py --lr 2 --g'", "lr"),
        ("bash -c 'python t.py --lr 1'", "bash -c 'python t.py --lr 1 --g'", ""),
        (MEGATRON, f"{MEGATRON} --cuda-graph-impl local --cuda-graph-scope attn mlp --te-rng-tracker", ""),
        (MEGATRON, f"{MEGATRON} --cuda-graph-impl local --lr 1e-4", "lr"),
        ("t train.train_iters=9 x=1", "t train.train_iters=9 model.cuda_graph_impl=local", "x"),
    ],
)
def test_what_is_no_graph_setting_needs_permission(eager: str, graphed: str, name: str) -> None:
    commands = wrapped(eager, graphed)
    if name:
        with pytest.raises(InputError, match=rf"\b{name}\b[^;]*; .*\n    .* --allow-difference {name}$"):
            _ = commands.recipe
    assert replace(commands, margins=Margins(allow_differences=(name,))).recipe


def test_allowed_differences_are_in_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "wrap.yaml"
    margins = Margins(loss=0.5, allow_differences=("settings.NCCL_ALGO", "packages"))
    path.write_text(WrappedCommands("a b", "a c", "/tmp", "", 110, 2, 1, margins).recipe)
    assert load(path).equivalence == margins


def test_differences_show_no_secrets() -> None:
    commands = wrapped("API_KEY=hidden111 t", "API_KEY=hidden222 HF_TOKEN=hidden333 t --wandb-api-key hidden444")
    text = "; ".join(found.text for found in commands.differences)
    assert "API_KEY" in text and "HF_TOKEN" in text and "hidden" not in text
