"""Test the way from the evidence of an attempt to its outcome."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.contract.outcomes import OUTCOMES
from launch.contract.records.events import PHASES, Phase
from launch.failures.classes import CLASS_OF_JOB_STATE, FAILURE_CLASSES, FailureClass, classify
from launch.failures.diagnose import (
    EndedBy,
    Evidence,
    RankException,
    RankExit,
    diagnose,
    diagnose_as,
    diagnose_job_end,
    is_explained,
    without_spec,
)
from launch.failures.evidence import read_last_words
from launch.failures.job_outcome import make_outcome
from launch.failures.printed_errors import LastWords
from launch.slurm.job_states import ENDED, stage_of

CLOSED = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:43721"


def ended(
    by: EndedBy = "itself",
    code: int = 1,
    phase: Phase = "measure",
    exceptions: tuple[RankException, ...] = (),
    exits: tuple[RankExit, ...] = (),
    job_state: str = "",
) -> Evidence:
    return Evidence(by, code, {0: phase, 1: "warmup"}, exceptions, exits, limit_seconds=60, job_state=job_state)


def said(rank: int, time: float, type_name: str, message: str, phase: Phase = "measure") -> RankException:
    return RankException(rank, time, phase, type_name, message)


@pytest.mark.parametrize(
    ("type_name", "message", "name"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", "CUDA_OOM"),
        ("OutOfMemoryError", "in the check of step 4, where other ranks wait: CUDA out of memory. Tried to allocate 2.00 GiB.", "OOM_STEP_CHECK"),
        ("RuntimeError", "CUDA error: out of memory", "CUDA_OOM"),
        ("DistBackendError", "NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'", "CUDA_OOM"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA_OOM"),
        ("RuntimeError", "Triton Error [CUDA]: out of memory", "CUDA_OOM"),
        ("RuntimeError", "CUDA driver error: out of memory", "CUDA_OOM"),
        ("RuntimeError", "fused_attn_f16_arbitrary_seqlen.cu:123 in function fused_attn: CUDA Error: out of memory", "CUDA_OOM"),
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", "ILLEGAL_ACCESS"),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory", "HOST_OOM"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "CUDA_OOM"),
        ("RuntimeError", "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`", "CUDA_OOM"),
        ("MemoryError", "", "HOST_OOM"),
        ("_ArrayMemoryError", "Unable to allocate 8.00 PiB for an array with shape (1125899906842624,)", "HOST_OOM"),
        ("OSError", "[Errno 12] Cannot allocate memory", "HOST_OOM"),
        ("RuntimeError", "unable to mmap 8192 bytes from file </torch_4_2>: Cannot allocate memory (12)", "HOST_OOM"),
        ("RuntimeError", "DataLoader worker (pid 42) is killed by signal: Killed. ", "HOST_OOM"),
        ("RuntimeError", "DataLoader worker (pid 42) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.", "HOST_OOM"),
        ("AcceleratorError", "CUDA error: uncorrectable NVLink error detected during the execution", "GPU_FAULT"),
        ("RuntimeError", "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "GPU_FAULT"),
        ("AcceleratorError", "CUDA error: no kernel image is available for execution on the device", "NO_GPU"),
        ("RuntimeError", "Error 803: system has unsupported display driver / cuda driver combination", "NO_GPU"),
        ("CaptureError", "cuda_graph.impl='torch_compile' could not compile the model: InductorError: ImportError: /tmp/torchinductor_root/wb/cwb3.main.so: file too short", "COMPILE_CACHE"),
        ("OSError", "/tmp/torchinductor_root/wb/cwb3.main.so: invalid ELF header", "COMPILE_CACHE"),
        ("CompileError", "training.compile='whole' could not compile the model: BackendCompilerFailed: backend='inductor' raised: ImportError: /cache/ih/cihdf5.main.so: cannot read file data", "COMPILE_CACHE"),
        ("ImportError", f"/home/someone/.triton/cache/{'Q7' * 26}/cuda_utils.cpython-312-x86_64-linux-gnu.so: file too short", "COMPILE_CACHE"),
        ("ImportError", "/venv/lib/python3.12/site-packages/torch/lib/libtorch_cuda.so: file too short", "IMPORT"),
        ("OSError", "/usr/lib/x86_64-linux-gnu/libc.so: invalid ELF header", "IMPORT"),
        ("InductorError", "InvalidCxxCompiler: No working C++ compiler found in config.cpp.cxx", "COMPILER"),
        ("CppCompileError", "C++ compile error\nfatal error: Python.h: No such file or directory", "COMPILER"),
        ("InductorError", "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.", "COMPILER"),
        ("CompileError", "training.compile='whole' could not compile the model: InductorError: InvalidCxxCompiler: No working C++ compiler found", "COMPILER"),
        ("CompileError", "training.compile='whole' could not compile the model: Unsupported: Data-dependent branching", "COMPILE"),
        ("ModuleNotFoundError", "No module named 'transformer_engine'", "IMPORT"),
        ("ModuleNotFoundError", "No module named 'fused_weight_gradient_mlp_cuda'", "APEX"),
        ("OSError", "libnccl.so.2: undefined symbol: ncclCommWindowRegister", "IMPORT"),
        ("OSError", "libcudart.so.13: cannot open shared object file: No such file or directory", "IMPORT"),
        ("AssertionError", "CUDA graph argument mismatch:\nShape mismatch", "GRAPH_ARGUMENTS"),
        ("AssertionError", "Fwd cudagraph received a different number of tensors than what it was graphed with!", "GRAPH_ARGUMENTS"),
        ("AssertionError", "CUDA graph accepts only Tensor inputs.", "GRAPH_ARGUMENTS"),
        ("AssertionError", "Tried calling the fwd cudagraph when the bwd cudagraph was expected to be called next!", "GRAPH_ORDER"),
        ("RuntimeError", "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run. Stack trace: None", "GRAPH_OVERWRITTEN"),
        ("RuntimeError", "Error: accessing gradient tensor output of CUDAGraphs that has been overwritten by a subsequent run.", "GRAPH_OVERWRITTEN"),
        ("RuntimeError", "Modules must not have hooks registered at the time they are passed. However, registering hooks", "HOOKS"),
        ("AssertionError", "Tried to cudagraph a module with user registered pre-forward hooks, which is not allowed.", "HOOKS"),
        ("AcceleratorError", "CUDA error: unspecified launch failure", "KERNEL"),
        ("AcceleratorError", "CUDA error: device-side assert triggered", "KERNEL"),
        ("OSError", "[Errno 28] No space left on device", "DISK_FULL"),
        ("OSError", "[Errno 27] File too large: 'metrics.jsonl'", "DISK_FULL"),
        ("ValueError", "Loss is nan, stopping training", "NUMERIC"),
        ("SafetensorError", "Error while deserializing header: incomplete metadata, file not fully covered", "SAFETENSORS"),
        ("NumericError", "loss is nan at step 3 (phase measure)", "NUMERIC"),
        ("RuntimeError", CLOSED, "COMMUNICATION"),
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", "GPU_FAULT"),
        ("RuntimeError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable", "GPU_FAULT"),
        ("CaptureError", "CUDA error: uncorrectable ECC error encountered", "GPU_FAULT"),
    ],
)  # fmt: skip
def test_exceptions_by_class(type_name: str, message: str, name: str) -> None:
    row = classify(type_name, message, "measure")
    assert row is not None and row.name == name


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("ConnectionError", "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /gpt2 ([Errno 111] Connection refused)"),
        ("OSError", "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files."),
    ],
)  # fmt: skip
def test_a_server_that_does_not_answer_is_no_communicator(type_name: str, message: str) -> None:
    """Nodes without a network would be retried elsewhere in vain, with advice about NCCL."""
    found = classify(type_name, message, "init")
    assert found is not None and (found.name, found.infrastructure) == ("DOWNLOAD", False)


def test_a_bug_that_names_a_library_of_communication_is_a_bug() -> None:
    assert classify("KeyError", "'collective_lr'", "measure") is None
    nccl = classify("RuntimeError", "in the step of rank 1\nNCCL error in: x.cpp:1, unhandled cuda error", "measure")
    assert nccl is not None and nccl.name == "COMMUNICATION"
    no_gpu = classify("ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "init")
    assert no_gpu is not None and no_gpu.name == "NO_GPU"


def test_a_file_that_a_program_rejects_fills_no_disk() -> None:
    assert classify("ValueError", "File too large for the tokenizer: data.txt", "init") is None


# Messages of PyTorch 2.11 to 2.13 and Transformer Engine 2.11.
CAPTURE_TEXTS = [
    ("SYNC_IN_CAPTURE", "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    ("SYNC_IN_CAPTURE", "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"),
    ("CAPTURE_INVALID", "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"),
    ("CAPTURE_MERGE", "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"),
    ("CAPTURE_MERGE", "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"),
    ("UNJOINED", "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    ("ISOLATION", "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"),
    ("IMPLICIT", "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"),
    ("WRONG_THREAD", "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "code", "text"), CAPTURE_TEXTS)
def test_what_cuda_refuses_in_a_capture(name: str, code: str, text: str) -> None:
    whole = (
        f"CUDA error: {text}\nSearch for `{code}' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
        "group__CUDART__TYPES.html for more information.\nCUDA kernel errors might be asynchronously reported at some "
        "other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
        "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    for message in (whole, f"CUDA error: {text}", code):
        found = diagnose(ended(phase="capture", exceptions=(said(0, 1.0, "AcceleratorError", message, "capture"),)))
        assert (found.outcome, found.failure_class, found.phase) == ("CAPTURE_FAILED", name, "capture")
        assert found.remedy and message in found.message


@pytest.mark.parametrize(
    ("type_name", "message", "outcome", "name"),
    [
        ("RuntimeError", "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. Please use tensor.pin_memory() or allocate the tensor with pin_memory=True.", "CAPTURE_FAILED", "SYNC_IN_CAPTURE"),
        ("RuntimeError", "status != cudaStreamCaptureStatus::cudaStreamCaptureStatusInvalidated INTERNAL ASSERT FAILED", "CAPTURE_FAILED", "CAPTURE_INVALID"),
        ("RuntimeError", "Attempt to increase offset for a CUDA generator not in capture mode.", "CAPTURE_FAILED", "RNG_CAPTURE"),
        ("RuntimeError", "Offset increment outside graph capture encountered unexpectedly.", "CAPTURE_FAILED", "RNG_CAPTURE"),
        ("RuntimeError", "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture. If you need this call to be captured, please file an issue. Current cudaStreamCaptureStatus: cudaStreamCaptureStatusActive", "CAPTURE_FAILED", "RNG_CAPTURE"),
        ("RuntimeError", 'captures_underway.empty() INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":3941, please report a bug to PyTorch.', "CAPTURE_FAILED", "ALLOC_CAPTURE"),
        ("RuntimeError", 'it->second->use_count > 0 INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":2630, please report a bug to PyTorch.', "CAPTURE_FAILED", "ALLOC_CAPTURE"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.72 GiB of which 1.56 MiB is free.", "CUDA_OOM", "OOM_CAPTURE"),
        ("ReplayError", "the batch has shape (2, 1, 64), but was captured with (2, 1, 65), and a replay repeats the capture", "FAILED", "REPLAY"),
        ("ValueError", "No dot product attention backend is available for the provided inputs. Please run with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to find out the reasons for disabling all backends.", "ENVIRONMENT", "ATTENTION_BACKEND"),
        ("RuntimeError", "No available kernel. Aborting execution.", "ENVIRONMENT", "ATTENTION_BACKEND"),
        ("CaptureError", "cuda_graph.impl='torch_compile' could not compile the model: BackendCompilerFailed: ...", "CAPTURE_FAILED", "CAPTURE"),
    ],
)  # fmt: skip
def test_what_else_breaks_a_capture_or_a_replay(type_name: str, message: str, outcome: str, name: str) -> None:
    found = diagnose(ended(phase="capture", exceptions=(said(0, 1.0, type_name, message, "capture"),)))
    assert (found.outcome, found.failure_class) == (outcome, name) and found.remedy


def test_memory_that_a_capture_lacks_is_told_from_memory_that_the_step_lacks() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB."
    names = {phase: getattr(classify("OutOfMemoryError", text, phase), "name", None) for phase in PHASES}
    assert {phase for phase, name in names.items() if name == "OOM_CAPTURE"} == {"capture"}
    assert set(names.values()) == {"OOM_CAPTURE", "CUDA_OOM"}


@pytest.mark.parametrize("phase", ["capture", "measure"])
def test_advice_that_pytorch_gives_with_every_cuda_error_names_no_class(phase: Phase) -> None:
    advice = (
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    invalid = said(0, 1.0, "AcceleratorError", f"CUDA error: invalid argument\n{advice}", phase)
    found = diagnose(ended(phase=phase, exceptions=(invalid,)))
    assert found.outcome == ("CAPTURE_FAILED" if phase == "capture" else "FAILED")
    assert found.failure_class == "AcceleratorError"
    assertion = classify("AcceleratorError", f"CUDA error: device-side assert triggered\n{advice}", phase)
    assert assertion is not None and assertion.name == "KERNEL"


def test_an_unspecified_launch_failure_is_the_programs_and_no_fault_of_the_gpu() -> None:
    row = classify("AcceleratorError", "CUDA error: unspecified launch failure", "measure")
    assert row is not None and not row.infrastructure


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("DistNetworkError", "The server socket has failed to listen on any local network address. port: 1, code: -98"),
        ("DistStoreError", "Timed out after 601 seconds waiting for clients. 3/4 clients joined."),
        ("RuntimeError", "Gloo connectFullMesh failed with [enforce fail] timed out connecting: Connection refused"),
        ("DistBackendError", "NCCL error in: ncclCommInitRank(&comm, n, id, rank), unhandled system error"),
        ("DistBackendError", "ncclRemoteError: remote process exited or there was a network error"),
    ],
)
def test_ranks_that_do_not_meet_are_the_networks_fault_when_they_first_meet_only(type_name: str, message: str) -> None:
    at_first = diagnose(ended(exceptions=(said(1, 1.0, type_name, message, "init"),)))
    assert (at_first.outcome, at_first.failure_class, at_first.rank) == ("ENVIRONMENT", "COMMUNICATOR_SETUP", 1)
    later = diagnose(ended(exceptions=(said(1, 1.0, type_name, message),)))
    assert later.outcome == "FAILED" and later.failure_class != "COMMUNICATOR_SETUP"


def test_who_did_not_come_is_the_cause_of_others_waiting_for_him() -> None:
    waited = said(1, 1.0, "DistStoreError", "Timed out after 601 seconds waiting for clients", "init")
    failed = said(0, 2.0, "DataError", "data.path: no such file", "init")
    assert diagnose(ended(phase="init", exceptions=(waited, failed))).failure_class == "DATA"
    killed = diagnose(ended(phase="init", exceptions=(waited,), exits=(RankExit(1, 1), RankExit(0, -signal.SIGSEGV))))
    assert (killed.failure_class, killed.rank) == ("SIGSEGV", 0)
    left = diagnose(ended(phase="init", exceptions=(waited,), exits=(RankExit(0, 3), RankExit(1, 1))))
    assert (left.failure_class, left.rank) == ("EXIT", 0)


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


def test_a_rank_whose_end_nobody_recorded_comes_before_what_others_said_of_it() -> None:
    """Slurm kills a step that does not end. It then kills a rank and the process that waits for a disk to record the
    rank's end."""
    lost = RankExit(1, -signal.SIGKILL, is_recorded=False)
    closed = (said(0, 1.0, "RuntimeError", CLOSED),)
    found = diagnose(ended(exceptions=closed, exits=(RankExit(0, 1, time=1.0), lost)))
    assert (found.rank, found.failure_class) == (1, "SIGKILL")
    # A rank that is known to have ended by itself comes first. A rank that only reports others did not cause their end.
    for known in (RankExit(0, 3, time=1.0), RankExit(0, -signal.SIGSEGV, time=1.0)):
        assert diagnose(ended(exits=(known, lost))).rank == 0
    both = (*closed, said(1, 1.1, "RuntimeError", CLOSED))
    assert diagnose(ended(exceptions=both, exits=(RankExit(0, 1, time=1.0), lost))).failure_class == "COMMUNICATION"


