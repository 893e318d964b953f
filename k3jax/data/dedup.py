"""Near-duplicate files are found by shingles and sketches, before the split sees them.

Two files that differ only in white space are exact duplicates. Otherwise each file is the set of
its 32-byte windows (shingles) after runs of white space became one blank, and the similarity of
two files is the Jaccard index |A & B| / |A | B|. It is estimated from bottom-k sketches: with one
hash function h, keep the k = 256 smallest h(shingle) of a file; of the k smallest of a union, the
share found in both sketches estimates the index with standard deviation sqrt(J (1 - J) / k),
0.03 at J = 0.5. Everything is deterministic, and linear in the number of bytes.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from k3jax.data.ordering import mix
from k3jax.data.text import Document

VERSION = 1
SKETCH = 256
WINDOW = 32  # doubled up from single bytes, so a power of two

# A shingle in this many kept files (a licence header) says nothing about any pair of them.
_BOILERPLATE = 256

_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Duplicate:
    """A dropped file: its name, the earlier file it resembles, and the estimated Jaccard index."""

    name: str
    kept: str
    similarity: float


def find_duplicates(documents: Sequence[Document], threshold: float) -> list[Duplicate]:
    """Lists the documents to drop, in the given order.

    The first of a group stays: a document is compared with the documents kept before it.

    Args:
      documents: in the order of their precedence.
      threshold: estimated Jaccard index in (0, 1] from which a document counts as duplicate; at
        1.0 only documents equal up to white space do.

    Returns:
      One entry for each dropped document.
    """
    first_with: dict[bytes, str] = {}
    seen = _Sketches()
    dropped = []
    for document in documents:
        normal = b" ".join(document.data.split())
        digest = hashlib.sha256(normal).digest()
        if digest in first_with:
            dropped.append(Duplicate(document.name, first_with[digest], 1.0))
            continue
        if threshold < 1.0:
            mine = sketch(normal)
            name, similarity = seen.most_similar(mine)
            if similarity >= threshold:
                dropped.append(Duplicate(document.name, name, similarity))
                continue
            seen.add(document.name, mine)
        first_with[digest] = document.name
    return dropped


def sketch(data: bytes) -> np.ndarray:
    """The `SKETCH` smallest distinct shingle hashes of `data`: uint64, sorted, maybe fewer."""
    hashes = _shingle_hashes(np.frombuffer(data, np.uint8))
    if hashes.size > 4 * SKETCH:
        # Partitioning first saves sorting the whole file; repeats may leave too few, then sort.
        smallest = np.unique(np.partition(hashes, 4 * SKETCH)[: 4 * SKETCH])
        if smallest.size >= SKETCH:
            return smallest[:SKETCH]
    return np.unique(hashes)[:SKETCH]


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard index estimated from two sketches: share of the union's smallest that both hold."""
    union = np.union1d(a, b)[:SKETCH]
    if not union.size:
        return 0.0
    common = np.intersect1d(a, b, assume_unique=True)
    return float(np.isin(common, union, assume_unique=True).sum() / union.size)


class _Sketches:
    """Sketches of the kept documents, indexed by hash."""

    def __init__(self):
        self._names: list[str] = []
        self._sketches: list[np.ndarray] = []
        self._holders: dict[int, list[int]] = collections.defaultdict(list)

    def add(self, name: str, new: np.ndarray) -> None:
        index = len(self._names)
        self._names.append(name)
        self._sketches.append(new)
        for value in new.tolist():
            if len(self._holders[value]) < _BOILERPLATE:
                self._holders[value].append(index)

    def most_similar(self, query: np.ndarray) -> tuple[str, float]:
        """Name and similarity of the closest kept document; ("", 0.0) when none shares a hash."""
        counts = collections.Counter()
        for value in query.tolist():
            counts.update(self._holders.get(value, ()))
        best = ("", 0.0)
        for index, _ in counts.most_common(8):
            value = similarity(query, self._sketches[index])
            if value > best[1]:
                best = (self._names[index], value)
        return best


def _shingle_hashes(data: np.ndarray) -> np.ndarray:
    """Hashes of all `WINDOW`-byte windows of uint8 [N]: uint64 [max(N - WINDOW + 1, 1)].

    Polynomial hashes of width 2w come from two of width w, so five passes make width 32.
    Multiplication wraps modulo 2**64, as intended.
    """
    if data.size < WINDOW:
        data = np.concatenate([data, np.zeros(WINDOW - data.size, np.uint8)])
    hashes = mix(data.astype(np.uint64) + np.uint64(1))
    factor, width = _ODD, 1
    while width < WINDOW:
        hashes = hashes[:-width] * factor + hashes[width:]
        factor = np.uint64(int(factor) ** 2 % 2**64)
        width *= 2
    return mix(hashes)
