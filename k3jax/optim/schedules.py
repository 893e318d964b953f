"""Learning rate as a function of the step alone, never of the clock (§3.3)."""

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.Array | int], jax.Array]
Kind = Literal["cosine", "constant"]


def check_kind(kind: str) -> None:
    """Refuses a schedule that does not exist.

    Raises:
      ValueError: `kind` is not one of `Kind`.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"schedule={kind!r}: choose from {', '.join(get_args(Kind))}")


def warmup_steps(total_steps: int, fraction: float) -> int:
    """Length of the warm-up: `fraction` of the run, at least one step."""
    return max(1, round(fraction * total_steps))


def make_schedule(
    kind: Kind, peak: float, total_steps: int, warmup_fraction: float, min_ratio: float
) -> Schedule:
    """Linear warm-up, then a cosine from `peak` to `min_ratio * peak`, or `peak` held.

    Step s = 0, 1, ... gets the rate of the end of its interval: with W warm-up steps of N, the rate
    is peak (s + 1) / W for s < W, so the first update is not zero and step W - 1 is at the peak;
    afterwards peak (r + (1 - r) (1 + cos(pi x)) / 2) with x = (s + 1 - W) / (N - W) and
    r = min_ratio, so step N - 1 is at the minimum exactly. Later steps stay there.

    Returns:
      step (int32 scalar or int) -> float32 scalar.

    Raises:
      ValueError: `kind` is unknown or `total_steps` is below 1.
    """
    check_kind(kind)
    if total_steps < 1:
        raise ValueError(
            f"total_steps={total_steps}: a schedule needs at least one step; set train.steps to 1 "
            "or more"
        )
    warmup = warmup_steps(total_steps, warmup_fraction)

    def rate(step: jax.Array | int) -> jax.Array:
        done = jnp.asarray(step, jnp.float32) + 1
        after = jnp.clip((done - warmup) / max(1, total_steps - warmup), 0, 1)
        cosine = min_ratio + (1 - min_ratio) * (1 + jnp.cos(jnp.pi * after)) / 2
        decay = cosine if kind == "cosine" else jnp.ones_like(done)
        return peak * jnp.minimum(done / warmup, 1) * decay

    return rate
