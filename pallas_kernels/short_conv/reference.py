"""Oracle: one token at a time, a window of W - 1 inputs, float32, differentiated by JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.precision import einsum


def reference_short_conv(
    x: jax.Array,
    w: jax.Array,
    segment_ids: jax.Array | None,
    initial_state: jax.Array | None,
    return_final_state: bool,
    activation: str | None,
) -> tuple[jax.Array, jax.Array | None]:
    """`short_conv` as a recurrence over the window; arguments and results as there.

    Padding leaves the window alone, which is right before and behind a document; the contract has
    none inside.
    """
    B, T, C = x.shape
    ids = jnp.ones_like(x[:, :, 0], dtype=jnp.int32) if segment_ids is None else segment_ids
    state = initial_state
    if state is None:
        state = jnp.zeros_like(x, shape=(B, w.shape[1] - 1, C))

    def step(carry, token):
        window, current = carry
        x_t, id_t = token
        # Id 0 in the carry means that no document has begun, so the first one keeps the window.
        restarts = ((id_t != 0) & (current != 0) & (id_t != current))[:, None, None]
        counts = (id_t != 0)[:, None, None]
        past = jnp.where(restarts, 0.0, window)
        full = jnp.concatenate([past, jnp.where(counts, x_t[:, None], 0.0)], axis=1)
        y = einsum("bwc,cw->bc", full, w.astype(jnp.float32))
        y = y if activation is None else jax.nn.silu(y)
        window = jnp.where(counts, full[:, 1:], window)
        current = jnp.where(id_t != 0, id_t, current)
        return (window, current), jnp.where(counts[:, 0], y, 0.0)

    start = (state.astype(jnp.float32), jnp.zeros_like(ids[:, 0]))
    tokens = (jnp.moveaxis(x.astype(jnp.float32), 1, 0), jnp.moveaxis(ids, 1, 0))
    (window, _), y = jax.lax.scan(step, start, tokens)
    final = window.astype(state.dtype) if return_final_state else None
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), final
