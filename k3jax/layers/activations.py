"""Gated activations of the feed-forward layers (Eq. 12, App. B)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax

from pallas_kernels import situ_glu


@dataclasses.dataclass(frozen=True)
class ActivationConfig:
    """SiTU-GLU caps the gate at `beta` and the linear branch at `linear_beta` (None: no cap)."""

    kind: Literal["situ", "swiglu"] = "situ"
    beta: float = 4.0
    linear_beta: float | None = 25.0

    def __post_init__(self):
        if self.kind not in ("situ", "swiglu"):
            raise ValueError(f"activation.kind={self.kind!r}: choose 'situ' or 'swiglu'")
        for name in ("beta", "linear_beta"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"activation.{name}={value}: a cap is positive; 4 and 25 in K3")


@functools.lru_cache
def gated(cfg: ActivationConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The function act(gate, up) that `cfg` names; equal configurations give one object.

    `expert_ffn` needs that: a new object makes jit compile again.
    """
    if cfg.kind == "swiglu":
        return situ_glu.swiglu
    return lambda g, u: situ_glu.situ_glu(g, u, beta=cfg.beta, linear_beta=cfg.linear_beta)
