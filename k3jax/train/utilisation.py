"""Known devices, and what share of a device's peak a run's model FLOPs make up (MFU)."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

GIB = 1 << 30


class Device(NamedTuple):
    """One kind of accelerator.

    Attributes:
      memory: nominal bytes.
      peak: dense bfloat16 FLOP/s of its matrix units, without sparsity.
      source: where both come from.
    """

    memory: int
    peak: float
    source: str


# Short name -> device. A kind as JAX reports it ("NVIDIA H100 80GB HBM3") belongs to the first
# name that it contains, so the longer of two names stands first.
DEVICES = {
    "A100": Device(80 * GIB, 312e12, "NVIDIA A100 80GB data sheet"),
    "H100 PCIe": Device(80 * GIB, 756e12, "NVIDIA H100 data sheet, PCIe"),
    "H100 NVL": Device(94 * GIB, 835e12, "NVIDIA H100 data sheet, NVL"),
    "H100": Device(80 * GIB, 989e12, "NVIDIA H100 data sheet, SXM"),
    "H200": Device(141 * GIB, 989e12, "NVIDIA H200 data sheet, SXM"),
    "B200": Device(180 * GIB, 2.25e15, "NVIDIA DGX B200 data sheet, an eighth of the system"),
    "L40S": Device(48 * GIB, 362e12, "NVIDIA L40S data sheet"),
    "L40": Device(48 * GIB, 181e12, "NVIDIA L40 data sheet"),
    "L4": Device(24 * GIB, 121e12, "NVIDIA L4 data sheet"),
}


def known_device(kind: str) -> Device | None:
    """The table's row of a device kind, or None."""
    return next((device for name, device in DEVICES.items() if name in kind), None)


def memory_bytes(text: str) -> int:
    """Bytes of "80" (GiB) or of a device's name, as "H200".

    Raises:
      ValueError: it is neither.
    """
    if text in DEVICES:
        return DEVICES[text].memory
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise ValueError(
            f"device memory {text!r}: a number of GiB above 0, or one of {', '.join(DEVICES)}"
        )
    return int(size * GIB)


def peak_flops(device: jax.Device | None = None) -> tuple[float | None, str]:
    """Peak FLOP/s of one device and where the number comes from; None for an unknown accelerator.

    A data sheet's number where there is one. A CPU's is measured, in float32, over all its cores:
    one figure for the whole host, however many devices JAX has cut it into.

    Args:
      device: the first one by default.
    """
    device = device or jax.devices()[0]
    row = known_device(device.device_kind)
    if row is not None:
        return row.peak, f"dense bfloat16, {row.source}"
    if device.platform == "cpu":
        side = 1536
        return matmul_flops(side), f"measured here: float32 products of {side} x {side} matrices"
    return None, f"no peak is known for {device.device_kind!r}; add it to DEVICES"


def matmul_flops(side: int = 1536, seconds: float = 0.5, clock=time.perf_counter) -> float:
    """FLOP/s of float32 products of two square matrices, the best of what `seconds` allow.

    Args:
      side: rows and columns; 1536 is past the point where more of them run faster on two cores.
      seconds: measured for at least this long, and over three products at least.
      clock: returns seconds.
    """
    multiply = jax.jit(lambda a: jnp.dot(a, a, precision=jax.lax.Precision.HIGHEST))
    matrix = jnp.full((side, side), 0.5, jnp.float32)
    multiply(matrix).block_until_ready()  # compiles
    times, begin = [], clock()
    while len(times) < 3 or clock() - begin < seconds:
        start = clock()
        multiply(matrix).block_until_ready()
        times.append(clock() - start)
    return 2 * side**3 / min(times)


def utilisation(tokens_per_second: float, flops_per_token: float, peak: float) -> float:
    """Share of the peak that went into the model's own FLOPs, in [0, 1] if all three are right.

    Args:
      tokens_per_second: of the whole run.
      flops_per_token: `counting.flops_per_token`: forward and backward, nothing recomputed.
      peak: FLOP/s of all devices together.

    Raises:
      ValueError: the peak is not above 0.
    """
    if not peak > 0:
        raise ValueError(f"peak={peak} FLOP/s: must be above 0; take it from peak_flops()")
    return tokens_per_second * flops_per_token / peak
