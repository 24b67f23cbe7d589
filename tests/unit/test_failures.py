"""From what was seen of an attempt to its outcome."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.failures import (
    EXCEPTION_CLASSES,
    FAILURE_CLASSES,
    EndedBy,
    Evidence,
    RankException,
    RankExit,
    classify,
    diagnose,
    without_spec,
)
from launch.record import OUTCOMES, PHASES, Phase

CLOSED = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:43721"


def ended(
    by: EndedBy = "itself",
    code: int = 1,
    phase: Phase = "measure",
    exceptions: tuple[RankException, ...] = (),
    exits: tuple[RankExit, ...] = (),
    oom_killed: bool = False,
) -> Evidence:
    return Evidence(by, code, {0: phase, 1: "warmup"}, exceptions, exits, oom_killed, limit_seconds=60)


def said(rank: int, time: float, type_name: str, message: str, phase: Phase = "measure") -> RankException:
    return RankException(rank, time, phase, type_name, message)


@pytest.mark.parametrize(
    ("type_name", "message", "name"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", "CUDA_OOM"),
        ("RuntimeError", "CUDA error: operation not permitted when stream is capturing", "STREAM_CAPTURE"),
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", "ILLEGAL_ACCESS"),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory", "HOST_OOM"),
        ("MemoryError", "", "HOST_OOM"),
        ("InductorError", "InvalidCxxCompiler: No working C++ compiler found in config.cpp.cxx", "COMPILER"),
        ("CppCompileError", "C++ compile error\nfatal error: Python.h: No such file or directory", "COMPILER"),
        ("ModuleNotFoundError", "No module named 'transformer_engine'", "IMPORT"),
        ("OSError", "libnccl.so.2: undefined symbol: ncclCommWindowRegister", "IMPORT"),
        ("OSError", "[Errno 28] No space left on device", "DISK_FULL"),
        ("SafetensorError", "Error while deserializing header: incomplete metadata, file not fully covered", "SAFETENSORS"),
        ("NumericError", "loss is nan at step 3 (phase measure)", "NUMERIC"),
        ("RuntimeError", CLOSED, "COMMUNICATION"),
    ],
)  # fmt: skip
def test_exceptions_by_class(type_name: str, message: str, name: str) -> None:
    row = classify(type_name, message)
    assert row is not None and row.name == name


def test_an_exception_of_no_class_is_its_own_and_fails_a_capture_in_its_phase() -> None:
    plain = diagnose(ended(exceptions=(said(1, 1.0, "IndexError", "out of range"),)))
    assert (plain.outcome, plain.failure_class, plain.rank) == ("FAILED", "IndexError", 1)
    capture = diagnose(ended(exceptions=(said(0, 1.0, "IndexError", "out of range", "capture"),)))
    assert (capture.outcome, capture.phase) == ("CAPTURE_FAILED", "capture")


def test_the_first_exception_in_time_is_the_cause() -> None:
    exceptions = (
        said(0, 5.0, "IndexError", "later"),
        said(3, 2.0, "KeyError", "first"),
        said(1, 1.0, "RuntimeError", CLOSED),
    )
    found = diagnose(ended(exceptions=exceptions))
    assert (found.rank, found.message) == (3, "KeyError: first")


def test_a_rank_that_a_signal_ended_comes_before_what_others_said_of_it() -> None:
    found = diagnose(
        ended(exceptions=(said(0, 1.0, "RuntimeError", CLOSED),), exits=(RankExit(0, 1), RankExit(1, -signal.SIGKILL)))
    )
    assert (found.outcome, found.rank, found.failure_class, found.phase) == ("FAILED", 1, "SIGKILL", "warmup")


def test_an_exception_comes_before_the_signal_that_followed_it() -> None:
    found = diagnose(ended(exceptions=(said(0, 1.0, "KeyError", "x"),), exits=(RankExit(1, -signal.SIGABRT),)))
    assert (found.rank, found.failure_class) == (0, "KeyError")


def test_a_consequence_is_told_where_nothing_else_is_known() -> None:
    found = diagnose(ended(exceptions=(said(0, 1.0, "RuntimeError", CLOSED),), exits=(RankExit(0, 1),)))
    assert (found.failure_class, found.rank) == ("COMMUNICATION", 0)


@pytest.mark.parametrize(
    ("by", "outcome"), [("cancel", "CANCELLED"), ("deadline", "TIMEOUT"), ("hang", "HANG"), ("itself", "FAILED")]
)
def test_who_ended_it(by: EndedBy, outcome: str) -> None:
    assert diagnose(ended(by)).outcome == outcome


def test_an_exception_before_a_hang_is_its_cause() -> None:
    """A rank that fails and cannot leave, because its peers wait for it."""
    found = diagnose(ended("hang", exceptions=(said(1, 1.0, "OutOfMemoryError", "CUDA out of memory"),)))
    assert (found.outcome, found.rank) == ("CUDA_OOM", 1)


def test_a_cancelled_run_is_cancelled_whatever_its_ranks_said() -> None:
    assert diagnose(ended("cancel", exceptions=(said(0, 1.0, "KeyError", "x"),))).outcome == "CANCELLED"


@pytest.mark.parametrize(
    ("by", "code", "exceptions", "outcome", "name"),
    [
        ("itself", 0, (), "COMPLETED", ""),
        ("cancel", -15, (), "COMPLETED", ""),
        ("hang", -9, (), "TEARDOWN_HANG", "TEARDOWN_HANG"),
        ("deadline", -9, (), "TEARDOWN_HANG", "TEARDOWN_HANG"),
        ("itself", 1, (), "FAILED", "TEARDOWN_CRASH"),
        ("itself", 1, (said(1, 1.0, "RuntimeError", "in close()", "teardown"),), "FAILED", "TEARDOWN_CRASH"),
    ],
)
def test_after_the_last_result(
    by: EndedBy, code: int, exceptions: tuple[RankException, ...], outcome: str, name: str
) -> None:
    found = diagnose(ended(by, code, "teardown", exceptions))
    assert (found.outcome, found.failure_class, found.phase) == (outcome, name, "teardown")
    assert all(exception.message in found.message for exception in exceptions)


def test_the_kernel_is_blamed_only_for_what_it_kills() -> None:
    killed = diagnose(ended(exits=(RankExit(0, -signal.SIGKILL),), oom_killed=True))
    assert (killed.outcome, killed.failure_class) == ("HOST_OOM", "KERNEL_OOM")
    faulted = diagnose(ended(exits=(RankExit(0, -signal.SIGSEGV),), oom_killed=True))
    assert (faulted.outcome, faulted.failure_class) == ("FAILED", "SIGSEGV")


def test_a_rank_that_left_without_a_word_comes_before_those_that_were_ended_for_it() -> None:
    ended_for_it = tuple(RankExit(rank, -signal.SIGTERM) for rank in range(3))
    found = diagnose(ended(exits=(*ended_for_it, RankExit(3, 3))))
    assert (found.rank, found.failure_class) == (3, "EXIT")
    # Who was ended by SIGTERM itself comes before those that say that it had gone.
    gone = (said(1, 1.0, "RuntimeError", CLOSED),)
    found = diagnose(ended(exceptions=gone, exits=(RankExit(1, 1), RankExit(0, -signal.SIGTERM))))
    assert (found.rank, found.failure_class) == (0, "SIGTERM")


@pytest.mark.parametrize(
    ("code", "name", "word"),
    [(-4, "SIGILL", "SIGILL"), (-7, "SIGBUS", "SIGBUS"), (-40, "signal 40", "signal 40"), (3, "EXIT", "exit code 3")],
)
def test_exits_without_a_word(code: int, name: str, word: str) -> None:
    found = diagnose(ended(code=1, exits=(RankExit(0, code),)))
    assert (found.outcome, found.failure_class) == ("FAILED", name)
    assert word in found.message and found.remedy


def test_a_bus_error_points_at_the_files_that_are_mapped() -> None:
    found = diagnose(ended(exits=(RankExit(2, -signal.SIGBUS),)))
    assert (found.failure_class, found.rank) == ("SIGBUS", 2)
    assert "data.path" in found.remedy and "model.weights" in found.remedy


def test_a_launcher_that_was_killed_names_no_rank() -> None:
    found = diagnose(ended(code=-9))
    assert (found.failure_class, found.rank) == ("SIGKILL", None)


def test_a_spec_that_cannot_be_read() -> None:
    found = without_spec(KeyError("model"))
    assert (found.outcome, found.failure_class) == ("CONFIG", "SPEC") and "model" in found.message


phases = st.sampled_from(PHASES)
exceptions = st.builds(
    RankException, st.integers(0, 7), st.floats(0, 1e9), phases,
    st.sampled_from(["RuntimeError", "NumericError", "KeyError"]), st.sampled_from(["x", CLOSED, "CUDA out of memory"]),
)  # fmt: skip
evidence = st.builds(
    Evidence,
    ended_by=st.sampled_from(["itself", "cancel", "deadline", "hang"]),
    exit_code=st.integers(-64, 255),
    phases=st.dictionaries(st.integers(0, 7), phases),
    exceptions=st.lists(exceptions, max_size=4).map(tuple),
    exits=st.lists(st.builds(RankExit, st.integers(0, 7), st.integers(-64, 255)), max_size=4).map(tuple),
    oom_killed=st.booleans(),
    limit_seconds=st.floats(1, 1e5),
)


@given(evidence)
def test_whatever_is_seen_there_is_an_outcome_and_a_way_out(seen: Evidence) -> None:
    found = diagnose(seen)
    assert found.outcome in OUTCOMES
    assert (found.outcome == "COMPLETED") == (found.failure_class == found.remedy == "")
    if found.outcome == "COMPLETED":
        assert seen.phase == "teardown" and (seen.ended_by == "cancel" or seen.exit_code == 0)


@given(evidence, st.randoms())
def test_the_order_in_which_ranks_are_read_does_not_matter(seen: Evidence, random: Random) -> None:
    by_moment = {(exception.time, exception.rank): exception for exception in seen.exceptions}
    once = dataclasses.replace(seen, exceptions=tuple(by_moment.values()))
    again = dataclasses.replace(seen, exceptions=tuple(random.sample(once.exceptions, len(once.exceptions))))
    assert diagnose(once) == diagnose(again)


# --- docs/failures.md -----------------------------------------------------------------------------------------------

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "failures.md").read_text()


def test_the_documented_classes_are_the_classes() -> None:
    table = DOCS.split("## Classes")[1].split("##")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    expected = [
        f"| `{row.name}` | {row.outcome} | {'exception' if row in EXCEPTION_CLASSES else 'ending'} | {row.remedy} |"
        for row in FAILURE_CLASSES
    ]
    assert rows == expected


def test_every_outcome_is_documented_once() -> None:
    table = DOCS.split("## Outcomes")[1].split("A recipe may expect")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[4:] if line] == list(OUTCOMES)
