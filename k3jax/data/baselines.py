"""Bits per byte of models anybody has: what a trained model must beat on the same text."""

import gzip
import lzma
from collections.abc import Callable, Sequence

import numpy as np

from k3jax.data.text import Document


def bits_per_byte(train: Sequence[Document], validation: Sequence[Document]) -> dict[str, float]:
    """Bits per validation byte of six baselines.

    `uniform` knows nothing; `unigram` codes each byte by its frequency in the training text, every
    count raised by one; the compressors at level 9 see validation text only, once as one stream
    and once document by document, with the overhead of their containers.

    Args:
      train: only `unigram` looks at it.
      validation: at least one byte.

    Returns:
      uniform, unigram, gzip_per_document, xz_per_document, gzip_concatenated, xz_concatenated.
    """
    texts = [document.data for document in validation]
    whole = b"".join(texts)

    def bits(compress: Callable[[bytes], bytes], pieces: Sequence[bytes]) -> float:
        return 8.0 * sum(len(compress(piece)) for piece in pieces) / len(whole)

    return {
        "uniform": 8.0,
        "unigram": _unigram([document.data for document in train], whole),
        "gzip_per_document": bits(_gzip, texts),
        "xz_per_document": bits(_xz, texts),
        "gzip_concatenated": bits(_gzip, [whole]),
        "xz_concatenated": bits(_xz, [whole]),
    }


def _unigram(train: Sequence[bytes], validation: bytes) -> float:
    counts = np.ones(256)
    for data in train:
        counts += _histogram(data)
    return float(_histogram(validation) @ -np.log2(counts / counts.sum()) / len(validation))


def _histogram(data: bytes) -> np.ndarray:
    return np.bincount(np.frombuffer(data, np.uint8), minlength=256)


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=9, mtime=0)


def _xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=9)
