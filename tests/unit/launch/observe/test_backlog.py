"""No way to end a program loses readings that wait, except that a killed one loses its last second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.contract.errors import ProgramError
from launch.observe.steps import backlog
from launch.observe.steps.backlog import Backlog
from launch.observe.steps.own_time import OwnTime
from tests.unit.launch.observe.observed import PROGRAM, Observed, observe, spec_of
from tests.unit.launch.observe.test_observer import BY_HAND, CLOSURE, EARLY, NESTED, SAYS, TRIES, TWO

LONG = 60
NORM = "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()"
HEAD = "import launch.observe.steps.backlog as backlog\nbacklog.SECONDS, backlog.MOST = {seconds}, {most}\n"
SHOW = '    print({"step": number, "loss": loss.item()})'
EVENTS = ("enter", "phase", "choices", "proof", "gradients", "parameters", "probe", "exception")
PROGRAMS = {"says": SAYS, "two": TWO, "nested": NESTED, "closure": CLOSURE, "early": EARLY, "tries": TRIES}
ENDS = {
    "completes": "",
    "skips its exit hooks": "if number == 59: print({'step': number, 'loss': loss.item()}); os._exit(0)",
    "returns": "if number == 40: break",
    "exits": "if number == 40: sys.exit(3)",
    "raises": "assert number < 40, 'broken'",
    "ends by a signal that it handles": "if number == 40: os.kill(os.getpid(), signal.SIGTERM)",
    "is interrupted": "if number == 40: raise KeyboardInterrupt",
    "has a NaN": "loss = loss * float('nan') if number == 36 else loss",
    "has a NaN and raises": "loss = loss * float('nan') if number == 36 else loss\n    assert number < 40",
    "contradicts itself": "if number > 30: print({'step': number, 'loss': 7.0})",
}


def program(end: str, *, seconds: float = 1000.0, most: int = 256) -> str:
    """Return a program of some steps that then runs ``end``. Its readings wait for ``seconds``, or until there are ``most``."""
    handles = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n" + PROGRAM
    text = handles.replace("STEPS", str(LONG)).replace("    optimizer.step()", NORM)
    return HEAD.format(seconds=seconds, most=most) + text.replace(SHOW, f"    {end or 'pass'}\n{SHOW}")


def records(seen: Observed) -> str:
    """Return the records but for times, memory and digests, as text, because NaN is not equal to itself."""
    steps = [(one.step, one.loss, one.grad_norm, one.phase) for one in seen.steps]
    events = [
        (one["kind"], one["phase"], one["step"], one.get("message")) for kind in EVENTS for one in seen.events(kind)
    ]
    return repr((steps, events, seen.diagnosis))


@pytest.mark.parametrize("name", ENDS)
def test_readings_that_wait_make_the_same_records_as_those_that_do_not(tmp_path: Path, name: str) -> None:
    at_once = observe(tmp_path / "a", program(ENDS[name], most=1), spec_of(steps=LONG))
    waited = observe(tmp_path / "b", program(ENDS[name]), spec_of(steps=LONG))
    assert records(waited) == records(at_once)
    assert len(waited.steps) > 30 and (waited.diagnosis.outcome == "COMPLETED") == (len(waited.steps) == LONG)


@pytest.mark.parametrize("name", [*PROGRAMS, "graphs", "graphs at once"])
def test_what_waits_belongs_to_its_step_whatever_shows_it(tmp_path: Path, name: str) -> None:
    text, spec = PROGRAMS.get(name, BY_HAND).replace("EAGER", "(40,)"), spec_of(steps=LONG)
    if name not in PROGRAMS:
        spec = spec_of(graphed=True, steps=LONG - 3, device="cuda")
    if name == "graphs at once":
        text = text.replace("import torch\n", "import torch\ntorch.cuda.Event.seconds = 0.0\n", 1)
    at_once, waited = (
        observe(tmp_path / str(most), HEAD.format(seconds=1000.0, most=most) + text.replace("STEPS", str(LONG)), spec)
        for most in (1, 256)
    )
    assert records(waited) == records(at_once)
    assert waited.diagnosis.outcome == "COMPLETED" and len(waited.steps) == spec.training.steps


def test_an_error_is_recorded_although_cuda_answers_no_more(tmp_path: Path) -> None:
    fails = """    if number == 40:
        def refuse(*_): raise RuntimeError("CUDA error: an illegal memory access was encountered")
        torch.cuda.Event.query = torch.cuda.Event.synchronize = refuse
        raise RuntimeError("CUDA error: unspecified launch failure")