def test_a_launchers_exit_is_that_of_all_ranks_that_it_started_and_of_no_rank_of_its_own_number() -> None:
    """Two torchruns of two ranks: rank 1 is on the first node, and the second torchrun counts as rank 2."""
    closed = tuple(said(rank, 1.0, "RuntimeError", CLOSED) for rank in range(4))
    first, second = RankExit(0, 1, time=2.0, node="a"), RankExit(2, 1, time=3.0, node="b")

    def found(*exceptions: RankException) -> tuple[str, int | None]:
        seen = ended(exceptions=exceptions, exits=(first, second))
        diagnosis = diagnose(dataclasses.replace(seen, ranks_per_task=2, is_command=True))
        return diagnosis.failure_class, diagnosis.rank

    assert found(*closed) == ("COMMUNICATION", 0)
    assert found(*closed[:3]) == ("EXIT", 2), "rank 3 has gone, and all others speak of it"
    assert found(*closed[:2]) == ("EXIT", 2)
    assert found(*closed[1:]) == found(*closed[2:]) == ("EXIT", 0)
    assert found(*closed[:3], said(3, 4.0, "KeyError", "x")) == ("KeyError", 3)


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
    """A rank fails but cannot leave, because its peers wait for it."""
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
    killed = diagnose(ended(exits=(RankExit(0, -signal.SIGKILL, oom_killed=True),)))
    assert (killed.outcome, killed.failure_class) == ("HOST_OOM", "KERNEL_OOM")
    faulted = diagnose(ended(exits=(RankExit(0, -signal.SIGSEGV, oom_killed=True),)))
    assert (faulted.outcome, faulted.failure_class) == ("FAILED", "SIGSEGV")


