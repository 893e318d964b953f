"""The rule of segment ids that every op of packed rows relies on, checked on the host.

The ops cannot check it: ids are traced there. Whoever makes ids, or receives them from outside a
compiled function, does. NumPy only, so that data loading imports no JAX.
"""

import numpy as np


def check_segment_ids(
    ids: np.ndarray, num_segments: int | None = None, segment_base: int = 0
) -> None:
    """Refuses segment ids that the kernels would silently compute nonsense for.

    0 is padding and may stand anywhere but inside a document; other ids never decrease within a
    row. Segment n has the id segment_base + n + 1; ids may be left out.

    Args:
      ids: [B, T] int32 on the host.
      num_segments: number N of segments, or None for any.
      segment_base: id before the first segment's.

    Raises:
      ValueError: with the first offending row, index and value.
    """
    ids = np.asarray(ids)
    if ids.dtype != np.int32:
        raise ValueError(f"segment_ids have dtype {ids.dtype}: must be int32; cast them")
    if ids.ndim != 2:
        raise ValueError(
            f"segment_ids have shape {list(ids.shape)}: must be [B, T]; add the missing axis"
        )
    before = np.zeros_like(ids)
    before[:, 1:] = np.maximum.accumulate(ids, axis=1)[:, :-1]
    previous = np.zeros_like(ids)
    previous[:, 1:] = ids[:, :-1]
    there = ids != 0
    _refuse(ids, ids < 0, "ids are 0 (padding) or positive; number documents from 1")
    _refuse(
        ids,
        there & (ids < before),
        "ids must not decrease within a row; number documents in their order of appearance",
    )
    _refuse(
        ids,
        there & (ids == before) & (previous == 0),
        "padding must not stand inside a document; give what follows it a new id",
    )
    _refuse(
        ids,
        there & (ids <= segment_base),
        f"ids are greater than segment_base={segment_base}; lower segment_base",
    )
    if num_segments is not None:
        _refuse(
            ids,
            ids > segment_base + num_segments,
            f"ids reach at most segment_base + num_segments = {segment_base} + {num_segments}; "
            "raise num_segments",
        )


def _refuse(ids: np.ndarray, wrong: np.ndarray, rule: str) -> None:
    if wrong.any():
        row, index = np.argwhere(wrong)[0].tolist()
        raise ValueError(f"segment_ids[{row}, {index}] = {ids[row, index]}: {rule}")
