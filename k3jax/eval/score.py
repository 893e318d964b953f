"""How probable given tokens are after given tokens, without generating anything.

Rows are padded on the right to a power of two and batches to one size, so that a set of any
lengths compiles once per power. The model is causal: what stands behind a token changes nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from k3jax.models.kimi_k3 import model
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.loss import Batch, place
from k3jax.parallel import specs
from k3jax.parallel.tokens import per_device, smallest_batch
from pallas_kernels.cross_entropy import token_scores

SHORTEST = 64  # tokens of the smallest bucket


class Pair(NamedTuple):
    """Ids that are given and ids that are scored, at least one of each."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """What the model makes of one pair.

    Attributes:
      log_probability: Σ log p of the continuation's tokens, nats.
      greedy: Whether each of them is the most probable token at its place.
    """

    log_probability: float
    greedy: bool


def bucket(length: int) -> int:
    """The padded length of a row: the next power of two, at least `SHORTEST`."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def fill(batch_size: int) -> int:
    """The rows of a batch: `batch_size`, rounded up to what the mesh in force can split."""
    shards = smallest_batch()[0]
    return -(-batch_size // shards) * shards


@functools.lru_cache(maxsize=8)
def compiled_scores(cfg: ModelConfig) -> Callable:
    """The compiled pass: (variables, batch [B, T]) -> (-log p(target), most probable id), [B, T].

    float32 and int32, for every place whatever its weight; no array of [B, T, V] is made.
    """

    def run(variables, batch: Batch):
        hidden = model.forward(cfg, variables, batch["tokens"], batch["segment_ids"]).hidden
        local = per_device(_local_scores, out_specs=(specs.TOKENS, specs.TOKENS))
        return local(hidden, model.head_weight(variables["params"], cfg), batch["targets"])

    return jax.jit(run)


def _local_scores(x, w, targets):
    scores = token_scores(x.reshape(-1, x.shape[-1]), w, targets.reshape(-1))
    return jax.tree.map(lambda a: a.reshape(targets.shape), scores)


def score(cfg: ModelConfig, variables: Any, pairs: Sequence[Pair], batch_size: int) -> list[Score]:
    """Scores pairs of any lengths; the result does not depend on the batch, up to rounding.

    Args:
      cfg: The model.
      variables: {"params", "router"}.
      pairs: See `Pair`.
      batch_size: Rows that run together.

    Raises:
      ValueError: a pair lacks context or continuation, or the logits are not finite.
    """
    for index, pair in enumerate(pairs):
        if not len(pair.context) or not len(pair.continuation):
            raise ValueError(
                f"pair {index} has {len(pair.context)} tokens of context and "
                f"{len(pair.continuation)} to score; give at least one of each (<|bos|> as context)"
            )
    lengths = [len(pair.context) + len(pair.continuation) - 1 for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda index: lengths[index])
    scores: dict[int, Score] = {}
    while order:
        size = bucket(lengths[order[0]])
        taken = [i for i in order[: fill(batch_size)] if lengths[i] <= size]
        order = order[len(taken) :]
        batch = _batch([pairs[i] for i in taken], size, fill(batch_size))
        nll, best = map(np.asarray, compiled_scores(cfg)(variables, place(batch)))
        refuse_not_finite(nll, batch, [f"pair {i}" for i in taken])
        for row, index in enumerate(taken):
            at = batch["weights"][row] > 0
            hits = best[row, at] == batch["targets"][row, at]
            scores[index] = Score(-float(nll[row, at].sum(dtype=np.float64)), bool(hits.all()))
    return [scores[index] for index in range(len(pairs))]


def _batch(pairs: Sequence[Pair], length: int, rows: int) -> dict[str, np.ndarray]:
    """Arrays [rows, length]; weight 1 where the next token is to be scored."""
    batch = {name: np.zeros((rows, length), np.int32) for name in ("tokens", "targets")}
    batch["segment_ids"] = np.zeros((rows, length), np.int32)
    batch["weights"] = np.zeros((rows, length), np.float32)
    for row, (context, continuation) in enumerate(pairs):
        ids = np.concatenate([np.asarray(context), np.asarray(continuation)]).astype(np.int32)
        end = len(ids) - 1
        batch["tokens"][row, :end], batch["targets"][row, :end] = ids[:-1], ids[1:]
        batch["segment_ids"][row, :end] = 1
        batch["weights"][row, len(context) - 1 : end] = 1.0
    return batch


def refuse_not_finite(nll: np.ndarray, batch: dict, rows: Sequence[str]) -> None:
    """Raises at the first place of weight where -log p is not finite.

    Args:
      nll: [B, T].
      batch: The arrays that gave it.
      rows: A name for each row that is no filling.

    Raises:
      ValueError: with row, position and token.
    """
    wrong = np.argwhere(~np.isfinite(nll) & (batch["weights"] > 0))
    if len(wrong):
        row, position = wrong[0].tolist()
        raise ValueError(
            f"-log p is {nll[row, position]} in {rows[row]} at position {position} (token "
            f"{batch['tokens'][row, position]}): the model's numbers overflow there; use an "
            "earlier checkpoint"
        )
