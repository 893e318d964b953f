"""Token ids of many documents in one flat array."""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest of uint16 and uint32 that holds every id of a vocabulary.

    65,536 ids still fit uint16; the released vocabulary of 163,840 does not.
    """
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


@dataclasses.dataclass(frozen=True, eq=False)
class TokenArrays:
    """Documents as token ids, without special tokens.

    Attributes:
      tokens: ids of all documents one after another: uint16 or uint32 [N].
      offsets: document d is tokens[offsets[d]:offsets[d + 1]]: int64 [D + 1].
    """

    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_documents(cls, documents: Sequence[np.ndarray], vocab_size: int) -> "TokenArrays":
        """Stores one id array per document.

        Raises:
          ValueError: an id does not lie in [0, vocab_size).
        """
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        wide = np.concatenate([np.asarray(ids, np.int64) for ids in documents] or [np.zeros(0)])
        outside = np.flatnonzero((wide < 0) | (wide >= vocab_size))
        if outside.size:
            raise ValueError(
                f"token id {int(wide[outside[0]])} lies outside [0, {vocab_size}); "
                "pass the vocabulary size of the tokenizer that made it"
            )
        return cls(wide.astype(token_dtype(vocab_size)), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """Ids of one document, a view."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def part(self, which: range) -> "TokenArrays":
        """The documents of a range without gaps, as a view."""
        offsets = self.offsets[which.start : which.stop + 1]
        return TokenArrays(self.tokens[offsets[0] : offsets[-1]], offsets - offsets[0])

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of ids and boundaries, whatever the dtype."""
        digest = hashlib.sha256(self.offsets.astype("<i8").tobytes())
        digest.update(self.tokens.astype("<u4").tobytes())
        return digest.hexdigest()

    def save(self, path: pathlib.Path) -> None:
        """Writes one file: tokens, then offsets, both in numpy's format."""
        with path.open("wb") as file:
            np.save(file, self.tokens)
            np.save(file, self.offsets)

    @classmethod
    def load(cls, path: pathlib.Path) -> "TokenArrays":
        """Reads what `save` wrote.

        Raises:
          ValueError: the file is damaged.
        """
        with path.open("rb") as file:
            tokens, offsets = np.load(file), np.load(file)
        if offsets[-1] != len(tokens):
            raise ValueError(
                f"{path}: {len(tokens)} tokens, offsets end at {offsets[-1]}; delete the file, it "
                "is made again"
            )
        return cls(tokens, offsets)
