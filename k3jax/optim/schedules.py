"""Learning rate as a function of the step alone, never of the clock (§3.3)."""

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.Array | int], jax.Array]
Kind = Literal["cosine", "wsd", "constant"]


def check_kind(kind: str) -> None:
    """Refuses a schedule that does not exist.

    Raises:
      ValueError: `kind` is not one of `Kind`.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"schedule={kind!r}: choose from {', '.join(get_args(Kind))}")


def share_of_steps(total_steps: int, fraction: float) -> int:
    """Length of the warm-up, or of the decay of `wsd`: a share of the run, at least one step."""
    return max(1, round(fraction * total_steps))


def make_schedule(
    kind: Kind,
    peak: float,
    total_steps: int,
    warmup_fraction: float,
    min_ratio: float,
    decay_fraction: float = 0.1,
) -> Schedule:
    """Linear warm-up to `peak`, then a cosine, a late decay, or `peak` held.

    Step s = 0, 1, ... gets the rate of the end of its interval: with W warm-up steps of N, the rate
    is peak (s + 1) / W for s < W, so the first update is not zero and step W - 1 is at the peak.
    Afterwards, with r = min_ratio, it is peak times

      cosine:  r + (1 - r) (1 + cos(pi x)) / 2,   x = (s + 1 - W) / (N - W)
      wsd:     r + (1 - r) (1 - sqrt(y)),         y = (s + 1 - (N - C)) / C over the last
               C = round(decay_fraction N) steps, 1 before them

    so step N - 1 is at the minimum exactly under both, and later steps stay there. "wsd" is
    warm-up, stable, decay; the form 1 - sqrt beat a straight line in the comparison of Hägele et
    al. (2024, arXiv:2405.18392). A decay that would begin inside the warm-up begins after it.

    The report found that cosine ended lower than WSD, and that the best learning rates of the two
    lie far apart: a comparison is fair only when each has had its own search for `peak`.

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
    warmup = share_of_steps(total_steps, warmup_fraction)
    start = warmup
    if kind == "wsd":
        start = max(warmup, total_steps - share_of_steps(total_steps, decay_fraction))

    def rate(step: jax.Array | int) -> jax.Array:
        done = jnp.asarray(step, jnp.float32) + 1
        after = jnp.clip((done - start) / max(1, total_steps - start), 0, 1)
        shape = {
            "cosine": (1 + jnp.cos(jnp.pi * after)) / 2,
            "wsd": 1 - jnp.sqrt(after),
            "constant": jnp.ones_like(done),
        }[kind]
        decay = shape if kind == "constant" else min_ratio + (1 - min_ratio) * shape
        return peak * jnp.minimum(done / warmup, 1) * decay

    return rate