def test_a_rank_that_left_without_a_word_comes_before_those_that_were_ended_for_it() -> None:
    ended_for_it = tuple(RankExit(rank, -signal.SIGTERM) for rank in range(3))
    found = diagnose(ended(exits=(*ended_for_it, RankExit(3, 3))))
    assert (found.rank, found.failure_class) == (3, "EXIT")
    # A rank that SIGTERM ended comes before ranks that report that it is gone.
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


def test_who_slurm_ended_because_another_had_failed_is_not_the_cause() -> None:
    """With srun --kill-on-bad-exit, the times show which rank failed first."""
    waited = said(1, 1.0, "DistStoreError", "Timed out after 601 seconds waiting for clients", "init")
    exits = (RankExit(1, 1, time=2.0), RankExit(0, -signal.SIGTERM, time=2.1))
    found = diagnose(ended(phase="init", exceptions=(waited,), exits=exits))
    assert (found.failure_class, found.rank) == ("COMMUNICATOR_SETUP", 1)
    found = diagnose(ended(exits=(RankExit(0, -signal.SIGTERM, time=1.0), RankExit(1, -signal.SIGTERM, time=1.1))))
    assert (found.failure_class, found.rank) == ("SIGTERM", 0)


def test_a_launcher_that_was_killed_names_no_rank() -> None:
    found = diagnose(ended(code=-9))
    assert (found.failure_class, found.rank) == ("SIGKILL", None)


