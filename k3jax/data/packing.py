"""Documents in rows of fixed length, and the segment ids that keep them apart."""

import numpy as np

from k3jax.data.tokens import TokenArrays
from pallas_kernels.segment_ids import check_segment_ids as check_segment_ids

Row = dict[str, np.ndarray]


def from_cu_seqlens(cu_seqlens: np.ndarray, length: int) -> np.ndarray:
    """Segment ids int32 [1, T] of sequences given by their cumulative lengths.

    Sequence n covers cu_seqlens[n] <= t < cu_seqlens[n + 1] and gets the id n + 1. An empty
    sequence ([0, 5, 5, 9]) is allowed and harmless: its id is absent, no token belongs to it, and
    a state that goes in for it comes out unchanged.

    Args:
      cu_seqlens: integers [N + 1].
      length: T.

    Raises:
      ValueError: with the offending index, unless 0 = first <= ... <= last = T.
    """
    cu = np.asarray(cu_seqlens)
    if cu.ndim != 1 or cu.size < 2 or not np.issubdtype(cu.dtype, np.integer):
        raise ValueError(
            f"cu_seqlens has shape {list(cu.shape)} and dtype {cu.dtype}: must be at least two "
            "integers [N + 1], such as [0, T] for one sequence"
        )
    falls = np.flatnonzero(cu[1:] < cu[:-1])
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens[0] = {cu[0]}: must be 0; prepend it")
    if falls.size:
        i = int(falls[0]) + 1
        raise ValueError(
            f"cu_seqlens[{i}] = {cu[i]} follows {cu[i - 1]}: must not decrease; pass cumulative "
            "lengths, not lengths"
        )
    if cu[-1] != length:
        raise ValueError(
            f"cu_seqlens[{cu.size - 1}] = {cu[-1]}: must end at T = {length}; append T (a last "
            "segment for the tail) or cut the tokens"
        )
    return np.repeat(np.arange(1, cu.size, dtype=np.int32), np.diff(cu))[None]


class PackedStream:
    """Documents as one stream `<|bos|> tokens <|eos|>` after another, cut into rows of T tokens.

    The window of a row is T + 1 wide: a piece that goes on in the next row keeps its true next
    token as target, so each token is an input once and, but for `<|bos|>`, a target once.
    """

    def __init__(
        self,
        documents: TokenArrays,
        order: np.ndarray,
        sequence_length: int,
        special_ids: tuple[int, int, int],
    ):
        """Lays out the stream.

        Args:
          documents: token ids.
          order: int [D], the documents' order in the stream.
          sequence_length: T.
          special_ids: pad, bos and eos.
        """
        self._documents, self._order, self._length = documents, order, sequence_length
        self._pad, self._bos, self._eos = special_ids
        self._starts = np.concatenate([[0], np.cumsum(np.diff(documents.offsets)[order] + 2)])

    def __len__(self) -> int:
        return rows_in_epoch(self._documents, self._length)

    def row(self, index: int) -> Row:
        """One row.

        Returns:
          tokens int32 [T]; targets int32 [T], the next token of the same document; segment_ids
          int32 [T], from 1 in each row, 0 = padding; weights float32 [T], 1 where there is a
          target, 0 at the end of a document and in padding; document_ids int32 [T], index into
          `documents`, -1 = padding.
        """
        T = self._length
        row = {
            "tokens": np.full(T, self._pad, np.int32),
            "targets": np.full(T, self._pad, np.int32),
            "segment_ids": np.zeros(T, np.int32),
            "weights": np.zeros(T, np.float32),
            "document_ids": np.full(T, -1, np.int32),
        }
        begin = index * T
        place = int(np.searchsorted(self._starts, begin, side="right")) - 1
        filled, segment = 0, 0
        while filled < T and place < len(self._order):
            skip = begin + filled - self._starts[place]
            piece = self._window(self._order[place], skip, T - filled + 1)
            count, targets = min(len(piece), T - filled), len(piece) - 1
            segment += 1
            here = slice(filled, filled + count)
            row["tokens"][here] = piece[:count]
            row["targets"][filled : filled + targets] = piece[1:]
            row["weights"][filled : filled + targets] = 1.0
            row["segment_ids"][here] = segment
            row["document_ids"][here] = self._order[place]
            filled, place = filled + count, place + 1
        return row

    def _window(self, document: int, skip: int, length: int) -> np.ndarray:
        """Up to `length` ids of a document with its special tokens, from position `skip`."""
        ids = self._documents.document(document)
        # Position 0 is <|bos|>, so position p is ids[p - 1].
        text = ids[max(skip - 1, 0) : max(skip - 1 + length, 0)].astype(np.int32)
        head = [self._bos] if skip == 0 else []
        return np.concatenate([np.array(head, np.int32), text, [np.int32(self._eos)]])[:length]


def rows_in_epoch(documents: TokenArrays, sequence_length: int) -> int:
    """Rows that hold every document once, the last one padded."""
    return -(-(len(documents.tokens) + 2 * len(documents)) // sequence_length)
