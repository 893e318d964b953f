"""Baselines are what the compressors and a unigram count really give."""

import gzip
import lzma
import math
import random

import pytest

from k3jax.data.baselines import bits_per_byte
from k3jax.data.text import Document


def test_compressors_are_counted_over_the_validation_bytes():
    pieces = [b"spam and eggs\n" * 50, b"other words here\n" * 40]
    validation = [Document(str(i), data) for i, data in enumerate(pieces)]
    found = bits_per_byte([Document("t", b"training")], validation)
    size = sum(map(len, pieces))
    whole = b"".join(pieces)
    assert found["uniform"] == 8.0
    assert found["gzip_concatenated"] == 8 * len(gzip.compress(whole, 9, mtime=0)) / size
    assert found["gzip_per_document"] == 8 * sum(len(gzip.compress(p, 9)) for p in pieces) / size
    assert found["xz_concatenated"] == 8 * len(lzma.compress(whole, preset=9)) / size
    assert (
        found["xz_per_document"] == 8 * sum(len(lzma.compress(p, preset=9)) for p in pieces) / size
    )


def test_the_unigram_is_fitted_on_training_bytes_only():
    # Two letters with frequencies near 3/4 and 1/4: cross entropy against the fitted pair.
    train = [Document("t", b"aaab" * 100_000)]
    found = bits_per_byte(train, [Document("v", b"ab" * 500)])["unigram"]
    expected = -(math.log2(0.75) + math.log2(0.25)) / 2
    assert found == pytest.approx(expected, abs=1e-3)  # the 256 added counts in 400,000


def test_bytes_unseen_in_training_cost_a_finite_number_of_bits():
    noise = random.Random(0).randbytes(4096)
    found = bits_per_byte([Document("t", b"a")], [Document("v", noise)])
    assert found["unigram"] == pytest.approx(8.0, abs=0.02)
    assert found["xz_concatenated"] > 8.0