def test_a_spec_that_cannot_be_read() -> None:
    found = without_spec(KeyError("model"))
    assert (found.outcome, found.failure_class) == ("CONFIG", "SPEC") and "model" in found.message


# --- what Slurm ends ------------------------------------------------------------------------------------------------


def test_ranks_that_never_began_are_no_ones_result() -> None:
    never = [Evidence("itself", 1, {}), Evidence("hang", 0, {}), Evidence("deadline", 0, {})]
    assert {diagnose(seen).failure_class for seen in never} == {"LAUNCH"}
    assert diagnose(Evidence("itself", 1, {}, exits=(RankExit(2, 1),))).failure_class == "EXIT"


@pytest.mark.parametrize("state", [*sorted(ENDED), "REQUEUED"])
def test_every_end_of_a_job_is_a_class_with_a_way_out(state: str) -> None:
    found = diagnose_job_end(state, "measure")
    row = next(row for row in FAILURE_CLASSES if row.name == found.failure_class)
    assert (found.outcome, found.phase) == (row.outcome, "measure") and found.message and found.remedy
    assert found.failure_class == CLASS_OF_JOB_STATE[state].name
    after_results = diagnose_job_end(state, "teardown")
    assert (after_results.outcome, after_results.failure_class) == ("COMPLETED", "") and state in after_results.message


