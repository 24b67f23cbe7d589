"""Clocks of a rank's GPU from NVIDIA's management library (NVML), read at the end of a phase and never within a step.

For each reason, the driver counts the time for which it lowered the clocks. So two readings cover all time between them, and
nothing is sampled during timed steps. The GPU is found by its PCI address, because CUDA and NVML order devices differently. For
a MIG instance this is the address of the whole GPU, whose clocks all instances share.

Source: nvml.h of CUDA 13.3 and of CUDA 12.6.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from launch.contract.records.clocks import ClockReason, Clocks

LIBRARY = "libnvidia-ml.so.1"
COUNTERS: Mapping[int, ClockReason] = {74: "power_cap", 75: "thermal", 76: "sync_boost"}
"""Fields NVML_FI_DEV_PERF_POLICY_POWER, _THERMAL and _SYNC_BOOST: nanoseconds since the driver was loaded.

Hardware slowdowns have counters too, but their field numbers changed. They are 252 and 253 in nvidia-ml-py for drivers 575.51
and 580.65, and 270 and 271 since 580.82, where 252 and 253 have another meaning. The bits below have not changed."""
BITS: Mapping[int, ClockReason] = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
"""nvmlClocksEventReason*, except idle GPU (0x01), clocks set by a user (0x02) and display clocks (0x100)."""
_SM = 1  # nvmlClockType_t, NVML_CLOCK_SM


class _Value(ctypes.Union):
    _fields_ = (("uiVal", ctypes.c_uint), ("ulVal", ctypes.c_ulong), ("ullVal", ctypes.c_ulonglong))


_WHOLE = {1: "uiVal", 2: "ulVal", 3: "ullVal"}
"""The union's member for each nvmlValueType_t. Other types are not counts."""


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("fieldId", ctypes.c_uint),
        ("scopeId", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latencyUsec", ctypes.c_longlong),
        ("valueType", ctypes.c_int),
        ("nvmlReturn", ctypes.c_int),
        ("value", _Value),
    )


@dataclass(frozen=True)
class Reading:
    """The driver's values at one moment. ``at`` and ``counted`` are in nanoseconds."""

    at: int
    counted: Mapping[ClockReason, int]
    active: tuple[ClockReason, ...] | None
    power_limit: float | None
    sm_mhz: int | None
    max_sm_mhz: int | None


class Gpu:
    """A GPU of this host, read through NVML."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def read(self) -> Reading:
        limit = self._query("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint())
        bits = self._query("nvmlDeviceGetCurrentClocksEventReasons", ctypes.c_ulonglong())
        # Drivers before 535 have only the old name.
        if bits is None:
            bits = self._query("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong())
        return Reading(
            at=time.monotonic_ns(),
            counted=self._counted(),
            active=None if bits is None else tuple(reason for bit, reason in BITS.items() if bits & bit),
            power_limit=None if limit is None else limit / 1e3,
            sm_mhz=self._query("nvmlDeviceGetClockInfo", ctypes.c_uint(), _SM),
            max_sm_mhz=self._query("nvmlDeviceGetMaxClockInfo", ctypes.c_uint(), _SM),
        )

    def _query(self, name: str, answer: Any, *arguments: int) -> int | None:
        """Call NVML's function ``name`` and return its number, or None if this driver or GPU does not support it."""
        function = getattr(self._library, name, None)
        if function is None or function(self._handle, *arguments, ctypes.byref(answer)) != 0:
            return None
        return int(answer.value)

    def _counted(self) -> dict[ClockReason, int]:
        fields = (_FieldValue * len(COUNTERS))(*(_FieldValue(fieldId=field) for field in COUNTERS))
        function = getattr(self._library, "nvmlDeviceGetFieldValues", None)
        if function is None or function(self._handle, len(fields), fields) != 0:
            return {}
        valid = [field for field in fields if field.nvmlReturn == 0 and field.valueType in _WHOLE]
        return {COUNTERS[field.fieldId]: int(getattr(field.value, _WHOLE[field.valueType])) for field in valid}


def find_gpu(pci_address: str, library: str = LIBRARY) -> Gpu | str:
    """Return the GPU at ``pci_address`` ("00000000:8d:00.0"), or the reason why it cannot be read."""
    try:
        nvml = ctypes.CDLL(library)
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        handle = ctypes.c_void_p()
        code = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_address.encode(), ctypes.byref(handle))
    except OSError:
        return f"{LIBRARY}, which is part of NVIDIA's driver, cannot be loaded"
    except AttributeError:
        return f"{LIBRARY} is too old, or is another library"
    return Gpu(nvml, handle) if code == 0 else f"NVML says: {nvml.nvmlErrorString(code).decode()}"


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a CUDA device in NVML's format."""
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def between(before: Reading, after: Reading) -> Clocks:
    """Return the clocks between two readings of one GPU.

    Ignore a counter that decreased, because the driver was then reloaded.
    """
    ran = {
        reason: after.counted[reason] - before.counted[reason] for reason in before.counted if reason in after.counted
    }
    active = None if before.active is None or after.active is None else {*before.active, *after.active}
    limits = {limit for limit in (before.power_limit, after.power_limit) if limit is not None}
    return Clocks(
        seconds=(after.at - before.at) / 1e9,
        throttled={reason: nanoseconds / 1e9 for reason, nanoseconds in ran.items() if nanoseconds >= 0},
        active=None if active is None else tuple(reason for reason in BITS.values() if reason in active),
        power_limits=tuple(sorted(limits)),
        sm_mhz=after.sm_mhz,
        max_sm_mhz=after.max_sm_mhz,
    )


class PhaseClocks:
    """The clocks of ``device`` between readings. The constructor takes the first reading.

    ``unknown`` is the reason why throttling is unknown, or empty.
    """

    def __init__(self, device: torch.device, library: str = LIBRARY) -> None:
        found = find_gpu(pci_address(device), library)
        self._gpu = None if isinstance(found, str) else found
        self._last = self._gpu.read() if self._gpu else None
        self.unknown = found if isinstance(found, str) else ""
        if self._last and not self._last.counted:
            self.unknown = "NVML counts no throttling of this GPU"

    def end_phase(self) -> Clocks | None:
        """Return the clocks since the last reading, or None if the GPU cannot be read."""
        if self._gpu is None or self._last is None:
            return None
        before, self._last = self._last, self._gpu.read()
        return between(before, self._last)
