"""Training batches without end, and validation batches that cover every byte once."""

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from k3jax.data.iterator import ResumableBatches, stack
from k3jax.data.mixture import Mixture
from k3jax.data.ordering import permutation
from k3jax.data.packing import PackedStream, Row, rows_in_epoch
from k3jax.data.sources import Source
from k3jax.data.tokenizer import Tokenizer
from k3jax.data.tokens import TokenArrays

SPECIAL_IDS = (Tokenizer.pad_id, Tokenizer.bos_id, Tokenizer.eos_id)


class TrainBatches(ResumableBatches):
    """Endless batches of packed rows, see `PackedStream.row` for their arrays, here [B, T].

    Every epoch of a source shuffles its documents, packs them anew, and shuffles the rows; each
    token is an input exactly once per epoch. A row holds documents of one source; `Mixture` says
    of which, and whether there is an end. The order follows from the arguments alone.

    Attributes:
      rows_per_epoch: rows of all sources, once each.
      mixture: which rows are whose.
    """

    def __init__(
        self,
        documents: TokenArrays,
        batch_size: int,
        sequence_length: int,
        seed: int = 0,
        shuffle_rows: bool = True,
        sources: Sequence[tuple[Source, range]] = (),
        names: Sequence[str] = (),
    ):
        """Starts at the first epoch.

        Args:
          documents: training tokens.
          batch_size: B, rows in a batch.
          sequence_length: T, tokens in a row.
          seed: of the order.
          shuffle_rows: False leaves the rows of an epoch in stream order.
          sources: each with its documents, for a mixture; empty is one source without an end.
          names: of the documents, for `documents`; their numbers by default.

        Raises:
          ValueError: a source has no document, or batch_size or sequence_length is too small.
        """
        whole = (Source("", ""), range(len(documents)))
        parts = [
            _Epochs(source, documents.part(which), which.start, sequence_length, seed, shuffle_rows)
            for source, which in sources or [whole]
        ]
        self.rows_per_epoch = sum(part.rows for part in parts)
        self.mixture = Mixture(
            [part.source.weight or float(part.rows) for part in parts],
            [part.limit for part in parts],
            seed,
        )

        def row(index: int) -> Row:
            source, place = self.mixture.locate(index)
            return parts[source].row(place)

        def name(_: int, document: int) -> str:
            return names[document] if names else f"document {document}"

        identity = {
            "documents": documents.fingerprint,
            "sequence_length": sequence_length,
            "seed": seed,
            "shuffle_rows": shuffle_rows,
        }
        if sources:
            identity["sources"] = [
                [source.name, which.start, which.stop, source.weight, source.epochs]
                for source, which in sources
            ]
        self._parts = parts
        super().__init__(row, batch_size, identity, name)

    def rows_of(self, source: int) -> int:
        """Rows in an epoch of one source."""
        return self._parts[source].rows


class _Epochs:
    """The rows of one source, epoch after epoch."""

    def __init__(
        self,
        source: Source,
        documents: TokenArrays,
        first: int,
        sequence_length: int,
        seed: int,
        shuffle_rows: bool,
    ):
        """`first` is the number of the source's first document among those of all sources."""
        _check(documents, sequence_length)
        self.source, self._first = source, first
        self.rows = rows_in_epoch(documents, sequence_length)
        # The only source of a run keeps the order it had before there were several.
        named = (source.name,) if source.name else ()

        @functools.lru_cache(maxsize=2)
        def layout(epoch: int) -> tuple[PackedStream, Sequence[int]]:
            order = permutation(len(documents), "documents", seed, epoch, *named)
            stream = PackedStream(documents, order, sequence_length, SPECIAL_IDS)
            rows = range(self.rows)
            if shuffle_rows:
                rows = permutation(len(rows), "rows", seed, epoch, *named)
            return stream, rows

        self._layout = layout

    @property
    def limit(self) -> int | None:
        """Rows until the source ends."""
        epochs = self.source.epochs
        return None if epochs is None else max(round(epochs * self.rows), 1)

    def row(self, index: int) -> Row:
        """The row, its document_ids counted among the documents of all sources."""
        epoch, place = divmod(index, self.rows)
        stream, rows = self._layout(epoch)
        row = stream.row(rows[place])
        ids = row["document_ids"]
        ids[ids >= 0] += self._first
        return row


class ValidationBatches:
    """Finite batches in document order; iterating again starts again.

    Taken together the targets spell every validation byte exactly once, so that
    bits per byte = sum of weighted losses in nats / ln 2 / `total_bytes`. The ends of documents
    are predicted too and their cost is included. The last batch is filled up with rows of
    padding, so all batches have the same shape.

    Attributes:
      total_bytes: bytes that the targets spell.
    """

    def __init__(
        self,
        documents: TokenArrays,
        byte_lengths: np.ndarray,
        batch_size: int,
        sequence_length: int,
        max_batches: int | None = None,
    ):
        """Prepares the rows.

        Args:
          documents: validation tokens.
          byte_lengths: int [V], `Tokenizer.byte_lengths`.
          batch_size: B.
          sequence_length: T; longer than in training gives each token more context.
          max_batches: for a quick look, evenly spaced rows that fill at most this many batches;
            `total_bytes` then counts what they cover.

        Raises:
          ValueError: there is no document, or a size is too small.
        """
        _check(documents, sequence_length)
        for name, value in (("batch_size", batch_size), ("max_batches", max_batches or 1)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1; raise it")
        self._batch_size, self._length = batch_size, sequence_length
        order = np.arange(len(documents))
        self._stream = PackedStream(documents, order, sequence_length, SPECIAL_IDS)
        count = len(self._stream)
        if max_batches is not None and max_batches * batch_size < count:
            wanted = max_batches * batch_size
            self._rows = [i * count // wanted for i in range(wanted)]
        else:
            self._rows = list(range(count))
        self.total_bytes = 0
        for index in self._rows:
            row = self._stream.row(index)
            targets = row["targets"][row["weights"] > 0]
            self.total_bytes += int(byte_lengths[targets].sum())

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[Row]:
        B = self._batch_size
        # A row behind the last document is all padding.
        padded = self._rows + [len(self._stream)] * (len(self) * B - len(self._rows))
        for start in range(0, len(padded), B):
            rows = [self._stream.row(index) for index in padded[start : start + B]]
            yield stack(rows)


def _check(documents: TokenArrays, sequence_length: int) -> None:
    if not len(documents):
        raise ValueError("no documents to read: give at least one; check the split")
    if sequence_length < 2:
        raise ValueError(f"sequence_length={sequence_length}: must be at least 2; raise it")
