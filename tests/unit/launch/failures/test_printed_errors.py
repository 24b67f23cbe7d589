"""Test which error of a log ended the program. The logs are shaped like those of torchrun, Python and PyTorch's loggers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.failures.printed_errors import LastWords, last_words

FOOTER = """\
W1124 20:01:02.000000 42 torch/distributed/elastic/multiprocessing/api.py:908] Sending process 43 closing signal SIGTERM
E1124 20:01:03.000000 42 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 3 (pid: 46)
Traceback (most recent call last):
  File "/usr/local/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
pretrain_gpt.py FAILED
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 46)
  traceback : {why}
"""
PLAIN = FOOTER.format(code=1, why="To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html")
ADVICE = """\
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
REMOTE = """\
torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketPollConnect: connect returned Connection refused, exceeded error retry count
"""
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.54 GiB. GPU 3 has a total capacity of 79.11 GiB."
RECORD = "torch/distributed/elastic/multiprocessing/errors/__init__.py"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


def trace(error: str, function: str = "train", code: str = "step()", file: str = "train.py") -> str:
    frames = f'  File "{RECORD}", line 357, in wrapper\n    return f(*args, **kwargs)\n           ^^^^^^^^^^^^^^^^^^\n'
    return f'Traceback (most recent call last):\n{frames}  File "{file}", line 7, in {function}\n    {code}\n{error.strip()}\n'


