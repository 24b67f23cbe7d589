"""Test what a rank records about an exception."""

from __future__ import annotations

import pytest

from launch.train.telemetry.event_log import broken_by

INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


class Graph:
    """Behave as torch.cuda.graph does when it leaves a capture."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self.capture_end(exception[0] is not None)

    def capture_end(self, failed: bool) -> None:
        if failed:
            raise RuntimeError(INVALIDATED)


def test_a_capture_that_cannot_be_ended_is_told_by_what_broke_it() -> None:
    with pytest.raises(RuntimeError, match="previous error") as caught, Graph():
        raise ValueError("operation not permitted when stream is capturing")
    assert isinstance(broken_by(caught.value), ValueError)


def test_an_error_raised_while_another_was_dealt_with_speaks_for_itself() -> None:
    def fall_back() -> None:
        try:
            raise ImportError("no flash attention here")
        except ImportError:
            raise RuntimeError(INVALIDATED)  # noqa: B904

    with pytest.raises(RuntimeError) as caught:
        fall_back()
    assert broken_by(caught.value) is caught.value


def test_an_error_without_a_trace_is_its_own() -> None:
    assert str(broken_by(KeyError("x"))) == "'x'"
