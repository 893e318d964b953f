"""Quantile Balancing of the router (§2.3.3, Eq. 14, Apps. C and D), as pure functions.

With scores s_ij of token i and expert j, and the k experts of largest s_ij + b_j chosen, alpha_i is
the (k+1)-th largest biased score. r_ij = alpha_i - s_ij is the bias at which expert j enters token
i's choice, so the bias that q = m k / n of the m tokens accept is the q-th smallest of r_:,j. Mean
over experts is taken off, which changes no choice. The result routes the *next* step; no gradient.
"""

import jax
import jax.numpy as jnp


def exact_bias(scores: jax.Array, bias: jax.Array, k: int) -> jax.Array:
    """Next bias from all scores of a step: the oracle of `bias_from_histogram`.

    Every value between the q-th and the next smallest r_:,j balances column j; this takes the
    ([q] + 1)-th smallest, the (q+1)-th largest margin of Eq. 14.

    Args:
      scores: [m, n] float32, router scores of every token of the global batch.
      bias: [n] float32, the bias they were routed with.
      k: experts per token.

    Returns:
      [n] float32 of mean zero.

    Raises:
      ValueError: k is not between 1 and n - 1.
    """
    m, n = scores.shape
    _require_rejected_expert(k, n)
    alpha = jax.lax.top_k(scores + bias, k + 1)[0][:, -1:]
    required = jnp.sort(alpha - scores, axis=0)
    return _centre(required[m * k // n])


def histogram_quantile(histogram: jax.Array, low: jax.Array, width: jax.Array, k: int) -> jax.Array:
    """The q-th smallest required bias of each expert, to within one bin.

    With c the count before the first bin beta whose cumulative count reaches ceil(q), and h the
    count in it: low + (beta + clip((q - c) / h, 0, 1)) width. Here q = k / n times the tokens that
    the row itself counted, so padding left out, or every token counted twice by a recomputed
    forward pass, changes nothing.

    Args:
      histogram: [..., n, B] int32 counts of r_ij in B bins of `width` from `low`, summed over
        micro-batches and devices.
      low: [...] float32, lower edge of the first bin.
      width: [...] float32.
      k: experts per token.

    Returns:
      [..., n] float32, not centred; `low` for a row that counted nothing.

    Raises:
      ValueError: k is not between 1 and n - 1.
    """
    n, bins = histogram.shape[-2:]
    _require_rejected_expert(k, n)
    counted = jnp.sum(histogram, axis=-1)
    # q = whole + part / n in integers: float32 cannot hold a count above 2^24, int32 no product.
    whole = counted // n * k + counted % n * k // n
    part = counted % n * k % n
    target = whole + (part > 0)
    before = jnp.cumsum(histogram, axis=-1) < target[..., None]
    index = jnp.sum(before, axis=-1)
    below = jnp.sum(jnp.where(before, histogram, 0), axis=-1)
    inside = jnp.sum(jnp.where(jnp.arange(bins) == index[..., None], histogram, 0), axis=-1)
    rest = (whole - below).astype(jnp.float32) + part / n
    fraction = jnp.clip(rest / jnp.maximum(inside, 1), 0, 1)
    return low[..., None] + (index + fraction) * width[..., None]


def bias_from_histogram(
    histogram: jax.Array, low: jax.Array, width: jax.Array, bias: jax.Array, k: int
) -> jax.Array:
    """Next bias from the histograms that the forward passes of a step counted (App. D).

    Integer counts make the result independent of the order and the place of counting. Call it once
    per optimizer step, after the update.

    Args:
      histogram: [..., n, B] int32, as in `histogram_quantile`.
      low: [...] float32.
      width: [...] float32.
      bias: [..., n] float32, the present bias; kept where a layer counted no token.
      k: experts per token.

    Returns:
      [..., n] float32, of mean zero over experts where tokens were counted.

    Raises:
      ValueError: k is not between 1 and n - 1.
    """
    new = _centre(histogram_quantile(histogram, low, width, k))
    counted = jnp.min(jnp.sum(histogram, axis=-1), axis=-1, keepdims=True) > 0
    return jnp.where(counted, new, bias)


def max_violation(load: jax.Array) -> jax.Array:
    """max_j load_j / mean load - 1 over the last axis: [..., n] -> [...] float32, 0 if no load."""
    load = load.astype(jnp.float32)
    mean = jnp.mean(load, axis=-1)
    return jnp.where(mean > 0, jnp.max(load, axis=-1) / jnp.where(mean > 0, mean, 1) - 1, 0.0)


def dead_experts(load: jax.Array) -> jax.Array:
    """Number of experts without a token: [..., n] -> [...] int32; 0 if no token was counted."""
    dead = jnp.sum(load == 0, axis=-1, dtype=jnp.int32)
    return jnp.where(dead == load.shape[-1], 0, dead)


def _centre(bias: jax.Array) -> jax.Array:
    return bias - jnp.mean(bias, axis=-1, keepdims=True)


def _require_rejected_expert(k: int, n: int) -> None:
    """Raises unless some expert is rejected: the (k+1)-th score is what the rule compares with."""
    if not 1 <= k < n:
        raise ValueError(
            f"top_k={k} of {n} experts: balancing compares with the first rejected expert, so "
            f"1 <= top_k <= {n - 1}; add an expert or lower top_k"
        )