@given(st.text(max_size=20).filter(lambda state: stage_of(state) != "ended" and state not in ("REQUEUED", "GONE")))
def test_a_job_that_goes_on_has_not_ended_a_run(state: str) -> None:
    with pytest.raises(ValueError, match="has not ended"):
        diagnose_job_end(state, "measure")


def test_what_ranks_said_before_their_job_ended_is_the_cause_unless_it_is_of_each_other() -> None:
    oom = said(0, 1.0, "OutOfMemoryError", "CUDA out of memory")
    assert diagnose(ended("job", exceptions=(oom,), job_state="TIMEOUT")).outcome == "CUDA_OOM"
    lost = said(0, 1.0, "RuntimeError", "[gloo] Timed out waiting 1800000ms for recv operation to complete")
    assert diagnose(ended("job", exceptions=(lost,), job_state="NODE_FAIL")).outcome == "NODE_FAIL"
    assert diagnose(ended(exceptions=(lost,))).failure_class == "COMMUNICATION"


def test_slurm_is_asked_only_where_ranks_do_not_explain_their_end() -> None:
    assert is_explained(ended(exceptions=(said(0, 1.0, "KeyError", "x"),)))
    assert is_explained(ended(code=0, phase="teardown"))
    assert is_explained(ended("hang"))
    assert not is_explained(ended("job"))
    assert not is_explained(ended(exits=(RankExit(1, -signal.SIGTERM),)))
    assert not is_explained(ended(exceptions=(said(0, 1.0, "RuntimeError", CLOSED),)))


def test_a_full_disk_is_told_by_the_supervisor_where_ranks_could_not_tell() -> None:
    """If something else ended the ranks, the full disk is not the cause."""
    words = "No space left on device"
    for seen in (ended(), ended(exits=(RankExit(1, 1),)), ended(exceptions=(said(0, 1.0, "RuntimeError", CLOSED),))):
        found = diagnose(dataclasses.replace(seen, disk_full=words))
        assert (found.outcome, found.failure_class, found.message) == ("ENVIRONMENT", "DISK_FULL", words)
    for seen, name in (
        (ended(exits=(RankExit(1, -signal.SIGKILL),)), "SIGKILL"),
        (ended(exceptions=(said(0, 1.0, "NumericError", "loss is NaN"),)), "NUMERIC"),
        (ended("hang"), "HANG"),
        (ended("cancel"), "CANCELLED"),
    ):
        assert diagnose(dataclasses.replace(seen, disk_full=words)).failure_class == name
    short = said(0, 1.0, "OSError", f"[Errno 28] {words}: only 3 of 90 bytes of a line could be written")
    assert diagnose(ended(exceptions=(short,))).failure_class == "DISK_FULL"


