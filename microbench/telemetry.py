"""Clock, power, temperature and throttle reasons around a point, read through NVML. Nothing is ever set."""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: nvmlClocksEventReasons bits that mean the GPU runs below what it could: SwPowerCap 0x4, HwSlowdown 0x8, SwThermal 0x20, HwThermal 0x40,
#: HwPowerBrake 0x80 (nvml.h).
THROTTLE_BITS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


class Telemetry:
    """Reads NVML where it is there; `read` gives an empty object where it is not."""

    def __init__(self, enabled: bool) -> None:
        self._nvml: Any = None
        if not enabled:
            return
        try:
            self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # no NVML: measurements go on without
            self._nvml = None

    def read(self) -> dict[str, float]:
        """SI units; `reasons` is the raw bit mask."""
        nvml = self._nvml
        if nvml is None:
            return {}
        try:
            reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
            return {
                "sm_clock_hz": nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM) * 1e6,
                "memory_clock_hz": nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_MEM) * 1e6,
                "power_w": nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
                "temperature_c": float(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)),
                "reasons": float(reasons(self._handle)),
            }
        except Exception:  # a reading that this driver does not give
            return {}


def throttled(before: dict[str, float], after: dict[str, float]) -> bool:
    """Whether a throttle reason was set on either side of a point."""
    return any(int(r.get("reasons", 0)) & THROTTLE_BITS for r in (before, after))
