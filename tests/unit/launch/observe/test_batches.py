"""Test which batches of data loaders are compared, without a program."""

from __future__ import annotations

from collections import UserDict
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from launch.observe.description.batches import Batches


class Loader:
    """Gives batches to ``batches`` as an iterator of a data loader does."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self._sampler = batches, SimpleNamespace()

    def give(self, number: float) -> None:
        self._batches.take({"x": torch.full((8, 4), number)}, SimpleNamespace(_index_sampler=self._sampler))


def digests(*steps: tuple[float, ...]) -> str:
    """Return the text of steps that each got these batches of one loader."""
    batches = Batches()
    loader = Loader(batches)
    for step in steps:
        for number in step:
            loader.give(number)
        batches.end_step()
    return batches.describe().get("batches", "")


def test_the_last_batch_of_each_of_the_first_steps_counts() -> None:
    assert digests((1,), (2,)) == digests((9, 1), (2,), (3,)) != digests((2,), (3,))
    assert digests((1,), ()).split() == [digests((1,)), "none"]


def test_the_batches_of_an_evaluation_do_not_count() -> None:
    batches = Batches()
    training, evaluation = Loader(batches), Loader(batches)
    for step in range(3):
        training.give(step)
        if step == 0:
            evaluation.give(8)
            evaluation.give(9)
        batches.end_step()
    assert batches.describe()["batches"] == digests((0,), (1,))


def test_steps_before_the_first_announced_one_do_not_count() -> None:
    """A graphed program may take steps to warm up. Another one fetches the first announced step's batch before it announces it."""
    batches = Batches()
    loader = Loader(batches)
    for number in (8, 8, 8, 8):
        loader.give(number)
        batches.end_step()
    loader.give(1)
    for number in (2, 3):
        if number == 2:
            batches.announce()
        batches.end_step()
        loader.give(number)
    assert batches.describe()["batches"] == digests((1,), (2,))


@pytest.mark.parametrize("missed", [True, False])
def test_a_step_may_be_announced_after_its_optimizer_has_stepped(missed: bool) -> None:
    """Steps to warm up may be many enough to be timed, so that nobody took its batch."""
    batches = Batches()
    Loader(batches).give(1)
    batches.end_step()
    batches.missed = missed
    batches.announce()
    batches.end_step()
    assert batches.describe().get("batches") == (None if missed else digests((1,)))


def test_a_thread_that_fetches_batches_at_any_time_is_no_evidence() -> None:
    batches = Batches()
    loader = Loader(batches)
    for step in range(3):
        fetch = Thread(target=loader.give, args=(step,))
        fetch.start()
        fetch.join()
        batches.end_step()
    assert batches.describe() == {}


@pytest.mark.parametrize(
    ("batch", "known"),
    [
        (torch.ones(4), True),
        (torch.ones(0), True),
        (torch.tensor(True), True),
        (torch.ones(5000, 30).t(), True),
        ([torch.ones(4), {"a": (torch.ones(2),)}], True),
        (UserDict({"a": torch.ones(2)}), True),
        (torch.ones(4, dtype=torch.complex128), True),
        (torch.ones(4, device="meta"), False),
        (torch.ones(4).to_sparse(), False),
        (["/tmp/file", 3, None], False),
    ],
)
def test_only_tensors_in_the_hosts_memory_are_compared(batch: object, known: bool) -> None:
    batches = Batches()
    batches.take(batch, SimpleNamespace(_index_sampler=SimpleNamespace()))
    batches.end_step()
    assert ("batches" in batches.describe()) is known
