"""Prefixes live here and nowhere else. Inside, everything is SI base: bytes, FLOP, seconds, tokens.

Decimal prefixes for rates and marketing sizes (1 GB = 1e9 B), binary ones only where a vendor tool reports them (1 GiB = 2**30 B).
"""

from __future__ import annotations

import math

KILO, MEGA, GIGA, TERA, PETA = 1e3, 1e6, 1e9, 1e12, 1e15
KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
MILLI, MICRO = 1e-3, 1e-6

#: Bits stored per weight or KV element. Scaled formats carry their scales: NVFP4 one fp8 scale per 16 elements (4.5 bit),
#: MXFP4 one 8-bit scale per 32 (4.25 bit), group-128 int4 a 16-bit scale and 4-bit zero (4.16 bit).
STORAGE_BITS: dict[str, float] = {
    "fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.16, "nvfp4": 4.5, "mxfp4": 4.25,
}  # fmt: skip


def bytes_per_element(dtype: str) -> float:
    """Stored bytes per element of `dtype`, scales included (see STORAGE_BITS)."""
    return STORAGE_BITS[dtype] / 8.0


def si(value: float, unit: str, digits: int = 3) -> str:
    """``4.8e12, 'B/s' -> '4.8 TB/s'``: a number with a decimal prefix, for people."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    steps = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n")]
    for scale, prefix in steps:
        if abs(value) >= scale:
            return f"{value / scale:.{digits}g} {prefix}{unit}"
    return f"{value:.{digits}g} {unit}"
