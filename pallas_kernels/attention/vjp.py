"""The only custom VJP of attention: chunked forward, chunked backward, and what is kept.

Kept per token and head: q and k (K each), v and o (V each) in their dtypes, and the logsumexp in
float32, that is 4 bytes; no probabilities. Under a remat policy that names `attention_output` and
`attention_logsumexp` the backward pass does not run the forward one again.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import chunked, tiles


def chunked_attention(
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
    """Attention by tiles; arguments and results as `reference_attention`."""
    B, T, H, _ = q.shape
    S = k.shape[1]
    block = tiles.default_block(B * H) if block_size is None else block_size
    blocks = tiles.even_block(T, block), tiles.even_block(S, block)
    plan = tiles.Plan(T, S, *blocks, causal, scale, out_dtype)
    o, top = _attend(plan, q, k, v, query_ids, key_ids)
    return o, jax.lax.stop_gradient(jnp.where(top > tiles.MASKED, top, -jnp.inf))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, q, k, v, query_ids, key_ids):
    o, _, m = chunked.forward(plan, q, k, v, query_ids, key_ids)
    return o, jnp.max(m, axis=(0, 2, 3))


def _attend_forward(plan, q, k, v, query_ids, key_ids):
    o, logsumexp, m = chunked.forward(plan, q, k, v, query_ids, key_ids)
    o = checkpoint_name(o, "attention_output")
    logsumexp = checkpoint_name(logsumexp, "attention_logsumexp")
    return (o, jnp.max(m, axis=(0, 2, 3))), (q, k, v, query_ids, key_ids, o, logsumexp)


def _attend_backward(plan, kept, cotangents):
    do, _ = cotangents  # the maximum is for QK-Clip and carries no gradient
    return *chunked.backward(plan, *kept, do=do), None, None


_attend.defvjp(_attend_forward, _attend_backward)
