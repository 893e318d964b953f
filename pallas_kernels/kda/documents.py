"""Which document a token belongs to, and which tokens share a state.

Segment ids are 0 at padding and otherwise do not decrease along a row. Padding inside a document
must not end it, so a padding token takes the id of the last live token before it.
"""

import jax
import jax.numpy as jnp


def carried_ids(segment_ids: jax.Array) -> jax.Array:
    """[B, T] ids with padding filled from the left; 0 before the first live token."""
    return jax.lax.cummax(segment_ids, axis=1)


def document_starts(ids: jax.Array) -> jax.Array:
    """bool [B, T] from `carried_ids`, True where the id changes; never at the first token."""
    return jnp.pad(ids[:, 1:] != ids[:, :-1], [(0, 0), (min(1, ids.shape[1]), 0)])


def with_states(
    segment_ids: jax.Array, segment_base: int | jax.Array, num_segments: int
) -> jax.Array:
    """[B, T] ids of `segment_ids` that own one of the row's states, 0 in the place of others.

    A token without a state could read and write none, so it is padding in every form of the op.
    """
    segment = segment_ids - jnp.asarray(segment_base, segment_ids.dtype)[..., None]
    return jnp.where((segment >= 1) & (segment <= num_segments), segment_ids, 0)


def slot_masks(ids: jax.Array, segment_base: int | jax.Array, num_segments: int) -> jax.Array:
    """Which of the row's states a token reads and writes.

    Args:
      ids: [B, T], from `carried_ids`.
      segment_base: scalar, or [B] for a base per row; state n belongs to id segment_base + n + 1.
      num_segments: N.

    Returns:
      bool [B, T, N], at most one True per token.
    """
    first = jnp.asarray(segment_base, ids.dtype)[..., None, None] + 1
    return ids[..., None] == first + jnp.arange(num_segments, dtype=ids.dtype)
