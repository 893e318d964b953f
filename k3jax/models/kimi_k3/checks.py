"""What can be refused outside compiled functions, where segment ids and lengths have values.

Inside one they are traced and pass: there, whoever makes them answers for them.
"""

from typing import Any

import jax
import numpy as np

from pallas_kernels.segment_ids import check_segment_ids


def check_ids(segment_ids: jax.Array | None, num_segments: int | None = None) -> None:
    """Refuses segment ids that the model would silently compute nonsense for.

    Raises:
      ValueError: as `check_segment_ids`: ids fall within a row, padding stands inside a document,
        or there are more documents than `num_segments`.
    """
    ids = None if segment_ids is None else _values(segment_ids)
    if ids is not None:
        check_segment_ids(ids, num_segments)


def check_prompts(
    token_ids: jax.Array, segment_ids: jax.Array | None, lengths: jax.Array, rows: int
) -> None:
    """Refuses prompts that a cache cannot take.

    Args:
      token_ids: [B, T].
      segment_ids: [B, T], 1 at tokens and 0 at padding, or None.
      lengths: [B], tokens in the cache.
      rows: tokens that the cache can hold, per sequence.

    Raises:
      ValueError: padding inside a prompt, a cache that is in use, or a prompt longer than it.
    """
    check_ids(segment_ids, num_segments=1)
    used = _values(lengths)
    if used is not None and used.any():
        row = int(np.argmax(used))
        raise ValueError(
            f"cache.lengths[{row}] = {used[row]}: prefill reads a prompt into an empty cache; pass "
            "a new one from init_cache, or feed further tokens by decode_step"
        )
    longest = token_ids.shape[1]
    if segment_ids is not None:
        ids = _values(segment_ids)
        longest = 0 if ids is None else int(np.max(np.sum(ids > 0, axis=1), initial=0))
    if longest > rows:
        raise ValueError(
            f"a prompt of {longest} tokens in a cache of {rows} rows: each token needs one; raise "
            "max_length of init_cache"
        )


def check_room(lengths: jax.Array, rows: int) -> None:
    """Refuses a decoding step where a sequence has filled its `rows` cache rows.

    Raises:
      ValueError: with the first such sequence.
    """
    used = _values(lengths)
    if used is not None and np.any(used >= rows):
        row = int(np.argmax(used >= rows))
        raise ValueError(
            f"cache.lengths[{row}] = {used[row]} of {rows} rows: the cache is full and the next "
            "token would be dropped; raise max_length of init_cache"
        )


def _values(x: Any) -> np.ndarray | None:
    """The array on the host; None while tracing, or where other processes hold parts of it."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    return np.asarray(x)
