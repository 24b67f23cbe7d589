"""Test the pure parts of the observer: which optimizer steps form a step, its phase, and the meaning of a printed line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.observe.steps.metric_log import Known, MetricLog, columns_in, columns_in_line
from launch.observe.steps.phase_tracker import PhaseTracker
from launch.observe.steps.step_groups import StepGroups
from launch.observe.steps.training_replays import TrainingReplays, count_training_replays

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("optimizers", "ended"),
    [
        ("aaaa", 4),
        ("ababab", 3),
        ("abcabc", 2),
        ("aababab", 4),
        ("", 0),
        ("aaabbb", 6),
        ("aaaba", 4),
        ("ababcdcd", 4),
        ("abacac", 3),
        ("aabbaab", 6),
        ("aaaabaaaabaa", 10),
        ("baaabaaab", 6),
    ],
    ids=str,
)
def test_optimizers_that_step_in_turn_make_one_step(optimizers: str, ended: int) -> None:
    groups = StepGroups()
    found = [groups.stepped(ord(name)) for name in optimizers]
    assert sum(late + now for late, now in found) + groups.is_open == ended


@pytest.mark.parametrize(
    ("optimizers", "last"), [("aaa", "a"), ("ababab", "b"), ("ababaab", "a"), ("ababaaaa", "a"), ("aabb", "b")]
)
def test_the_last_optimizer_of_a_step_is_known_also_if_others_stop(optimizers: str, last: str) -> None:
    groups = StepGroups()
    for name in optimizers:
        groups.stepped(ord(name))
    assert groups.last == ord(last)


@pytest.mark.parametrize(
    ("graphed", "captures", "phases", "recaptures"),
    [
        (False, "000000", "wwwssm", 0),
        (True, "0010000", "wwcssmm", 0),
        (True, "01010000", "wcscssmm", 0),
        (True, "100001", "cssmmm", 1),
        (True, "0000", "wwww", 0),
    ],
)
def test_phases_follow_from_what_was_captured_when(graphed: bool, captures: str, phases: str, recaptures: int) -> None:
    tracker = PhaseTracker(graphed, warmup_steps=3)
    assert "".join(tracker.end_step(int(count), [1])[0] for count in captures) == phases
    assert tracker.recaptures == recaptures
    last = phases.rfind("c")
    assert len(tracker.replayed) == (len(phases) - last - 1 if last >= 0 else 0)


@pytest.mark.parametrize(
    ("steps", "expected"),
    {
        "one graph": ("1 1 1 1", (4, 1, True)),
        "graphs of several micro-batches": ("1122 1122 1122", (12, 4, True)),
        "an evaluation by another graph": ("12 12 123333 12", (8, 2, True)),
        "an evaluation by a graph that also trains": ("12 12 121111 12", (8, 2, True)),
        "an evaluation at every other step": ("1 133 1 133", (4, 1, True)),
        "an evaluation at every step": ("13 13 13", (6, 2, True)),
        "a step without a replay": ("12 12 _ 12 12", (8, 2, False)),
        "a step that replays less": ("1122 1122 12 1122", (14, 4, False)),
        "a part captured again and again": ("1 12 1 13 1 14", (6, 1, False)),
        "a part captured again, and replayed twice": ("1 12 12 1 1 1 13 13 1", (9, 1, False)),
        "captured again early": ("12 13 13 13 13", (9, 2, False)),
        "captured again late": ("12 12 12 13 13", (8, 2, False)),
        "half captured again and again": ("12 12 13 13 14 14 15 15", (8, 1, False)),
        "all captured again and again": ("2 2 3 3 4 4", (0, 0, False)),
        "nothing replayed": ("_ _ _", (0, 0, False)),
    }.values(),
)
def test_replays_of_an_evaluation_neither_prove_nor_disprove_those_of_training(
    steps: str, expected: tuple[int, int, bool]
) -> None:
    replayed = [Counter(int(graph) for graph in step if graph != "_") for step in steps.split()]
    assert count_training_replays(replayed, recaptured=True) == TrainingReplays(*expected)


@pytest.mark.parametrize(
    ("steps", "steady"),
    {
        "a graph for each size of a batch": ("1 2 3 1 1 2", True),
        "two graphs for each size of a batch": ("12 34 12 34", True),
        "an eager step among them": ("1 2 _ 1 2", False),
        "a step of one graph instead of two": ("12 34 1 34", False),
        "another number of micro-batches": ("11 11 1111 11 1111 1111", False),
        "an evaluation at every other step": ("1 133 1 133", True),
    }.values(),
)
def test_steps_may_replay_graphs_that_were_all_captured_before(steps: str, steady: bool) -> None:
    replayed = [Counter(int(graph) for graph in step if graph != "_") for step in steps.split()]
    training = count_training_replays(replayed, recaptured=False)
    complete = training.replays == training.per_step * len(replayed) > 0
    assert (training.steady, complete) == (steady, steady)


def test_a_step_among_batches_of_different_sizes_may_lack_replays() -> None:
    replayed = [Counter([1]), Counter([2]), Counter[int](), Counter([3]), Counter([1, 9])]
    assert count_training_replays(replayed, recaptured=False) == TrainingReplays(4, 1, False)


GRAPHS = st.lists(st.integers(1, 4), max_size=4).map(Counter)


@given(st.lists(GRAPHS, min_size=2, max_size=12), st.booleans(), st.data())
def test_a_step_without_a_replay_has_no_proof(
    replayed: list[Counter[int]], recaptured: bool, data: st.DataObject
) -> None:
    replayed[data.draw(st.integers(0, len(replayed) - 1))] = Counter()
    training = count_training_replays(replayed, recaptured=recaptured)
    assert not training.steady and not training.replays == training.per_step * len(replayed) > 0


@given(GRAPHS.filter(bool), st.integers(3, 12), st.sets(st.integers(0, 11)), st.booleans())
def test_the_same_evaluation_in_a_minority_of_steps_keeps_the_proof(
    trains: Counter[int], steps: int, evaluates: set[int], recaptured: bool
) -> None:
    evaluated = {step for step in evaluates if step < steps and 2 * len(evaluates) < steps}
    replayed = [trains + Counter([9, 9]) if step in evaluated else trains for step in range(steps)]
    per_step = sum(trains.values())
    assert count_training_replays(replayed, recaptured=recaptured) == TrainingReplays(steps * per_step, per_step, True)


@given(GRAPHS.filter(bool), st.integers(2, 12), st.integers(1, 12))
def test_a_graph_that_is_captured_again_has_no_proof(trains: Counter[int], steps: int, every: int) -> None:
    """Another graph replays in each step all the time."""
    replayed = [trains + Counter([10 + step] * (step % every == 0)) for step in range(2 * steps)]
    again = len(range(0, 2 * steps, every)) > 1
    assert count_training_replays(replayed, recaptured=True).steady is not again


def test_without_steps_nothing_was_replayed() -> None:
    assert count_training_replays([], recaptured=False) == TrainingReplays(0, 0, False)


LINES: dict[str, dict[str, float]] = {
    '{"step": 3, "loss": 2.5, "grad_norm": 0.25}': {"step": 3, "loss": 2.5, "grad_norm": 0.25},
    "{'loss': '2.5', 'grad_norm': '0.25', 'learning_rate': 1e-05, 'epoch': 0.1}": {"loss": 2.5, "grad_norm": 0.25},
    " [2026-11-23 08:00:00] iteration        5/      60 | consumed samples:           10 | elapsed time per iteration (ms): 12.0 |"
    " learning rate: 1.0E-04 | global batch size:     2 | lm loss: 1.050000E+01 | loss scale: 1.0 | grad norm: 1.234 |"
    " number of skipped iterations:   0 |": {"step": 5, "loss": 10.5, "grad_norm": 1.234},
    "\x1b[31mstep:  1  \x1b[32mloss:  8.12345  \x1b[33mgrad_norm:  0.2345  \x1b[34mmemory:  5.20GiB(6.55%)\x1b[0m":
        {"step": 1, "loss": 8.12345, "grad_norm": 0.2345},
    "step 7: loss=nan": {"step": 7, "loss": float("nan")},
    "step 7 loss 2.5 lr 0.1": {"step": 7, "loss": 2.5},
    "epoch 1 | step 7/500 | loss 2.5 | grad norm 0.5": {"step": 7, "loss": 2.5, "grad_norm": 0.5},
    "step:  37%|###  | 41/110 [00:01<00:02, loss=0.53]": {"loss": 0.53},
    "loss: tensor(0.25, grad_fn=<MulBackward0>)": {"loss": 0.25},
    "loss .5": {"loss": 0.5},
    "loss 2.5 | ms/step: 83.1 | time per step 0.08": {"loss": 2.5},
    "loss 2.5 | step 0.08s | data 0.01s": {"loss": 2.5},
    "41/110 loss=2.5 fwd 30 ms bwd 50 ms step 12 ms": {"loss": 2.5},
    "iter 7 loss: 2.5, data: 0.001, step: 0.0831": {"step": 7, "loss": 2.5},
    "loss 2.5 step: 83.2 ms, step 7": {"step": 7, "loss": 2.5},
    '{"step": 7.0, "loss": 2.5}': {"step": 7, "loss": 2.5},
    '{"step": 0.083, "loss": 2.5}': {"loss": 2.5},
    '{"step": NaN, "loss": 2.5}': {"loss": 2.5},
    "loss 2.5 | 83 ms/step | iter 7": {"step": 7, "loss": 2.5},
    "loss 1,234.5": {},
    "[valid] step 3 loss 0.5": {},
    "val: loss=0.5": {},
    "eval | loss 0.4": {},
    "\x1b[33mvalidate step:  1  \x1b[32mloss:  8.12345  \x1b[36mmemory:  5.20GiB(6.55%)\x1b[0m": {},
    "{'train_runtime': 1.5, 'train_steps_per_second': 9.0, 'train_loss': 2.5, 'epoch': 3.0}": {},
    "  train_loss               =     2.5": {},
    "step 0: train loss 4.2874, val loss 4.2823": {},
    "iter 0: loss 4.2659, time 1540.11ms, mfu -100.00%": {"step": 0, "loss": 4.2659},
    '{"split": "dev", "loss": 2.0}': {},
    "30/40 [====>...] - ETA: 0s - loss: 2.5": {"loss": 2.5},
    "step 3 took 12ms loss 2.5": {"step": 3, "loss": 2.5},
    '{"split": "val", "loss": 2.0}': {},
    "step 3 val loss 2.4 loss 2.5": {"step": 3, "loss": 2.5},
    '{"step": 3, "loss": 2.5, "val_loss": 2.0}': {"step": 3, "loss": 2.5},
    "val_loss: 2.0": {},
    "val loss 2.0": {},
    "loss scale 65536, step 3": {},
    " iteration        5/      60 | lm loss: 1.05E+01 | mtp_1 loss: 1.1E+01 | grad norm: 1.234 |":
        {"step": 5, "loss": 10.5, "grad_norm": 1.234},
    "step 3: mtp_1 loss 9.5, lm loss 10.5, mtp_2 loss 9.75": {"step": 3, "loss": 10.5},
    "step 3 mtp_1 loss 9.5": {},
    "step 3 l2_loss 0.125 stage1/loss 0.25 loss 2.5": {"step": 3, "loss": 2.5},
    "gpu0 loss 2.5 step 3": {"step": 3, "loss": 2.5},
    "step 3 train loss 2.5 eval: loss 2.0": {"step": 3, "loss": 2.5},
    "step 3 loss 2.5 eval 0.1 grad_norm 0.25": {"step": 3, "loss": 2.5, "grad_norm": 0.25},
    "step 3 loss 2.5 train_loss 2.75": {"step": 3, "loss": 2.5},
    "step 3 train_loss 2.75 loss 2.5": {"step": 3, "loss": 2.5},
    "completed step: 3, loss: 10.5, lm_loss: 10.25, perplexity: 9": {"step": 3, "loss": 10.5},
    "step 3 loss 2.5 grad_norm 0.25 norm 300.0": {"step": 3, "loss": 2.5, "grad_norm": 0.25},
    "{'step': 3, 'loss': 2.5, 'norm': 300.0, 'grad_norm': 0.25}": {"step": 3, "loss": 2.5, "grad_norm": 0.25},
    "epoch 2 step 3 global_step 103 loss 2.5": {"step": 103, "loss": 2.5},
    '{"current_steps": 3, "total_steps": 9, "loss": 2.5}': {"step": 3, "loss": 2.5},
    "Finished step 3: loss 2.5.": {"step": 3, "loss": 2.5},
    "step 3 loss 0. version 1.2.3": {"step": 3, "loss": 0.0},
    "loss 2.5.1": {},
    "{'step': 3, 'loss': np.float32(2.5), 'grad_norm': inf}": {"step": 3, "loss": 2.5, "grad_norm": float("inf")},
    "step 3 loss Array(2.5, dtype=float32)": {"step": 3, "loss": 2.5},
    "\x1b[2K\x1b[1Gstep 3 loss 2.5\x1b[K": {"step": 3, "loss": 2.5},
    "\x1b[34m\x1b[1mwandb\x1b[0m: train/loss 2.5": {},
    "wandb:  train_loss 2.5": {},
    "[rank0]: step 0: train loss 4.2874, val loss 4.2823": {},
    "loading 12 files: 3 of 5": {},
    "{'eval_loss': 2.0}": {},
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_printed_line_says_step_loss_and_norm(line: str) -> None:
    assert columns_in_line(line) == pytest.approx(LINES[line], nan_ok=True)


@pytest.mark.parametrize(("first", "before"), [(0, False), (1, False), (0, True), (1001, False)])
def test_numbers_of_steps_count_from_whatever_the_program_begins_at(first: int, before: bool) -> None:
    """``before``: the program prints before its optimizer steps."""
    log = MetricLog()
    for step in range(5):
        log.say("printed", {"step": first + step, "loss": float(step)}, step if before else step + 1)
    values = [log.at("loss", step) for step in range(5)]
    assert [value and value.read() for value in values] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_tags_of_torchtitan_say_step_loss_and_norm() -> None:
    tags = {"loss_metrics/global_avg_loss": 2.5, "loss_metrics/global_max_loss": 9.0, "grad_norm": 0.5, "tflops": 1.0}
    assert columns_in({**tags, "time_metrics/end_to_end(s)": 0.1, "step": 3}) == {
        "step": 3,
        "loss": 2.5,
        "grad_norm": 0.5,
    }


def test_the_norm_of_parameters_is_no_gradient_norm_beside_one() -> None:
    assert columns_in({"norm": 300.0, "grad_norm": 0.5, "train_loss": 2.75, "loss": 2.5}) == {
        "loss": 2.5,
        "grad_norm": 0.5,
    }


def test_the_best_source_that_speaks_is_used() -> None:
    log = MetricLog()
    log.say("printed", {"loss": 2.3}, 1)
    assert log.source("loss") == "printed"
    log.say("its logger", {"loss": 2.3456789}, 1)
    value: Any = log.at("loss", 0)
    assert log.source("loss") == "its logger" and value.read() == 2.3456789


@pytest.mark.parametrize(("every", "first"), [(1, 0), (2, 0), (10, 0), (10, 9), (100, 20)])
def test_a_source_that_shows_some_steps_replaces_none_that_shows_each(every: int, first: int) -> None:
    log = MetricLog()
    for step in range(30):
        log.say("printed", {"step": step, "loss": float(step)}, ended=step + 1)
        if step % every == first:
            log.say("its logger", {"step": step, "loss": step + 0.5}, ended=step + 1)
        if step == 1:
            log.settle(2)
    log.settle(30)
    kept, logged = [found.read() for step in range(30) if (found := log.at("loss", step))], every == 1
    assert (log.source("loss"), kept) == ("its logger" if logged else "printed", [n + logged / 2 for n in range(30)])
    assert log.wants("loss", "its logger") == logged


@pytest.mark.parametrize("hidden", ["", "print('hidden')"])
def test_loading_imports_no_torch_and_runs_the_sitecustomize_that_it_hides(tmp_path: Path, hidden: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(hidden)
    code = "import sys; print(sorted({'torch', 'numpy', 'launch.observe.start'} & {*sys.modules}), 'analysis' in sys.modules)"
    places = f"{ROOT / 'launch' / 'observe' / 'path'}:{tmp_path}"
    variables = {"PYTHONPATH": places, "LAUNCH_OBSERVED_ATTEMPT": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout == ("hidden\n" if hidden else "") + "['launch.observe.start'] False\n"


def test_a_long_line_takes_no_time() -> None:
    begun = time.process_time()
    assert columns_in_line("a loss " + "x" * 10_000) == {}
    assert time.process_time() - begun < 0.2


def test_the_first_loss_of_a_step_counts_and_others_contradict_it() -> None:
    log = MetricLog()
    for loss in (2.5, 2.5, 2.0):
        log.say("printed", {"step": 1, "loss": loss}, ended=2)
    found = log.at("loss", 1)
    assert found is not None and found.read() == 2.5
    assert log.contradictions == {1: "a loss of 2.5 and one of 2 in step 1"}


def test_a_norm_hides_no_contradicting_losses_of_its_step() -> None:
    log = MetricLog()
    for loss in (2.5, 2.0):
        log.say("printed", {"loss": loss}, ended=0)
    log.add("grad_norm", "the program's own functions", 0, Known(0.5))
    assert log.contradictions == {0: "a loss of 2.5 and one of 2 in step 0"}
    log.say("its logger", {"loss": 2.5}, ended=1)
    assert not log.contradictions


def test_the_last_loss_before_an_optimizers_step_counts() -> None:
    """A bar drawn by hand shows its last loss again, or an epoch ends, before the step has its own loss."""
    log = MetricLog()
    for ended, loss in ((0, 2.5), (1, 2.5), (1, 2.0)):
        log.say("printed", {"loss": loss}, ended)
    found = log.at("loss", 1)
    assert found is not None and found.read() == 2.0
    assert log.contradictions == {1: "a loss of 2.5 and one of 2 in step 1"}


@pytest.mark.parametrize("first", [0, 1, 500])
@pytest.mark.parametrize("every", [1, 2, 10, 30])
def test_losses_of_many_steps_may_be_shown_at_once(first: int, every: int) -> None:
    log = MetricLog()
    for ended in range(every, 31, every):
        for step in range(ended - every, ended):
            log.say("printed", {"step": first + step, "loss": float(step)}, ended)
    assert [found.read() for step in range(30) if (found := log.at("loss", step))] == list(range(30))
    assert log.first_number == first


@pytest.mark.parametrize(
    ("ended", "steps"), [(0, [0, 1, 2, 3]), (1, [0, 1, 2, 3]), (2, [0, 1, 2, 3]), (9, [5, 6, 7, 8])]
)
def test_numbers_go_back_to_the_first_step_at_most(ended: int, steps: list[int]) -> None:
    """Numbers of micro-batches run ahead of the optimizer's steps, which ends the run."""
    log = MetricLog()
    for number in range(4):
        log.say("printed", {"step": number, "loss": float(number)}, ended)
    assert [step for step in range(20) if log.at("loss", step)] == steps
    assert log.furthest == steps[-1]


def test_numbers_of_steps_may_begin_anew() -> None:
    log = MetricLog()
    for step in range(30):
        log.say("printed", {"step": step % 10, "loss": float(step)}, ended=step + 1)
    assert [found.read() for step in range(30) if (found := log.at("loss", step))] == list(range(30))
