"""A recall task that a tiny model learns in seconds: it tests memory, not knowledge."""

import numpy as np

from k3jax.data.iterator import ResumableBatches
from k3jax.data.packing import Row
from k3jax.data.pipeline import SPECIAL_IDS


class RecallBatches(ResumableBatches):
    """Endless batches [B, T] of `<|bos|> k1 v1 ... kN vN` followed by queries `k v k v ...`.

    Keys of a row are distinct, values are free; keys and values come from the two halves of the
    vocabulary behind the special ids. Each query repeats one of the row's keys, drawn at random,
    and only the value after it has weight 1. A model without memory can do no better than
    ln(number of values) nats; one that recalls reaches 0. Arrays as in `PackedStream.row`.
    """

    def __init__(
        self, vocab: int, batch_size: int, sequence_length: int, num_pairs: int, seed: int = 0
    ):
        """Starts at batch 0.

        Args:
          vocab: number of ids, the three special ones included.
          batch_size: B.
          sequence_length: T, at least 2 * num_pairs + 3.
          num_pairs: N.
          seed: of everything.

        Raises:
          ValueError: the keys do not suffice, or a row has no room for a query.
        """
        first = len(SPECIAL_IDS)
        half = (vocab - first) // 2
        if not 1 <= num_pairs <= half:
            raise ValueError(
                f"num_pairs={num_pairs}: must lie in [1, {half}], the keys of vocab={vocab}; "
                "lower num_pairs or raise vocab"
            )
        if sequence_length < 2 * num_pairs + 3:
            raise ValueError(
                f"sequence_length={sequence_length}: must be at least 2 * num_pairs + 3 = "
                f"{2 * num_pairs + 3} to hold one query; raise it or lower num_pairs"
            )

        def row(index: int) -> Row:
            draw = np.random.default_rng((seed, index))
            keys = first + draw.permutation(half)[:num_pairs]
            values = first + half + draw.integers(0, half, num_pairs)
            return _row(keys, values, draw, sequence_length)

        identity = {
            "task": "recall",
            "vocab": vocab,
            "sequence_length": sequence_length,
            "num_pairs": num_pairs,
            "seed": seed,
        }
        super().__init__(row, batch_size, identity, lambda index, _: f"list {index}")


def _row(keys: np.ndarray, values: np.ndarray, draw: np.random.Generator, length: int) -> Row:
    pad, bos, _ = SPECIAL_IDS
    asked = draw.integers(0, len(keys), (length - 1) // 2 - len(keys))
    pairs = np.concatenate([np.arange(len(keys)), asked])
    tokens = np.full(length, pad, np.int32)
    filled = 1 + 2 * len(pairs)
    tokens[:filled] = [bos, *np.stack([keys[pairs], values[pairs]], axis=1).ravel()]
    targets = np.full(length, pad, np.int32)
    targets[: filled - 1] = tokens[1:filled]
    weights = np.zeros(length, np.float32)
    # Queries stand at odd places; the target there is the answer.
    weights[1 + 2 * len(keys) : filled : 2] = 1.0
    there = np.arange(length) < filled
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": there.astype(np.int32),
        "weights": weights,
        "document_ids": np.where(there, 0, -1).astype(np.int32),
    }
