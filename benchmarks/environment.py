"""What a measurement was made on: written into every file under `benchmarks/results`."""

import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Sequence

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def environment(command: Sequence[str]) -> dict:
    """Machine, versions and command as JSON values.

    Args:
      command: Words of the command line, the program first; its folder is left out.

    Returns:
      command; device, its kind and count; processor and cores this process may use; versions.
    """
    devices = jax.devices()
    program, *rest = command
    return {
        "command": " ".join(["python", "benchmarks/" + pathlib.Path(program).name, *rest]),
        "device": {"kind": devices[0].device_kind, "count": len(devices)},
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def processor(cpuinfo: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> str:
    """Model name of the processor, with its widest vectors where Linux tells."""
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    fields = {}
    for line in cpuinfo.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "")
    return " ".join(filter(None, [fields.get("model name", platform.machine()), widest]))
