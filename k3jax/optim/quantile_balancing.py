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
    _require_rejected_expert(k, scores.shape[-1])
    alpha = jax.lax.top_k(scores + bias, k + 1)[0][:, -1:]
    return bias_from_required((alpha - scores).T, bias, k)


def bias_from_required(required: jax.Array, bias: jax.Array, k: int, ema: float = 0.0) -> jax.Array:
    """Next bias from the required biases of all tokens of a step, `exact_bias` after its top-k.

    Args:
      required: [..., n, m] float32, r_ij of expert j and token i; inf for padding, which is left
        out of the count m.
      bias: [..., n] float32, the present bias; kept where a layer counted no token.
      k: experts per token.
      ema: share of the present bias in the next one. It averages the estimates over steps: the
        average of the quantiles, centred, is that of the centred ones, so the bias is all its
        state.

    Returns:
      [..., n] float32, of mean zero over experts where tokens were counted.

    Raises:
      ValueError: k is not between 1 and n - 1.
    """
    n, m = required.shape[-2:]
    _require_rejected_expert(k, n)
    ascending = jnp.sort(required, axis=-1)
    counted = jnp.sum(jnp.isfinite(ascending), axis=-1, dtype=jnp.int32)
    whole = _whole_and_rest(counted, k, n)[0]
    new = jnp.take_along_axis(ascending, whole[..., None], axis=-1)[..., 0]
    return _where_counted(counted, new, bias, ema)


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
    whole, part = _whole_and_rest(counted, k, n)
    target = whole + (part > 0)
    before = jnp.cumsum(histogram, axis=-1) < target[..., None]
    index = jnp.sum(before, axis=-1)
    below = jnp.sum(jnp.where(before, histogram, 0), axis=-1)
    inside = jnp.sum(jnp.where(jnp.arange(bins) == index[..., None], histogram, 0), axis=-1)
    rest = (whole - below).astype(jnp.float32) + part / n
    fraction = jnp.clip(rest / jnp.maximum(inside, 1), 0, 1)
    return low[..., None] + (index + fraction) * width[..., None]


def bias_from_histogram(
    histogram: jax.Array,
    low: jax.Array,
    width: jax.Array,
    bias: jax.Array,
    k: int,
    ema: float = 0.0,
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
      ema: as in `bias_from_required`.

    Returns:
      [..., n] float32, of mean zero over experts where tokens were counted.

    Raises:
      ValueError: k is not between 1 and n - 1.
    """
    new = histogram_quantile(histogram, low, width, k)
    return _where_counted(jnp.sum(histogram, axis=-1), new, bias, ema)


def max_violation(load: jax.Array) -> jax.Array:
    """max_j load_j / mean load - 1 over the last axis: [..., n] -> [...] float32, 0 if no load."""
    load = load.astype(jnp.float32)
    mean = jnp.mean(load, axis=-1)
    return jnp.where(mean > 0, jnp.max(load, axis=-1) / jnp.where(mean > 0, mean, 1) - 1, 0.0)


def dead_experts(load: jax.Array) -> jax.Array:
    """Number of experts without a token: [..., n] -> [...] int32; 0 if no token was counted."""
    dead = jnp.sum(load == 0, axis=-1, dtype=jnp.int32)
    return jnp.where(dead == load.shape[-1], 0, dead)


def _whole_and_rest(counted: jax.Array, k: int, n: int) -> tuple[jax.Array, jax.Array]:
    """q = counted k / n as whole + rest / n: float32 counts to 2^24, int32 products to 2^31."""
    return counted // n * k + counted % n * k // n, counted % n * k % n


def _where_counted(counted: jax.Array, new: jax.Array, bias: jax.Array, ema: float) -> jax.Array:
    """The next bias where every expert's row [..., n] counted tokens, elsewhere the present one."""
    new = _centre(new)
    new = new if ema == 0 else ema * bias + (1 - ema) * new
    return jnp.where(jnp.min(counted, axis=-1, keepdims=True) > 0, new, bias)


def _centre(bias: jax.Array) -> jax.Array:
    return bias - jnp.mean(bias, axis=-1, keepdims=True)


def _require_rejected_expert(k: int, n: int) -> None:
    """Raises unless some expert is rejected: the (k+1)-th score is what the rule compares with."""
    if not 1 <= k < n:
        raise ValueError(
            f"top_k={k} of {n} experts: balancing compares with the first rejected expert, so "
            f"1 <= top_k <= {n - 1}; add an expert or lower top_k"
        )
