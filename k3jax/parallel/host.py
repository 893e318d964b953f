"""Makes the host CPU a faster device: memory that stays mapped, and full-width vectors.

XLA's CPU backend takes one large scratch block per call. glibc hands such blocks back to the
kernel at once, so every step pays for tens of thousands of page faults; keeping them mapped took
a forward and backward pass from 126 to 74 ms. Vectors of 512 bits, where the processor has them,
took a third off a training step. Neither changes what is computed.
"""

import ctypes
import os

# mallopt's parameter numbers in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_WIDE_VECTORS = "--xla_cpu_prefer_vector_width=512"


def prepare() -> None:
    """Call before the first computation; later calls, and other platforms, are left as they are."""
    if "xla_cpu_prefer_vector_width" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_WIDE_VECTORS}".strip()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc only: elsewhere large blocks stay mapped or cannot be kept
        mallopt(_MMAP_THRESHOLD, 2**31 - 1)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_ARENA_MAX, 1)
