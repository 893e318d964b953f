"""Dense softmax attention in float32: the oracle, differentiated by JAX and never wrapped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import tiles
from pallas_kernels.precision import einsum


def reference_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_ids: jax.Array | None,
    key_ids: jax.Array | None,
    *,
    causal: bool,
    scale: float,
    out_dtype: np.dtype,
    block_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax_j(scale q_i·k_j + mask_ij) v_j with all scores at once (§2.1.2).

    A row that sees nothing gives 0. Arguments as `attention`, ids already defaulted.

    Returns:
      o [B, T, H, V] and the largest allowed score of each head, [H] float32.
    """
    del block_size
    T, S = q.shape[1], k.shape[1]
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    whole = tiles.Plan(T, S, T, S, causal, scale, out_dtype)
    mask = tiles.allowed(whole, 0, 0, query_ids, key_ids)
    s = einsum("bthk,bshk->bhts", q, k) * scale
    s = jnp.where(mask, s, tiles.MASKED)
    top = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    p = jnp.where(mask, jnp.exp(s - top), 0.0)
    total = jnp.sum(p, axis=-1, keepdims=True)
    p = p / jnp.where(total > 0, total, 1.0)
    o = einsum("bhts,bshv->bthv", p, v)
    top = jnp.max(top[..., 0], axis=(0, 2))
    return o.astype(out_dtype), jnp.where(top > tiles.MASKED, top, -jnp.inf)


def unsupported(*_: Any, block_size: int | None = None, **__: Any) -> str | None:
    """Why the reference cannot serve a call: it has no blocks whose size could be set."""
    return None if block_size is None else f"has no blocks, got block_size {block_size}"
