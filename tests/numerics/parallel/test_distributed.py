"""Test the workers of distributed tests: results come back, and a failing rank leaves nobody waiting."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, workers


def add_up(addend: torch.Tensor) -> dict[str, Any]:
    total = addend * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return {"total": total, "pid": os.getpid(), "world_size": dist.get_world_size()}


def fail(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("not today")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    dist.barrier()


def test_results_come_back_by_rank_from_the_same_processes() -> None:
    first, second = (workers(size).run(add_up, torch.ones(2)) for size in (3, 2))
    assert [result["total"].tolist() for result in first] == [[6.0, 6.0]] * 3
    assert [result["total"].tolist() for result in second] == [[3.0, 3.0]] * 2
    assert [result["pid"] for result in second] == [result["pid"] for result in first][:2]
    assert [result["world_size"] for result in second] == [2, 2]


@pytest.mark.parametrize(
    ("how", "seconds", "said"),
    [
        ("raise", 300, r"(?s)rank 1 of 2: Traceback.*ValueError: not today"),
        ("die", 300, r"rank 1 of 2: its process ended with -9"),
        ("hang", 10, r"no answer from ranks \[1\] \(a call has 10 s\)"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_next_call_is_whole(how: str, seconds: float, said: str) -> None:
    # Start the processes first, so that the call's time limit does not include their start.
    workers(2).run(add_up, torch.ones(()))
    begun = time.monotonic()
    with pytest.raises(RankError, match=said):
        workers(2).run(fail, 1, how, seconds=seconds)
    assert time.monotonic() - begun < 120
    assert [result["total"].item() for result in workers(2).run(add_up, torch.ones(()))] == [3.0, 3.0]