def test_a_step_that_slurm_ended_for_its_memory() -> None:
    seen = dataclasses.replace(ended(code=-signal.SIGKILL), over_memory="it took 200 MB")
    assert (diagnose(seen).outcome, diagnose(seen).message) == ("HOST_OOM", "it took 200 MB")


@pytest.mark.parametrize("row", FAILURE_CLASSES, ids=lambda row: row.name)
def test_infrastructure_is_what_no_run_can_cause(row: FailureClass) -> None:
    outcome = make_outcome(diagnose_as(row, "measure", ""), "", 0.0, 1.0)
    assert outcome.is_infrastructure == row.infrastructure
    assert not row.infrastructure or row.outcome in ("ENVIRONMENT", "NODE_FAIL", "PREEMPTED")


phases = st.sampled_from(PHASES)
exceptions = st.builds(
    RankException, st.integers(0, 7), st.floats(0, 1e9), phases,
    st.sampled_from(["RuntimeError", "NumericError", "KeyError", "DistStoreError"]),
    st.sampled_from(["x", CLOSED, "CUDA out of memory", "NCCL"]),
)  # fmt: skip
evidence = st.builds(
    Evidence,
    ended_by=st.sampled_from(["itself", "cancel", "deadline", "hang", "job"]),
    exit_code=st.integers(-64, 255),
    phases=st.dictionaries(st.integers(0, 7), phases),
    exceptions=st.lists(exceptions, max_size=4).map(tuple),
    exits=st.lists(
        st.builds(
            RankExit,
            st.integers(0, 7),
            st.integers(-64, 255),
            st.none() | st.floats(0, 1e9),
            oom_killed=st.booleans(),
            is_recorded=st.booleans(),
        ),
        max_size=4,
    ).map(tuple),
    limit_seconds=st.floats(1, 1e5),
    job_state=st.sampled_from(sorted(ENDED)),
    over_memory=st.sampled_from(["", "it took 200 MB"]),
)


@given(evidence)
def test_whatever_is_seen_there_is_an_outcome_and_a_way_out(seen: Evidence) -> None:
    found = diagnose(seen)
    assert found.outcome in OUTCOMES
    assert (found.outcome == "COMPLETED") == (found.failure_class == found.remedy == "")
    if found.outcome == "COMPLETED":
        assert seen.phase == "teardown" and (seen.ended_by in ("cancel", "job") or seen.exit_code == 0)


@given(evidence, st.randoms())
def test_the_order_in_which_ranks_are_read_does_not_matter(seen: Evidence, random: Random) -> None:
    by_moment = {(exception.time, exception.rank): exception for exception in seen.exceptions}
    once = dataclasses.replace(seen, exceptions=tuple(by_moment.values()))
    again = dataclasses.replace(seen, exceptions=tuple(random.sample(once.exceptions, len(once.exceptions))))
    assert diagnose(once) == diagnose(again)


# --- docs/failures.md -----------------------------------------------------------------------------------------------

DOCS = (Path(__file__).resolve().parents[4] / "docs" / "failures.md").read_text()


def test_every_outcome_is_documented_once() -> None:
    table = DOCS.split("## Outcomes")[1].split("A recipe may expect")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[4:] if line] == list(OUTCOMES)


def test_a_program_of_the_users_own_that_shows_nothing_is_no_failed_launch() -> None:
    """A program shows nothing before its first step. So neither a retry nor another node is the fix."""
    ends: tuple[tuple[EndedBy, int, str, str], ...] = (
        ("hang", 0, "HANG", "HANG"), ("deadline", 0, "TIMEOUT", "TIMEOUT"), ("itself", 0, "FAILED", "PROGRAM"), ("itself", 127, "FAILED", "PROGRAM"),
    )  # fmt: skip
    for ended_by, code, outcome, name in ends:
        found = diagnose(Evidence(ended_by, code, {}, is_command=True))
        assert (found.outcome, found.failure_class, found.infrastructure) == (outcome, name, False)
        assert found.remedy
    trained = diagnose(Evidence("itself", 0, {}, is_command=True, last_words={0: LastWords(message="done")}))
    assert trained.message == "the program ended with exit code 0, and no optimizer step of it was seen: done"
    assert "launch.observe" in trained.remedy


