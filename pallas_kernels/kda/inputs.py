"""From the caller's arrays to the recurrence's: padding cleared, norms, gate, scale, float32."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.gate import log_decay


class Tokens(NamedTuple):
    """What one token contributes. Leading axes are free; the last two are [H, K] or [H, V].

    Attributes:
      q: [..., H, K].
      k: [..., H, K].
      v: [..., H, V].
      g: [..., H, K], log-decay after `prepare`, the caller's log-decay or logits before.
      beta: [..., H].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class GateWeights(NamedTuple):
    """Trained arrays of the gate; both None when the caller passes log-decay."""

    a_log: jax.Array | None
    dt_bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Options:
    """Static choices of one call, the same for every implementation.

    Attributes:
      scale: factor on q.
      qk_l2norm: whether q and k are normalised here.
      lower_bound: of the bounded gate, None for the softplus gate.
      num_segments: states per row when states go in or out with segment ids, else None.
      return_final_state: whether a final state is wanted.
      chunk_size: tokens per chunk, None for the default; only the chunked form has chunks.
    """

    scale: float
    qk_l2norm: bool = False
    lower_bound: float | None = None
    num_segments: int | None = None
    return_final_state: bool = False
    chunk_size: int | None = None


def compute_dtype(tokens: Tokens) -> jnp.dtype:
    """float32, or float64 when any input has it."""
    return jnp.result_type(jnp.float32, *(x.dtype for x in tokens))


def l2_normalize(x: jax.Array) -> jax.Array:
    """x · rsqrt(Σ x² + 1e-6) over the last axis; a zero row gives zero with zero gradient."""
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    # The derivative at an exact zero is 1e3, an artefact of the epsilon; zero is chosen instead.
    return x * jnp.where(square > 0, jax.lax.rsqrt(square + 1e-6), 0)


def prepare(tokens: Tokens, live: jax.Array | None, gate: GateWeights, options: Options) -> Tokens:
    """Inputs of the recurrence: what a padding token holds is never looked at.

    Args:
      tokens: as the caller gave them, a whole row or any slice of it.
      live: bool over the leading axes, False at padding; None when every token is live.
      gate: see `GateWeights`.
      options: see `Options`.

    Returns:
      Tokens in the compute dtype. At padding every field is zero, so that the state passes
      through; the gradient there is exactly zero.
    """
    dtype = compute_dtype(tokens)
    tokens = Tokens(*(clear_padding(x.astype(dtype), live) for x in tokens))
    q, k, v, g, beta = tokens
    if options.qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    if gate.a_log is not None:
        # Cleared once more: a gate turns the zero logits of padding into a decay.
        g = clear_padding(log_decay(g, gate.a_log, gate.dt_bias, options.lower_bound), live)
    return Tokens(q * options.scale, k, v, g, beta)


def clear_padding(x: jax.Array, live: jax.Array | None) -> jax.Array:
    """Zeroes x where `live`, over x's leading axes, is False."""
    if live is None:
        return x
    return jnp.where(jnp.expand_dims(live, tuple(range(live.ndim, x.ndim))), x, 0)
