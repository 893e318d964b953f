"""Perplexity and bits per byte of a text or of token ids.

Every byte counts once: documents stand one after another in rows of fixed length, as in
validation (`ValidationBatches`). A document that crosses the end of a row goes on in the next one
without the context before, so a longer row gives a lower figure; the report states the length.
"""

import dataclasses
import math
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from k3jax.data.corpus import encode_documents
from k3jax.data.pipeline import ValidationBatches
from k3jax.data.text import read_documents
from k3jax.data.tokenizer import Tokenizer
from k3jax.data.tokens import TokenArrays
from k3jax.eval.score import compiled_scores, fill, refuse_not_finite
from k3jax.eval.token_file import read_input
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.evaluate import Evaluation, Part, compiled_eval, evaluate
from k3jax.models.kimi_k3.loss import place


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """What a checkpoint makes of a text.

    Attributes:
      source: Where the text came from.
      sums: Nats, predicted tokens, and bytes (0 for a file of ids).
      row_length: Tokens in a row.
      documents: Their number.
      documents_cut: Documents that lie in more than one row.
    """

    source: str
    sums: Evaluation
    row_length: int
    documents: int
    documents_cut: int

    def values(self) -> dict[str, Any]:
        """JSON values: the fields, and loss, perplexity and bits per byte (None for ids)."""
        return {
            "source": self.source,
            "perplexity": perplexity(self.sums.loss),
            "loss": self.sums.loss,
            "bits_per_byte": self.sums.bits_per_byte,
            "nll": self.sums.nll,
            "tokens": int(self.sums.tokens),
            "bytes": self.sums.size or None,
            "row_length": self.row_length,
            "documents": self.documents,
            "documents_cut": self.documents_cut,
        }

    def line(self) -> str:
        """One line for the console."""
        size, bits, each = "", self.sums.bits_per_byte, perplexity(self.sums.loss)
        if bits is not None:
            size = f"bits per byte {bits:.4f} of {self.sums.size:,} bytes, "
        shown = "beyond a float" if each is None else f"{each:.3f}"
        return (
            f"{self.source}: {size}perplexity {shown} of "
            f"{int(self.sums.tokens):,} tokens, rows of {self.row_length}, "
            f"{self.documents_cut} of {self.documents} documents cut"
        )


def perplexity(loss: float) -> float | None:
    """e^loss, None where that is beyond a float: JSON knows no infinity."""
    return math.exp(loss) if loss < 700 else None


def of_text(
    cfg: ModelConfig,
    variables: Any,
    tokenizer: Tokenizer,
    source: str,
    *,
    sequence_length: int,
    batch_size: int,
) -> Perplexity:
    """Reads a text with the checkpoint's own tokenizer.

    Args:
      cfg: The model.
      variables: {"params", "router"}.
      tokenizer: The one the model was trained with.
      source: "stdlib", a file, a directory or a glob; every file is one document.
      sequence_length: Tokens in a row.
      batch_size: Rows that run together.

    Raises:
      ValueError: there is no such text, a size is too small, or the logits are not finite.
    """
    documents, _ = read_documents(source, setting="data")
    arrays = encode_documents(documents, tokenizer)
    batches = ValidationBatches(arrays, tokenizer.byte_lengths, fill(batch_size), sequence_length)
    sums = _sums(cfg, variables, batches, batches.total_bytes)
    cut = _documents_cut(arrays, sequence_length)
    return Perplexity(source, sums, sequence_length, len(documents), cut)


def of_tokens(
    cfg: ModelConfig, variables: Any, source: str | os.PathLike, *, batch_size: int
) -> Perplexity:
    """Reads ids from a safetensors file, for a checkpoint without a tokenizer.

    Args:
      cfg: The model.
      variables: {"params", "router"}.
      source: See `token_file.read_input`. A row is a row; its first token and the first token of
        every further document in it are given and not predicted.
      batch_size: Rows that run together.

    Raises:
      ValueError: the file or its ids cannot be used, nothing is predicted, or the logits are not
        finite.
    """
    ids, segments = read_input(source, cfg.vocab_size)
    weights = np.zeros(ids.shape, np.float32)
    weights[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    if not weights.any():
        raise ValueError(
            f"{str(source)!r} has no document of two tokens, ids {list(ids.shape)}: nothing is "
            "predicted; give longer rows"
        )
    targets = np.zeros_like(ids)
    targets[:, :-1] = ids[:, 1:]
    rows, size = len(ids), fill(min(batch_size, len(ids)))
    arrays = {"tokens": ids, "targets": targets, "segment_ids": segments, "weights": weights}
    more = -rows % size  # rows of padding that fill the last batch
    arrays = {name: np.pad(a, ((0, more), (0, 0))) for name, a in arrays.items()}
    batches = [
        {name: a[start : start + size] for name, a in arrays.items()}
        for start in range(0, rows + more, size)
    ]
    documents = sum(len(np.unique(row[row > 0])) for row in segments)
    return Perplexity(str(source), _sums(cfg, variables, batches, 0), ids.shape[1], documents, 0)


def _sums(cfg: ModelConfig, variables: Any, batches: Iterable[dict], size: int) -> Evaluation:
    sums = evaluate(compiled_eval(cfg), variables, {"": Part(lambda: iter(batches), size)})
    if not math.isfinite(sums.nll):
        # Once more, place by place: only a model that is of no use pays for it.
        for number, batch in enumerate(batches):
            nll = np.asarray(compiled_scores(cfg)(variables, place(batch))[0])
            first = number * len(nll)
            refuse_not_finite(nll, batch, [f"row {first + row}" for row in range(len(nll))])
    return sums


def _documents_cut(documents: TokenArrays, length: int) -> int:
    """Documents whose <|bos|> and <|eos|> lie in different rows."""
    ends = np.cumsum(np.diff(documents.offsets) + 2)
    starts = np.concatenate([[0], ends[:-1]])
    return int(np.sum(starts // length != (ends - 1) // length))
