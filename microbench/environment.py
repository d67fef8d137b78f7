"""What a measurement depends on: processor or GPU, driver, library versions. No host, user or path names."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "numpy", "nvidia-ml-py", "flashinfer-python", "flash-attn")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def today() -> str:
    """UTC date."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def cache_bytes() -> int:
    """Size of the largest cache of the first core; 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KMG]?)", path.read_text(encoding="utf-8").strip())
        if found:
            sizes.append(int(found[1]) * _UNITS[found[2]])
    return max(sizes, default=32 * 2**20)


def memory_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_environment() -> dict[str, Any]:
    """Fingerprint of this machine's processor."""
    torch = import_module("torch")
    return {
        "device": "cpu", "name": cpu_name(), "machine": platform.machine(), "cores": os.cpu_count() or 1, "threads": 1,
        "cache_bytes": cache_bytes(), "memory_bytes": memory_bytes(), "isa": str(torch.backends.cpu.get_cpu_capability()),
        "versions": _versions(), "date": today(),
    }  # fmt: skip


def cuda_environment() -> dict[str, Any]:
    """Fingerprint of GPU 0, with the driver and the power limit where NVML is at hand."""
    torch = import_module("torch")
    p = torch.cuda.get_device_properties(0)
    out: dict[str, Any] = {
        "device": "cuda", "name": p.name, "compute_capability": f"{p.major}.{p.minor}", "sm_count": p.multi_processor_count,
        "cache_bytes": int(p.L2_cache_size), "memory_bytes": int(p.total_memory),
        "cuda": str(torch.version.cuda), "n_gpus": torch.cuda.device_count(),
        "versions": _versions(), "date": today(),
    }  # fmt: skip
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        out["driver"] = str(nvml.nvmlSystemGetDriverVersion())
        out["power_limit_w"] = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3
        out["uuid_hash"] = hashlib.sha256(str(nvml.nvmlDeviceGetUUID(handle)).encode()).hexdigest()[:12]
        out["mig"] = _mig(nvml, handle)
        out["other_processes"] = max(len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)) - 1, 0)
    except Exception as error:  # NVML is a bonus: whatever fails there is written down and the measurement goes on
        out["nvml_missing"] = type(error).__name__
    return out


def _mig(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except Exception:  # not supported on this GPU
        return False