"""
    text = (
        BY_HAND.replace("EAGER", "()")
        .replace("STEPS", str(LONG))
        .replace("    loss = compute", fails + "    loss = compute")
    )
    spec = spec_of(graphed=True, steps=LONG - 3, device="cuda")
    seen = observe(tmp_path, HEAD.format(seconds=1000.0, most=256) + text, spec)
    assert "unspecified launch failure" in seen.diagnosis.message, seen.diagnosis


@pytest.mark.parametrize("number", [9, 15])
@pytest.mark.parametrize("seconds", [0.0, 0.3, 1000.0])
def test_a_killed_program_loses_only_what_waits(tmp_path: Path, number: int, seconds: float) -> None:
    """The supervisor and Slurm send SIGTERM, then SIGKILL."""
    ends = f"times.append(time.time())\n    if number == 49: open({str(tmp_path / 'times')!r}, 'w').write(str([*times, begun]))"
    dies = f"signal.signal(15, signal.SIG_DFL) if number == 49 else time.sleep(0.01)\n    if number == 49: os.kill(os.getpid(), {number})"
    text = program(f"{ends}\n    {dies}", seconds=seconds).replace("import os, ", "times = []\nimport os, ")
    text = text.replace(NORM, f"    begun = time.time()\n{NORM}")
    seen = observe(tmp_path, text, spec_of(steps=LONG))
    written = [one.step for one in seen.steps]
    assert written == list(range(len(written))) and "SIG" in seen.diagnosis.message
    times = json.loads((tmp_path / "times").read_text())
    old = sum(time < times[-1] - seconds for time in times)
    # Three steps always wait: for a better source of their numbers, and for the next optimizer.
    assert len(written) >= old - 3
    if seconds == 1000.0:
        # The middle step takes digests, and writes what waits, except two steps that may still get a better source.
        assert len(written) == LONG // 2 - 2, "timed steps write nothing"


def test_what_waits_is_due_by_its_number_and_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(backlog, "perf_counter", lambda: now)
    waits, made = Backlog(), list[int]()
    assert waits.add(now, made.append, 0)
    waits.process(lambda: made.append(-1))
    assert made == [0, -1]
    waits.may_wait = True
    monkeypatch.setattr(backlog, "MOST", 3)
    assert not waits.add(now, made.append, 1)
    now += backlog.SECONDS
    assert waits.add(now, made.append, 2), "a reading that waits for a second is due, and so is each one of a long step"
    waits.process(lambda: None)
    assert [waits.add(now, made.append, number) for number in (3, 4, 5)] == [False, False, True]
    assert made == [0, -1, 1, 2]


def test_calls_that_calls_add_are_made_after_them() -> None:
    waits, made = Backlog(), list[str]()

    def first() -> None:
        waits.add(0.0, made.append, "third")
        waits.process(lambda: made.append("never"))
        made.append("first")

    waits.add(0.0, first)
    waits.add(0.0, made.append, "second")
    waits.process(lambda: made.append("last"))
    assert made == ["first", "second", "third", "last"]


@pytest.mark.parametrize(
    ("error", "left"), [(ProgramError("ours"), [1, 2]), (KeyboardInterrupt(), []), (OSError(), [])]
)
def test_nothing_is_taken_for_another_step_after_an_interrupted_call(error: BaseException, left: list[int]) -> None:
    waits, made = Backlog(), list[int]()

    def fail() -> None:
        raise error

    waits.add(0.0, fail)
    waits.add(0.0, made.append, 1)
    with pytest.raises(type(error)):
        waits.process(lambda: None)
    waits.add(0.0, made.append, 2)
    waits.process(lambda: None)
    assert made == left


def test_the_own_time_of_timed_steps_is_told() -> None:
    own = OwnTime()
    assert own.describe() == ""
    hooks = 0.0
    for step in range(5):
        hooks += 1.0 if step < 2 else 10e-6 * step
        own.end_step(hooks, timed=step >= 2)
    assert own.describe() == "the observer took 30 us (median; mean 30 us) per step"
    own.end_norm(5e-6, timed=True)
    assert own.describe().endswith(
        "per step, and 5 us (median; mean 5 us) for a gradient norm, which the program does not show"
    )
