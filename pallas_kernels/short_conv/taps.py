"""The causal depthwise sum over W taps and its gradient, with documents as masks.

Every tap is a shift of the whole sequence, so XLA makes one fused pass forward and one per
gradient. Kept for the backward: the input, the taps and the ids; the pre-activation is recomputed.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def convolve(
    x: jax.Array, w: jax.Array, segment_ids: jax.Array | None, activation: str | None
) -> jax.Array:
    """activation(Σ_j w[:, W-1-j] x_{t-j}) over lags j inside the token's document.

    x: [B, T, C]; w: [C, W]; segment_ids: [B, T] or None for one document per row. Returns
    [B, T, C] in x's dtype, computed in float32, 0 at id 0.
    """
    return _forward(x, w, segment_ids, activation)[0]


def _forward(x, w, segment_ids, activation):
    y = _sum(x, w, _lonely_padding(segment_ids))
    y = y if activation is None else y * jax.nn.sigmoid(y)
    return y.astype(x.dtype), (x, w, segment_ids)


def _backward(activation, residuals, dy):
    x, w, segment_ids = residuals
    ids = _lonely_padding(segment_ids)
    d = dy.astype(jnp.float32)
    if activation is not None:
        y = _sum(x, w, ids)
        s = jax.nn.sigmoid(y)
        # Without the barrier XLA computes d again inside each of the reductions below.
        d = jax.lax.optimization_barrier(d * s * (1.0 + y * (1.0 - s)))
    # Likewise dx, again inside every product that reads it: six in a KDA layer.
    dx = jax.lax.optimization_barrier(_sum(d, w, ids, ahead=True))
    dw = [
        jnp.sum(_keep(_shift(x, lag).astype(jnp.float32) * d, ids, lag), axis=(0, 1))
        for lag in reversed(range(w.shape[1]))
    ]
    return dx.astype(x.dtype), jnp.stack(dw, axis=-1).astype(w.dtype), None


convolve.defvjp(_forward, _backward)


def _lonely_padding(segment_ids):
    """Gives every padding token a negative id of its own, so that equality alone separates."""
    if segment_ids is None:
        return None
    own = -1 - jnp.arange(segment_ids.shape[1], dtype=segment_ids.dtype)
    return jnp.where(segment_ids == 0, own, segment_ids)


def _sum(x, w, ids, ahead=False):
    """Σ_j w[:, W-1-j] x_{t-j} in float32, or of x_{t+j} with `ahead`: the transposed sum."""
    taps, total = w.astype(jnp.float32), None
    for lag in range(w.shape[1]):
        offset = -lag if ahead else lag
        term = taps[:, -1 - lag] * _shift(x, offset).astype(jnp.float32)
        term = _keep(term, ids, offset)
        total = term if total is None else total + term
    return total


def _keep(value, ids, offset):
    """Zeroes `value` [B, T, C] where tokens t and t - offset share no document.

    A document is contiguous, so equal ids are all it takes. The mask selects rather than
    multiplies: what it removes may be NaN.
    """
    if ids is None:
        return value
    inside = ids > 0 if offset == 0 else _shift(ids, offset) == ids
    return jnp.where(inside[..., None], value, 0.0)


def _shift(a, offset):
    """a_{t - offset} along axis 1, zeros entering."""
    if offset == 0:
        return a
    T, rest = a.shape[1], ((0, 0),) * (a.ndim - 2)
    if offset > 0:
        return jnp.pad(a, ((0, 0), (offset, 0), *rest))[:, :T]
    return jnp.pad(a, ((0, 0), (0, -offset), *rest))[:, -offset:]
