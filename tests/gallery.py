"""Map each injected fault to the failure class that its run must get."""

from __future__ import annotations

from collections.abc import Mapping

from launch.contract.spec import FaultKind

CLASS_OF: Mapping[FaultKind, str] = {
    "exception": "RuntimeError",
    "nan": "NUMERIC",
    "hang": "HANG",
    "segfault": "SIGSEGV",
    "host_kill": "SIGKILL",
    "item_in_capture": "SYNC_IN_CAPTURE",
    "background_thread": "CAPTURE_INVALID",
    "unjoined_stream": "UNJOINED",
    "legacy_stream": "IMPLICIT",
    "unregistered_generator": "RNG_CAPTURE",
    "oom_eager": "CUDA_OOM",
    "oom_capture": "OOM_CAPTURE",
    "oom_replay": "CUDA_OOM",
    "input_freed": "ILLEGAL_ACCESS",
    "dynamic_shape": "REPLAY",
    "frozen_scalar": "",
    "frozen_draw": "",
    "missing_attention_backend": "ENVIRONMENT",
}