def of_rank(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def name_of(log: str) -> str:
    row = last_words(log).row("init")
    return row.name if row else ""


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_rank_that_failed_by_itself_is_the_cause_wherever_it_stands_among_those_that_it_left(before: int) -> None:
    others = [of_rank(rank, trace(REMOTE)) for rank in (0, 1)]
    log = "".join([*others[:before], of_rank(3, trace(OOM)), *others[before:], PLAIN])
    assert (name_of(log), last_words(log).rank) == ("CUDA_OOM", 3)
    assert last_words(log).text == OOM
    assert name_of("".join(others) + PLAIN) == "COMMUNICATOR_SETUP"


def test_lines_of_ranks_may_alternate() -> None:
    first, second = of_rank(0, trace(REMOTE)).splitlines(), of_rank(3, trace(OOM)).splitlines()
    lines = [line for pair in zip(first, second, strict=False) for line in pair]
    assert name_of("\n".join([*lines, *first[len(second) :], *second[len(first) :]])) == "CUDA_OOM"


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize(
    ("cause", "name"),
    [
        ("operation not permitted when stream is capturing", "SYNC_IN_CAPTURE"),
        ("dependency created on uncaptured work in another stream", "ISOLATION"),
    ],
)
def test_the_error_that_broke_a_capture_comes_before_the_one_that_ends_it(cause: str, name: str, prefix: bool) -> None:
    first = trace(f"RuntimeError: CUDA error: {cause}\n{ADVICE}", "item", "loss.item()")
    for code, function in (
        ("operation failed due to a previous error during capture", "capture_end"),
        ("operation failed due to a previous error during capture", "__exit__"),
        ("capturing stream has unjoined work", "capture_end"),
    ):
        log = first + DURING + trace(f"RuntimeError: CUDA error: {code}\n{ADVICE}", function)
        assert name_of(of_rank(0, log) if prefix else log) == name


def test_an_error_that_wraps_another_one_is_the_last_of_its_chain() -> None:
    wrapped = trace("KeyError: 'x'") + DURING + trace("ValueError: CUDA graphs not supported with CPU offloading.")
    assert name_of(wrapped) == "GRAPH_OFFLOAD"


def test_what_python_ignores_at_its_end_is_no_cause() -> None:
    log = trace("AssertionError: RNG tracker does not support cudagraphs!")
    log += "Exception ignored in: <function Pool.__del__ at 0x7f>\n" + trace("ImportError: sys.meta_path is None")
    assert name_of(log) == "GRAPH_RNG"


def steps(count: int, line: str = "step {0}: loss=2.5{0}") -> str:
    return "".join(line.format(step) + "\n" for step in range(count))


def test_an_error_after_which_the_program_trains_on_did_not_end_it() -> None:
    """Some programs print an error that they handle, such as an evaluation without memory, and train on."""
    handled = steps(9) + trace(OOM) + "evaluation batch halved\n"
    assert last_words(handled + steps(50) + "ran into the time limit\n") == LastWords(message="ran into the time limit")
    assert name_of(handled + steps(50) + trace("ModuleNotFoundError: No module named 'mine'")) == "IMPORT"
    assert name_of(handled + steps(50, "[rank0]: step {0}: loss=2.5{0}")) == "CUDA_OOM"
    # A log of torchrun has the last lines of ranks that wait for the failed one.
    assert name_of(handled + steps(2)) == "CUDA_OOM"
    # Neither evaluations nor what W&B prints at the end of a run are steps.
    assert name_of(handled + steps(9, "eval loss=2.5{0}") + steps(9, "wandb: loss 2.5{0}")) == "CUDA_OOM"


def test_an_error_before_ranks_were_set_up_counts_where_no_rank_names_a_cause() -> None:
    alone = trace("ModuleNotFoundError: No module named 'mine'")
    assert name_of(alone + of_rank(0, trace(REMOTE)) + PLAIN) == "IMPORT"
    assert name_of(alone + of_rank(0, trace(OOM)) + PLAIN) == "CUDA_OOM"


def test_a_signal_that_torchrun_names_comes_before_what_others_said_of_that_rank() -> None:
    killed = FOOTER.format(code=-11, why="Signal 11 (SIGSEGV) received by PID 46")
    assert last_words(of_rank(0, trace(REMOTE)) + killed).kind == "SIGSEGV"
    assert last_words(of_rank(0, trace(OOM)) + killed).row("init") is not None
    ended = FOOTER.format(code=-15, why="Signal 15 (SIGTERM) received by PID 46")
    assert last_words(of_rank(0, trace(REMOTE)) + ended).kind != "SIGTERM"


WATCHDOG = (
    "[rank0]:[E1124 20:00:00.1 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread "
    "terminated with exception: {0}\n"
    + ADVICE
    + "Exception raised from c10_cuda_check_implementation at CUDAException.cpp:44\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0 Rank 0] Process group watchdog thread terminated with exception: {0}\nFatal Python error: Aborted\n"
)


def test_the_watchdogs_words_name_the_error_that_python_never_saw() -> None:
    assert name_of(WATCHDOG.format("CUDA error: an illegal memory access was encountered")) == "ILLEGAL_ACCESS"
    timeout = WATCHDOG.format("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42)")
    assert name_of(timeout) == "COMMUNICATION"
    assert name_of(timeout + of_rank(3, trace(OOM))) == "CUDA_OOM"
    logged = "[rank3]:[W1124 20:00:00 ProcessGroupNCCL.cpp:1479] Warning: destroy_process_group() was not called\n"
    assert last_words(of_rank(3, trace("ValueError: no such file")) + logged).message == "ValueError: no such file"[12:]


def test_a_bare_assertion_is_told_by_its_code() -> None:
    log = trace("AssertionError", "__init__", "assert not self.is_moe_layer")
    assert (last_words(log).text, name_of(log)) == ("AssertionError: assert not self.is_moe_layer", "GRAPH_SETTINGS")


def test_the_whole_message_of_a_rank_decides_its_class() -> None:
    nccl = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
    assert name_of(of_rank(1, trace(nccl)) + of_rank(0, trace("RuntimeError: x"))) == "CUDA_OOM"


def test_colours_hide_no_error() -> None:
    """Python 3.13 and rich colour tracebacks, if FORCE_COLOR is set or a terminal reads them."""
    coloured = trace(OOM).replace("torch.OutOfMemoryError", "\x1b[1;35mtorch.OutOfMemoryError\x1b[0m")
    assert last_words(coloured + "done\n") == last_words(trace(OOM) + "done\n")


def test_torchrun_tees_each_process_with_its_own_prefix() -> None:
    def teed(number: int, text: str) -> str:
        return "".join(f"[default{number}]:{line}\n" for line in text.splitlines())

    log = teed(0, trace(REMOTE)) + teed(1, trace(OOM)) + PLAIN
    assert (last_words(log).text, last_words(log).rank) == (OOM, None)
    handled = teed(0, trace("OSError: no space for a cache"))
    log = handled + teed(0, of_rank(4, trace(REMOTE))) + teed(1, of_rank(5, trace(OOM))) + PLAIN
    assert (last_words(log).text, last_words(log).rank) == (OOM, 5)


@given(
    st.text(max_size=300),
    st.lists(st.sampled_from([trace(OOM), of_rank(0, trace(REMOTE)), DURING, PLAIN, "\n"]), max_size=6),
)
def test_any_log_has_last_words(start: str, rest: list[str]) -> None:
    found = last_words(start + "".join(rest))
    assert isinstance(found, LastWords) and len(found.text) <= 300
