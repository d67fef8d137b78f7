"""What every kernel model shares: the result, the smooth maximum, the way fitted numbers meet a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: A number or an array; every argument of a kernel model broadcasts against the others.
Num = float | npt.NDArray[np.float64]
Array = npt.NDArray[np.float64]
#: Named fitted numbers: seconds as they are, rates as shares of a profile's peaks, so that they carry over to a GPU never measured.
Params = Mapping[str, float]

#: Order of `KernelTime` parts, and the words that name them.
BOUNDS = ("memory", "compute", "launch")

#: Exponents whose powers and roots are repeated squares and square roots, and how many.
SQUARINGS = {1.0: 0, 2.0: 1, 4.0: 2, 8.0: 3}


class KernelTime(NamedTuple):
    """Seconds of one kernel and its parts. `time_s` is not their sum: memory and compute overlap."""

    time_s: Array
    memory_s: Array
    compute_s: Array
    fixed_s: Array

    def bound(self) -> npt.NDArray[np.str_]:
        """What binds, element by element: memory, compute or launch (the largest part)."""
        parts = np.stack(np.broadcast_arrays(self.memory_s, self.compute_s, self.fixed_s))
        return np.asarray(np.asarray(BOUNDS)[np.argmax(parts, axis=0)], dtype=np.str_)


def as_array(value: object) -> Array:
    """float64 view of a number or array."""
    return np.asarray(value, dtype=np.float64)


def kernel_time(time: object, memory: object, compute: object, fixed: object) -> KernelTime:
    """The four parts broadcast to one shape."""
    parts = np.broadcast_arrays(as_array(time), as_array(memory), as_array(compute), as_array(fixed))
    return KernelTime(parts[0], parts[1], parts[2], parts[3])


def smooth_max(a: Array, b: Array, p: float) -> Array:
    """(a^p + b^p)^(1/p): the p-norm knee between two overlapping costs; p = inf is max, p = 1 no overlap at all."""
    high = np.maximum(a, b)
    if not np.isfinite(p):
        return high
    # in place and in powers of two: most of the time of a plan is spent here
    x = np.asarray(np.minimum(a, b) / np.maximum(high, 1e-300))
    if (squarings := SQUARINGS.get(p)) is not None:  # a third of the time of logarithms
        for _ in range(squarings):
            x *= x
        x += 1.0
        for _ in range(squarings):
            np.sqrt(x, out=x)
        x *= high
        return x
    with np.errstate(divide="ignore"):
        np.log2(x, out=x)
    x *= p
    np.exp2(x, out=x)
    x += 1.0
    np.log2(x, out=x)
    x /= p
    np.exp2(x, out=x)
    x *= high
    return x


def log_interp(x: Array, log_nodes: Array, values: Array) -> Array:
    """exp of the linear interpolation of `values` over log(x), constant outside. Two neighbouring nodes (64, 65) make a step."""
    return np.asarray(np.exp(np.interp(np.log(x), log_nodes, values)), dtype=np.float64)
