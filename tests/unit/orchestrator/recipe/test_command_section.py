"""Test recipes with a program of the user's own: one cell for each of its graphs, flags as axes, and all kinds of
mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.recipe.expand import ResolvedCell, expand, filter_cells
from orchestrator.recipe.recipe import load

HEAD = "name: mine\nengine: command\n"
COMMAND = "command: {run: python t.py, graphs: {none: [--eager], a: [--graph, 1], b: [-g]}}\n"


def cells(folder: Path, text: str) -> tuple[ResolvedCell, ...]:
    path = folder / "mine.yaml"
    path.write_text(text)
    return expand(load(path), "cpu")


def test_each_named_graph_is_a_cell_of_one_workload(tmp_path: Path) -> None:
    found = cells(tmp_path, HEAD + COMMAND)
    assert [cell.label for cell in found] == ["eager", "a", "b"]
    assert len({cell.spec.workload_id for cell in found}) == 1 and len({cell.spec.cell_id for cell in found}) == 3
    assert [cell.spec.cuda_graph.arguments for cell in found] == [(), ("--graph", "1"), ("-g",)]
    assert all(cell.spec.command.eager == ("--eager",) for cell in found)
    assert all(cell.spec.command.workdir == str(tmp_path) for cell in found)
    assert [cell.label for cell in filter_cells(found, ["cuda_graph.name=b"])] == ["eager", "b"]


def test_another_graph_leaves_the_eager_runs_as_they_are(tmp_path: Path) -> None:
    before, after = (cells(tmp_path, HEAD + text) for text in (COMMAND, COMMAND.replace("b: [-g]", "c: [-c]")))
    assert before[0].spec.run_id == after[0].spec.run_id


def test_flags_are_axes(tmp_path: Path) -> None:
    text = COMMAND.replace("run:", "flags: {bare: true, gone: null, several: [1, 2], --x: 3}, run:")
    found = cells(tmp_path, f"{HEAD}{text}sweep.grid.command.flags.tp-size: [1, 2]\n")
    assert [cell.label for cell in found] == ["eager, tp-size=1", "a, tp-size=1", "b, tp-size=1", "eager, tp-size=2", "a, tp-size=2", "b, tp-size=2"]  # fmt: skip
    assert found[0].spec.command.flags == ("--bare", "--several", "1", "2", "--x", "3", "--tp-size", "1")
    assert len({cell.spec.workload_id for cell in found}) == 2
    found = cells(tmp_path, f"{HEAD}{COMMAND}sweep.grid.command.flags.sizes: [[1, 2], [3, 4]]\n")
    assert [cell.spec.command.flags for cell in found if not cell.spec.graphed] == [
        ("--sizes", "1", "2"),
        ("--sizes", "3", "4"),
    ]
    assert len({cell.label for cell in found}) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: mine\nengine: command\n", "the section and the engine command belong together"),
        (f"name: mine\nmodel: tiny_moe\n{COMMAND}", "the section and the engine command belong together"),
        (f"{HEAD}{COMMAND}model: tiny_moe\n", "engine command runs a program with its own"),
        (HEAD + COMMAND.replace("[-g]", "-g"), "not a list of words"),
        (HEAD + COMMAND.replace("[-g]", "[--graphs, true]"), "true, false and null are not words"),
        (
            HEAD + COMMAND.replace("none: [--eager], ", "").replace("[-g]", "[]"),
            "command.graphs.b = []: the words of none too",
        ),
        (HEAD + COMMAND.replace("b: [", "c: [-g], b: ["), 'command.graphs.b = ["-g"]: the words of c too'),
        (f"{HEAD}{COMMAND}cuda_graph.impl: torch\n", "cuda_graph.impl: command.graphs sets the graphs of every cell"),
        (f"{HEAD}{COMMAND}sweep.grid.cuda_graph: [{{impl: torch}}]\n", "command.graphs sets the graphs of every cell"),
        (HEAD + COMMAND.replace("b: [", "eager: ["), "not usable as the name of graphs"),
        (HEAD + COMMAND.replace("run:", "flags: {api-key: abc}, run:"), "looks like a secret"),
        (HEAD + COMMAND.replace("run:", "flags: {x: [{}]}, run:"), "not the value of a flag"),
        (HEAD + COMMAND.replace("run:", "frame: script, run:"), "no such field"),
        (HEAD + COMMAND.replace("t.py", "t.py --api-key abcdefgh"), "looks like a secret"),
        (
            HEAD + COMMAND.replace("python t.py", "'python t.py {sead}'"),
            "command.run = \"python t.py {sead}\": {sead} is not a placeholder\n    did you mean 'seed'?",
        ),
        (
            HEAD + COMMAND.replace("python t.py", "'python t.py {steps --x {seed}'"),
            "{steps has no closing brace\n    write {steps}",
        ),
        (HEAD + COMMAND.replace("-g]", "'{step}']"), 'command.graphs.b = ["{step}"]: {step} is not a placeholder'),
        (
            HEAD + COMMAND.replace("run:", "flags: {x: '{tpp}'}, run:"),
            'command.flags.x = "{tpp}": {tpp} is not a placeholder',
        ),
        (
            HEAD + COMMAND.replace("python", "/bin/sbatch -N2"),
            "/bin/sbatch asks for a job of its own\n    write the command",
        ),
        (HEAD + COMMAND.replace("python", "srun python"), "srun asks for a job of its own"),
        (HEAD + COMMAND.replace("python t.py", "X=1 python t.py"), "X=1 is no program\n    write it under environment"),
        (HEAD + COMMAND.replace("python t.py", "cd /x && python t.py"), "the program would get && as an argument"),
        (HEAD + COMMAND.replace("t.py", "t.py 2>&1 | tee log"), "the program would get 2>&1 as an argument"),
        (HEAD + COMMAND.replace("[-g]", "[-g, '|', tee]"), 'command.graphs.b = ["-g", "|", "tee"]: without a shell'),
        (HEAD + COMMAND.replace("t.py", "t.py >log"), "the program would get >log as an argument"),
        (HEAD + COMMAND.replace("t.py", "t.py --out=$HOME"), "the program would get --out=$HOME as an argument"),
        (HEAD + COMMAND.replace("t.py", '"t.py'), "not the words of a command: no closing quotation"),
        (HEAD + COMMAND.replace("[-g]", '["\\0"]'), "a null character"),
        (HEAD + COMMAND.replace("python t.py", '"python \\0"'), "a null character"),
        (HEAD + COMMAND.replace("python t.py", "''"), 'command.run = "": no command'),
        (HEAD + COMMAND.replace("run: python t.py, ", ""), "command: no program to run"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        cells(tmp_path, text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "words", ["bash -c 'cd $HOME && python t.py > log'", "python t.py --pattern '<s>' --blend '1;2' --match 'a$'"]
)
def test_what_a_shell_would_read_may_be_meant(tmp_path: Path, words: str) -> None:
    (graphed, *_) = cells(tmp_path, HEAD + COMMAND.replace("python t.py", json.dumps(words)))
    assert graphed


def test_an_engine_that_is_a_framework_is_one_problem(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        cells(tmp_path, HEAD.replace("engine: command", "engine: torchtitan") + COMMAND)
    (problem,) = raised.value.problems
    assert problem.fix == "write engine: command, and command.framework: torchtitan"
