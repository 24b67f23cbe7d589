"""Describe the settings of PyTorch and Python that hold in the whole process and change numbers or speed."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Mapping

import torch


def _float32_products() -> str:
    """Return the precision of products of float32 matrices on GPUs.

    Newer releases of PyTorch have two ways to set it. This attribute can be read after both.
    """
    products = torch.backends.cuda.matmul
    if not hasattr(products, "fp32_precision"):
        return torch.get_float32_matmul_precision()
    return "ieee" if products.fp32_precision == "none" else str(products.fp32_precision)


def _attention() -> str:
    """Return the implementations that scaled_dot_product_attention may use."""
    names = ("flash", "mem_efficient", "math", "cudnn")
    return ", ".join(name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled", bool)())


_SETTINGS: Mapping[str, Callable[[], object]] = {
    "float32_products": _float32_products,
    "cudnn_allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn_deterministic": lambda: torch.backends.cudnn.deterministic,
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "detect_anomaly": torch.is_anomaly_enabled,
    "attention": _attention,
    "cudnn_enabled": lambda: torch.backends.cudnn.enabled,
    "float16_reductions": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "bfloat16_reductions": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "seed": torch.initial_seed,
    "default_dtype": torch.get_default_dtype,
    "blas": lambda: torch.backends.cuda.preferred_blas_library(),
    "threads": torch.get_num_threads,
    "garbage_collection": gc.isenabled,
    "python_flags": lambda: f"optimize {sys.flags.optimize}, dev_mode {sys.flags.dev_mode}",
    "python_tracing": lambda: (sys.gettrace() or sys.getprofile()) is not None,
    "profiler": torch.autograd._profiler_enabled,
}


def torch_settings() -> dict[str, str]:
    """Return the settings as this process has them now."""
    with warnings.catch_warnings():
        # Newer releases warn of the older of two names.
        warnings.simplefilter("ignore")
        return {name: _read(setting) for name, setting in _SETTINGS.items()}


def _read(setting: Callable[[], object]) -> str:
    try:
        return str(setting())
    except (RuntimeError, AttributeError):
        # After a program has used newer names, PyTorch may not let anyone read the older ones. Other releases lack a name.
        return "unknown"
