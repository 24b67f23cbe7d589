"""Test how long a backlog pauses between tries, and what it tells."""

from __future__ import annotations

import itertools

from orchestrator.workflow.room_wait import FIRST_SECONDS, MOST_SECONDS, RoomWait


def test_tries_in_vain_become_rare_and_each_doubling_of_the_wait_is_told() -> None:
    now = 100.0
    wait, told, tries = RoomWait(lambda: now), list[float](), 0
    while now < 100.0 + 24 * 3600:
        assert not wait.is_due()
        now += wait.pause
        assert wait.is_due()
        tries += 1
        told += [seconds for seconds in [wait.go_on()] if seconds is not None]
        assert wait.pause <= MOST_SECONDS
    assert tries < 24 * 3600 / MOST_SECONDS + 5
    assert 8 <= len(told) <= 12 and all(later >= 2 * earlier for earlier, later in itertools.pairwise(told))
    wait.try_soon()
    assert wait.pause == FIRST_SECONDS and wait.go_on() is None, "the wait goes on although a job has ended"
    wait.begin()
    now += FIRST_SECONDS
    assert wait.is_due() and wait.go_on() is None
