"""Root-mean-square norms."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight ⊙ x·rsqrt(mean(x²) + eps) over the last axis.

    The statistics are float32; the normalised value is rounded to x's dtype before the weight
    multiplies it in that dtype, as in the released model. Plain weight, never 1 + weight.
    """
    return _normalise(x, eps).astype(x.dtype) * weight.astype(x.dtype)


def gated_rms_norm(x: jax.Array, weight: jax.Array, gate: jax.Array, eps: float) -> jax.Array:
    """RMS(x; weight) ⊙ σ(gate), all in float32 and rounded once to gate's dtype (§2.1.1)."""
    normed = _normalise(x, eps) * weight.astype(jnp.float32)
    return (normed * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)


def _normalise(x: jax.Array, eps: float) -> jax.Array:
    """x·rsqrt(mean(x²) + eps) over the last axis, float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
