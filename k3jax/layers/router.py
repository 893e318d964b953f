"""Router: sigmoid scores, biased top-k, and the margins Quantile Balancing needs (§2.3.3)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Routing(NamedTuple):
    """Where tokens go. S tokens, k experts each.

    Attributes:
      indices: [S, k] int32, by falling biased score; equal scores go to the lower expert id.
      weights: [S, k] float32; the bias is not in them.
      scores: [S, E] float32, σ of the logits.
      cutoff: [S] float32, α: the (k+1)-th biased score.
    """

    indices: jax.Array
    weights: jax.Array
    scores: jax.Array
    cutoff: jax.Array


class RouterStats(NamedTuple):
    """Counts of one or more MoE layers; leading axis L when stacked.

    Attributes:
      histogram: [L, E, bins] int32, tokens by required bias r = α - s.
      low: [L] float32, left edge of the first bin.
      width: [L] float32, bin width.
      load: [L, E] int32, tokens routed to each expert.
    """

    histogram: jax.Array
    low: jax.Array
    width: jax.Array
    load: jax.Array


def route(
    x: jax.Array,
    w_router: jax.Array,
    bias: jax.Array,
    top_k: int,
    *,
    scaling_factor: float = 1.0,
    renormalize: bool = True,
) -> Routing:
    """Eq. 13: T = top-k of s + b, weights s_i / Σ_T s.

    Everything is float32 at the highest matmul precision: a bfloat16 or TF32 product flips
    near-ties. The bias chooses experts and gets no gradient.

    Args:
      x: [S, D], the normed full-width input.
      w_router: [D, E].
      bias: [E] float32.
      top_k: k < E; one rejected expert gives the cutoff.
      scaling_factor: multiplies the weights.
      renormalize: divide by the sum over the chosen experts.
    """
    logits = jnp.dot(
        x.astype(jnp.float32), w_router.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(logits)
    biased = lax.stop_gradient(scores + bias)
    top, indices = lax.top_k(biased, top_k + 1)
    indices = indices[:, :top_k]
    chosen = jnp.take_along_axis(scores, indices, axis=-1)
    if renormalize:
        chosen = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
    return Routing(indices, chosen * scaling_factor, scores, top[:, top_k])


def statistics(routing: Routing, bias: jax.Array, counted: jax.Array, bins: int) -> RouterStats:
    """Histogram of required biases (App. D) and loads of one layer on this device.

    The range is [b_min - 1, b_max + 1]: scores lie in (0, 1), so every r = α - s falls inside.

    Args:
      routing: of S tokens.
      bias: [E], the bias the tokens were routed with.
      counted: [S] bool, False for padding.
      bins: number of uniform bins.
    """
    E = bias.shape[0]
    scores, cutoff, bias = lax.stop_gradient((routing.scores, routing.cutoff, bias))
    low = jnp.min(bias) - 1.0
    width = (jnp.max(bias) - jnp.min(bias) + 2.0) / bins
    required = cutoff[:, None] - scores
    index = jnp.clip(jnp.floor((required - low) / width), 0, bins - 1).astype(jnp.int32)
    flat = index + jnp.arange(E, dtype=jnp.int32) * bins
    count = jnp.broadcast_to(counted[:, None], flat.shape).astype(jnp.int32)
    zero = jnp.zeros((E * bins,), jnp.int32) * flat[0, 0]  # carries the tokens' device axes
    histogram = zero.at[flat.reshape(-1)].add(count.reshape(-1)).reshape(E, bins)
    routes = jnp.where(counted[:, None], routing.indices, E)
    load = (zero[:1] * jnp.ones((E,), jnp.int32)).at[routes.reshape(-1)].add(1, mode="drop")
    return RouterStats(histogram, low, width, load)
