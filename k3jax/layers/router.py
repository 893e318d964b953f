"""Router: sigmoid scores, biased top-k, and the margins Quantile Balancing needs (§2.3.3)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# What moves the balancing bias, or stands in its place; `MoeConfig` describes each.
Balancing = Literal["quantile", "histogram", "sign", "aux_loss", "none"]


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
    """What one or more MoE layers report for balancing; leading axis L when stacked.

    Attributes:
      load: [L, E] int32, tokens routed to each expert.
      histogram: [L, E, bins] int32, tokens by required bias r = α - s; "histogram" only.
      low: [L] float32, left edge of the first bin; "histogram" only.
      width: [L] float32, bin width; "histogram" only.
      required: [L, B, T, E] float32, r of every token, inf for padding; "quantile" only.
      score_sum: [L, E] float32, Σ over tokens of s / Σ_experts s, the only entry with a gradient;
        "aux_loss" only.
    """

    load: jax.Array
    histogram: jax.Array | None = None
    low: jax.Array | None = None
    width: jax.Array | None = None
    required: jax.Array | None = None
    score_sum: jax.Array | None = None


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


def statistics(
    routing: Routing,
    bias: jax.Array,
    counted: jax.Array,
    bins: int,
    balancing: Balancing = "histogram",
) -> RouterStats:
    """What one layer reports of this device's tokens.

    Args:
      routing: of S tokens.
      bias: [E], the bias the tokens were routed with.
      counted: [S] bool, False for padding.
      bins: number of uniform bins.
      balancing: decides what is reported besides the load. `required` is [S, E] here.
    """
    load = _load(routing, counted, bias.shape[0])
    if balancing == "histogram":
        histogram, low, width = _histogram(routing, bias, counted, bins)
        return RouterStats(load, histogram, low, width)
    if balancing == "quantile":
        required = jnp.where(counted[:, None], _required(routing), jnp.inf)
        return RouterStats(load, required=required)
    if balancing == "aux_loss":
        share = routing.scores / jnp.sum(routing.scores, axis=-1, keepdims=True)
        return RouterStats(load, score_sum=jnp.sum(jnp.where(counted[:, None], share, 0.0), axis=0))
    return RouterStats(load)


def _required(routing: Routing) -> jax.Array:
    """[S, E] r = α - s, without gradient."""
    return lax.stop_gradient(routing.cutoff[:, None] - routing.scores)


def _load(routing: Routing, counted: jax.Array, experts: int) -> jax.Array:
    """[E] int32 counts of the chosen experts."""
    routes = jnp.where(counted[:, None], routing.indices, experts)
    # Zeros made of the routes carry the tokens' device axes.
    zero = jnp.zeros((experts,), jnp.int32) * routes[0, 0]
    return zero.at[routes.reshape(-1)].add(1, mode="drop")


def _histogram(
    routing: Routing, bias: jax.Array, counted: jax.Array, bins: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Histogram of required biases (App. D): [E, bins] int32, left edge and width of the bins.

    The range is [b_min - 1, b_max + 1]: scores lie in (0, 1), so every r = α - s falls inside.
    """
    E, bias = bias.shape[0], lax.stop_gradient(bias)
    low = jnp.min(bias) - 1.0
    width = (jnp.max(bias) - jnp.min(bias) + 2.0) / bins
    index = jnp.clip(jnp.floor((_required(routing) - low) / width), 0, bins - 1).astype(jnp.int32)
    flat = index + jnp.arange(E, dtype=jnp.int32) * bins
    count = jnp.broadcast_to(counted[:, None], flat.shape).astype(jnp.int32)
    zero = jnp.zeros((E * bins,), jnp.int32) * flat[0, 0]  # carries the tokens' device axes
    histogram = zero.at[flat.reshape(-1)].add(count.reshape(-1)).reshape(E, bins)
    return histogram, low, width