SAID = {
    "ModuleNotFoundError: No module named 'mine'": ("ENVIRONMENT", "IMPORT"),
    "/bin/python: can't open file '/a/train.py': [Errno 2] No such file or directory": ("ENVIRONMENT", "NO_PROGRAM"),
    "launch.contract.errors.EnvironmentFault: command.run cannot start: mine in /a": ("ENVIRONMENT", "NO_PROGRAM"),
    "AssertionError: Torch not compiled with CUDA enabled": ("ENVIRONMENT", "NO_GPU"),
    "RuntimeError: No CUDA GPUs are available": ("ENVIRONMENT", "NO_GPU"),
    "/bin/python: No module named mine.train": ("ENVIRONMENT", "NO_PROGRAM"),
    "bash: run.sh: No such file or directory": ("ENVIRONMENT", "NO_PROGRAM"),
    "run.sh: line 3: trian: command not found": ("ENVIRONMENT", "NO_PROGRAM"),
    "train.py: error: unrecognized arguments: --graphs": ("CONFIG", "OPTIONS"),
    "train.py: error: the following arguments are required: --data": ("CONFIG", "OPTIONS"),
    "torchrun: error: unrecognized arguments: --nproc": ("CONFIG", "OPTIONS"),
    "Error: No such option '--stepz'.": ("CONFIG", "OPTIONS"),
    "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--stepz', '3']": (
        "CONFIG",
        "OPTIONS",
    ),
    "train.py: error: argument --steps: invalid int value: 'x'": ("CONFIG", "OPTION_VALUE"),
    "train.py: error: --steps must be positive": ("CONFIG", "OPTION_VALUE"),
    "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.": ("CONFIG", "OPTION_VALUE"),
    "gcc: error: unrecognized command-line option '-x'": ("FAILED", "PROGRAM"),
    "pretrain_gpt.py: error: unrecognized arguments: --cuda-graph-modules attn": ("CONFIG", "GRAPH_SETTINGS"),
}


