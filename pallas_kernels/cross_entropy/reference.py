"""Cross-entropy with all logits at once, in float32: the oracle, never wrapped."""

import jax
import jax.numpy as jnp

from pallas_kernels.precision import dot


def reference_cross_entropy(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    chunk_size: int | None = None,
) -> jax.Array:
    """sum_i weights_i (logsumexp_v(x_i w_v) - x_i w_{targets_i}); arguments as `cross_entropy`."""
    del chunk_size
    weights = jax.lax.stop_gradient(weights)
    x = jnp.where(weights[:, None] != 0, x, 0).astype(jnp.float32)
    logits = dot(x, w.astype(jnp.float32))
    log_p = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(log_p, targets[:, None], axis=-1, mode="clip")[:, 0]
    return -jnp.sum(weights * chosen)


def unsupported(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    chunk_size: int | None = None,
) -> str | None:
    """Why the reference cannot serve a call: it has no chunks whose size could be set."""
    return None if chunk_size is None else f"has no chunks, got chunk_size {chunk_size}"
