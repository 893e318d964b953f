"""Gated activations (§2.3, Eq. 12, App. B).

| file | idea |
| --- | --- |
| `api.py` | `situ_glu` and `swiglu`: contracts, checks and gradients |
| `reference.py` | the equations, the oracles |
"""

from pallas_kernels.situ_glu.api import situ_glu, swiglu

__all__ = ["situ_glu", "swiglu"]
