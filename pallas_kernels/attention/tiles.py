"""The score matrix cut into tiles: how large, which exist, and what a tile may see."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Score of a pair that is not allowed. Finite, so that a row of such scores gives exp(0) and not
# exp(-inf + inf); the first allowed score in the row multiplies that garbage by exactly 0.
MASKED = -0.7 * float(np.finfo(np.float32).max)

# Scores in one tile over all rows and heads. On CPU a float32 tile of 2 MiB stays in the second
# level cache, which is worth a factor of two to three; elsewhere a tile has to fill the device.
_CPU_SCORES = 2**19
_SCORES = 2**25


class Plan(NamedTuple):
    """Static shape of one call.

    Attributes:
      queries: T.
      keys: S.
      query_block: rows of a tile.
      key_block: columns of a tile.
      causal: query i sees key j only if j <= i + S - T.
      scale: factor on q·k.
      out_dtype: dtype of the output.
    """

    queries: int
    keys: int
    query_block: int
    key_block: int
    causal: bool
    scale: float
    out_dtype: np.dtype


def default_block(rows: int) -> int:
    """Block length for `rows` = B H: a power of two in [64, 512] that fits the cache budget."""
    budget = _CPU_SCORES if jax.default_backend() == "cpu" else _SCORES
    side = int((budget / max(rows, 1)) ** 0.5)
    return min(max(1 << (side.bit_length() - 1), 64), 512)


def even_block(length: int, block: int) -> int:
    """The block at most about `block` long that cuts `length` into equal parts, for little padding.

    A multiple of eight, the width of a vector register, unless one block holds everything.
    """
    parts = -(-length // block)
    return min(-(-length // (8 * parts)) * 8, length)


def tile_starts(plan: Plan) -> np.ndarray:
    """[N, 2] int32: first query and first key of every tile with an allowed pair, row by row."""
    rows = range(0, plan.queries, plan.query_block)
    columns = range(0, plan.keys, plan.key_block)
    last_seen = plan.query_block - 1 + plan.keys - plan.queries
    pairs = [(i, j) for i in rows for j in columns if not plan.causal or j <= i + last_seen]
    return np.asarray(pairs, np.int32)


def allowed(
    plan: Plan, i: jax.Array, j: jax.Array, query_ids: jax.Array | None, key_ids: jax.Array | None
) -> jax.Array:
    """Which pairs of the tile at (i, j) attend; broadcasts against [B, H, query, key].

    Args:
      plan: the call.
      i: first query, scalar.
      j: first key, scalar.
      query_ids: [B, query] documents of the tile's queries, 0 = padding; None: all one document.
      key_ids: [B, key] likewise.
    """
    shape = (plan.query_block, plan.key_block)
    query = i + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    key = j + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = key < plan.keys  # the last block may be longer than what is left
    if plan.causal:
        mask &= key <= query + (plan.keys - plan.queries)
    mask = mask[None, None]
    if query_ids is not None:
        query_ids, key_ids = query_ids[:, None, :, None], key_ids[:, None, None, :]
        mask = mask & (query_ids == key_ids) & (key_ids != 0)
    return mask
