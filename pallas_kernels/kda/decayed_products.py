"""Key-key and query-key products of one chunk with their decay, in 16-token tiles.

Every pair (i, j) needs Σ_d x_i[d] e^{G_i[d] - G_j[d]} k_j[d], with G the running log-decay. Two
neighbouring blocks meet at a boundary, and e^{G_i - G_j} is the decay from the boundary to i times
the decay from j to the boundary. Both are products of decays in [0, 1]: no exponential overflows,
nothing is a difference of large sums, and g = -1e4 is exact. Blocks double until they fill the
chunk. They start as 16-token tiles when the gate is bounded, as single tokens otherwise.

A document's first token decays everything before it to zero; nothing else separates documents.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda.triangular import TILE, lower_blocks
from pallas_kernels.precision import einsum

# Centre of the two factors of a bounded tile, a power of two so that it rounds nothing: with
# g ≥ -5 they stay between e^-40.5 and e^40.5, where neither float32 nor its square overflows.
_CENTRE = 2.0**57


class Products(NamedTuple):
    """Pairwise products of every block, and each token's decay to the ends of its block.

    n blocks of c tokens; "head" decays from the start of the block through the token itself,
    "tail" from behind the token to the end of the block.

    Attributes:
      kk: [B, H, n, c, c], products of k_i and k_j for i > j, else 0.
      qk: [B, H, n, c, c], products of q_i and k_j for i ≥ j, else 0.
      k_head: [B, H, n, c, K].
      q_head: [B, H, n, c, K].
      k_tail: [B, H, n, c, K].
      whole: [B, H, n, K], decay over the block.
    """

    kk: jax.Array
    qk: jax.Array
    k_head: jax.Array
    q_head: jax.Array
    k_tail: jax.Array
    whole: jax.Array


def chunk_products(
    q: jax.Array, k: jax.Array, g: jax.Array, starts: jax.Array | None, bounded: bool
) -> Products:
    """Products of one chunk.

    Args:
      q: [B, H, C, K], scaled.
      k: [B, H, C, K].
      g: [B, H, C, K], log-decay ≤ 0.
      starts: bool [B, C], True where a new document begins; None when none does.
      bounded: whether g ≥ -5 is known, which makes a tile one dense product.

    Returns:
      `Products` with n = 1 and c = C, the block axis dropped.
    """
    blocks = (_bounded_tiles if bounded else _single_tokens)(q, k, g, starts)
    while blocks.kk.shape[2] > 1:
        blocks = _merge(blocks)
    return Products(*(x[:, :, 0] for x in blocks))


def document_index(starts: jax.Array) -> jax.Array:
    """Number of documents begun so far along the last axis, int32; a cumulative sum, short axes."""
    lower = np.tril(np.ones((starts.shape[-1],) * 2, bool))
    return jnp.sum(starts[..., None, :] & lower, axis=-1, dtype=jnp.int32)


def _bounded_tiles(q, k, g, starts) -> Products:
    B, H, C, K = k.shape
    q, k, g = (x.reshape(B, H, C // TILE, TILE, K) for x in (q, k, g))
    upto = np.tril(np.ones((TILE, TILE), bool))
    nth = None
    if starts is not None:
        nth = document_index(starts.reshape(B, 1, C // TILE, TILE))
        # Summing inside a document only, its results do not depend on the others' gates.
        upto = upto & (nth[..., :, None] == nth[..., None, :])
    # Batched like g and sharded like it: a plain constant would put the result's axes in an order
    # that every later product has to transpose.
    running = jnp.zeros_like(g[..., :1]) + upto
    total = einsum("...ij,...jk->...ik", running, g)
    # The centre is multiplied, not added to the exponent: no decay must stay exactly 1 over any
    # number of tiles. And e^-x is not 1/e^x, whose second derivative leaves float32.
    centred = jnp.exp(total) * _CENTRE
    k_row, q_row, k_column = k * centred, q * centred, k * (jnp.exp(-total) / _CENTRE)
    eye = np.eye(TILE, dtype=bool)
    kk = jnp.where(upto & ~eye, einsum("...ik,...jk->...ij", k_row, k_column), 0)
    qk = jnp.where(upto & ~eye, einsum("...ik,...jk->...ij", q_row, k_column), 0)
    # The diagonal has no decay. Left in the product above, its gate gradient would be the
    # difference of two equal numbers, noise larger than the signal of a fast gate.
    qk = qk + eye * jnp.sum(q * k, axis=-1, keepdims=True)
    last = centred[..., -1:, :]
    back = 1 / _CENTRE
    tiles = Products(kk, qk, k_row * back, q_row * back, k_column * last, last[..., 0, :] * back)
    return tiles if nth is None else _cut(tiles, nth)


def _cut(tiles: Products, nth: jax.Array) -> Products:
    """Lets nothing pass a document's start: `nth` [B, 1, n, 16] counts the starts in a tile."""
    reached, lasting = nth == 0, nth == nth[..., -1:]
    return tiles._replace(
        k_head=jnp.where(reached[..., None], tiles.k_head, 0),
        q_head=jnp.where(reached[..., None], tiles.q_head, 0),
        k_tail=jnp.where(lasting[..., None], tiles.k_tail, 0),
        whole=jnp.where(reached[..., -1:], tiles.whole, 0),
    )


def _single_tokens(q, k, g, starts) -> Products:
    decay = jnp.exp(g)
    if starts is not None:
        decay = jnp.where(starts[:, None, :, None], 0, decay)
    q, k, head = (x[..., None, :] for x in (q, k, decay))
    qk = jnp.sum(q * k, axis=-1, keepdims=True)
    return Products(jnp.zeros_like(qk), qk, k * head, q * head, k, decay)


def _merge(blocks: Products) -> Products:
    """Joins blocks 2i and 2i + 1."""
    first, second = (Products(*(x[:, :, half::2] for x in blocks)) for half in (0, 1))
    before, after = first.whole[..., None, :], second.whole[..., None, :]
    return Products(
        lower_blocks(
            first.kk, einsum("...ik,...jk->...ij", second.k_head, first.k_tail), second.kk
        ),
        lower_blocks(
            first.qk, einsum("...ik,...jk->...ij", second.q_head, first.k_tail), second.qk
        ),
        jnp.concatenate([first.k_head, second.k_head * before], axis=-2),
        jnp.concatenate([first.q_head, second.q_head * before], axis=-2),
        jnp.concatenate([first.k_tail * after, second.k_tail], axis=-2),
        first.whole * second.whole,
    )