@pytest.mark.parametrize("said", SAID)
def test_a_program_that_ends_before_its_first_step_is_judged_by_what_it_printed(said: str, tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text(f"Traceback\n{said}\nE1 torch/distributed/elastic/api.py] failed\nChildFailedError:\n====\n")
    observed = RankException(0, 1.0, "init", "ProgramError", "the program ended after 0 of 12 steps")
    for exceptions in ((), (observed,)):
        evidence = Evidence("itself", 2, {0: "init"}, exceptions, is_command=True, last_words={0: read_last_words(log)})
        found = diagnose(evidence)
        assert (found.outcome, found.failure_class) == SAID[said]
        assert found.message == f"the program ended with exit code 2 before its first optimizer step: {said}"


EARLY = said(0, 9.0, "ProgramError", "the program ended after 61 of 110 optimizer steps: read in its log why it ended")


@pytest.mark.parametrize(
    ("words", "outcome", "name"),
    [
        (LastWords("torch.OutOfMemoryError", "CUDA out of memory."), "CUDA_OOM", "CUDA_OOM"),
        (LastWords(message="validation loss is worse than the limit"), "FAILED", "EXIT"),
        (LastWords(message="Loss is nan, stopping training"), "NUMERIC", "NUMERIC"),
    ],
)
def test_a_program_that_ends_itself_with_an_error_is_judged_by_what_it_printed(
    words: LastWords, outcome: str, name: str
) -> None:
    """Hydra, and programs with a handler of their own, print an error and call sys.exit(1). No hook sees it."""
    found = diagnose(Evidence("itself", 1, {0: "measure"}, (EARLY,), is_command=True, last_words={0: words}))
    assert (found.outcome, found.failure_class, found.phase) == (outcome, name, "measure")
    assert found.message == f"the program ended with exit code 1: {words.text}"


def test_the_rank_under_torchrun_that_ends_itself_with_an_error_is_named() -> None:
    early, left = dataclasses.replace(EARLY, rank=5), said(4, 9.5, "RuntimeError", CLOSED)
    words = {4: LastWords("torch.OutOfMemoryError", "CUDA out of memory.")}
    seen = Evidence("itself", 1, {4: "measure"}, (early, left), (RankExit(4, 1),), is_command=True, last_words=words)
    found = diagnose(dataclasses.replace(seen, ranks_per_task=4))
    assert (found.failure_class, found.rank) == ("CUDA_OOM", 5)
    elsewhere = diagnose(
        dataclasses.replace(seen, exceptions=(dataclasses.replace(early, rank=1), left), ranks_per_task=4)
    )
    assert elsewhere.rank == 4


def test_a_program_that_ends_early_without_an_exit_code_is_told_with_the_error_that_it_printed() -> None:
    seen = Evidence("itself", 0, {0: "measure"}, (EARLY,), is_command=True)
    said_oom = {0: LastWords("torch.OutOfMemoryError", "CUDA out of memory.")}
    found = diagnose(dataclasses.replace(seen, last_words=said_oom))
    assert (found.outcome, found.failure_class) == ("CONFIG", "ENDED_EARLY")
    assert found.message == f"the last error in its log is torch.OutOfMemoryError: CUDA out of memory.; {EARLY.text}"
    assert diagnose(dataclasses.replace(seen, last_words={0: LastWords(message="bye")})).message == EARLY.text


def test_a_log_without_an_error_is_told_by_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    assert read_last_words(log) == LastWords()
    log.write_text("x" * 200_000 + "\nno license left \n\n")
    assert read_last_words(log).text == "no license left"


def test_what_a_rank_printed_tells_who_was_only_left_alone() -> None:
    """Rank 0 ends first, because rank 1 has gone, whose last words name the cause."""
    exits = (RankExit(0, 1, time=1.0), RankExit(1, 1, time=1.5))
    words = {
        0: LastWords("RuntimeError", CLOSED),
        1: LastWords("ValueError", "CUDA graphs not supported with CPU offloading."),
    }
    found = diagnose(Evidence("itself", 1, {}, (), exits, is_command=True, last_words=words))
    assert (found.outcome, found.failure_class, found.rank) == ("CONFIG", "GRAPH_OFFLOAD", 1)


def test_an_error_that_only_the_watchdog_saw_comes_before_the_signal_that_it_sent() -> None:
    words = {1: LastWords(message="CUDA error: an illegal memory access was encountered")}
    seen = ended(exits=(RankExit(1, -signal.SIGABRT, time=1.0), RankExit(0, -signal.SIGTERM, time=2.0)))
    found = diagnose(dataclasses.replace(seen, last_words=words))
    assert (found.failure_class, found.rank) == ("ILLEGAL_ACCESS", 1) and "SIGABRT" in found.message
    assert diagnose(seen).failure_class == "SIGABRT"


def test_a_rank_that_could_not_record_its_error_may_have_printed_it() -> None:
    words = {0: LastWords("ImportError", "libcudart.so.13: cannot open shared object file")}
    seen = dataclasses.replace(ended(exits=(RankExit(0, 1),)), last_words=words)
    assert diagnose(seen).failure_class == "IMPORT"
    other = dataclasses.replace(seen, last_words={0: LastWords(message="bye")})
    assert diagnose(other).failure_class == "EXIT"


REMOTE = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version 2.27.5"
)


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("DistBackendError", f"{REMOTE}\nncclRemoteError: A call failed possibly due to a network error"),
        ("DistBackendError", "NCCL communicator was aborted on rank 1."),
        ("DistBackendError", "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE)"),
        ("DistNetworkError", "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server (MASTER) shutdown or crash?"),
        ("DistStoreError", "wait timeout after 600000ms, keys: /default_pg/0//cpu//0/0/1"),
        ("RuntimeError", CLOSED),
        ("BrokenPipeError", "[Errno 32] Broken pipe"),
        ("SignalException", "Process 4242 got signal: 15"),
        ("AcceleratorError", "CUDA error: operation failed due to a previous error during capture"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("phase", ["warmup", "capture", "measure"])
def test_what_follows_from_another_error_is_no_cause_though_it_comes_first(
    type_name: str, message: str, phase: Phase
) -> None:
    exceptions = (said(1, 1.0, type_name, message, phase), said(0, 1.2, "KeyError", "x", phase))
    assert diagnose(ended(exceptions=exceptions)).message == "KeyError: x"


@pytest.mark.parametrize(
    ("last", "name"),
    [("Cuda failure 2 'out of memory'", "CUDA_OOM"), ("Cuda failure 700 'an illegal memory access was encountered'", "ILLEGAL_ACCESS")],
)  # fmt: skip
def test_an_error_of_nccl_that_names_its_own_cause_is_no_consequence(last: str, name: str) -> None:
    nccl = said(1, 1.0, "DistBackendError", f"NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\n{last}")
    later = said(0, 2.0, "RuntimeError", "The size of tensor a (3) must match")
    found = diagnose(ended(exceptions=(later, nccl)))
    assert (found.failure_class, found.rank) == (name, 1)


@pytest.mark.parametrize(
    ("phase", "said"), [("build", " before the first step; rank 0 printed last: compiling"), ("measure", "")]
)
def test_a_hang_before_the_first_step_says_what_the_run_was_doing(phase: Phase, said: str) -> None:
    found = diagnose(Evidence("hang", 0, {0: phase}, limit_seconds=600, last_words={0: LastWords(message="compiling")}))
    assert (found.outcome, found.message) == ("HANG", f"no sign of life for 600 s{said}")


@pytest.mark.parametrize(
    ("message", "alike", "needs_settings"),
    [
        ("the program shows no loss of its 60 steps", True, False),
        ("the program ended after 6 of 60 optimizer steps", False, False),
    ],
)
def test_a_program_that_shows_no_loss_does_so_in_each_repeat_until_it_is_changed(
    message: str, alike: bool, needs_settings: bool
) -> None:
    """One that ended early may have lost a server."""
    outcome = make_outcome(diagnose(ended(code=0, exceptions=(said(0, 1.0, "ProgramError", message),))), "a", 0.0, 1.0)
    assert (outcome.outcome, outcome.repeats_alike, outcome.needs_other_settings) == ("CONFIG", alike, needs_settings)
