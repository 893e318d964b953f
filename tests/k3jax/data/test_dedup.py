"""Near-duplicates are found and different files are not; the estimate is close to the truth."""

import random

import numpy as np
import pytest

from k3jax.data.dedup import SKETCH, WINDOW, find_duplicates, similarity, sketch
from k3jax.data.text import Document


def text(seed: int, words: int = 400) -> bytes:
    draw = random.Random(seed)
    return b" ".join(b"%08x" % draw.getrandbits(32) for _ in range(words))


def exact_jaccard(a: bytes, b: bytes) -> float:
    left, right = ({x[i : i + WINDOW] for i in range(len(x) - WINDOW + 1)} for x in (a, b))
    return len(left & right) / len(left | right)


@pytest.mark.parametrize("shared", [0, 100, 200, 300, 400])
def test_the_sketch_estimates_the_jaccard_index_of_windows(shared):
    # Four standard deviations at 256 samples and index 0.5: 4 * 0.5 / 16.
    a = text(1)
    b = text(1, shared) + b" " + text(2, 400 - shared) if shared < 400 else text(1)
    assert similarity(sketch(a), sketch(b)) == pytest.approx(exact_jaccard(a, b), abs=0.125)


def test_a_sketch_holds_the_smallest_distinct_hashes_however_it_finds_them():
    # The long text takes the partition, the repeated one falls back to sorting everything.
    for data in (text(3, 600), text(4, 20) * 400, b"", b"ab"):
        windows = {data[i : i + WINDOW] for i in range(max(len(data) - WINDOW + 1, 1))}
        every = np.concatenate([sketch(window) for window in windows])  # one hash for each
        assert every.size == len(windows)
        hashes = sketch(data)
        assert hashes.dtype == np.uint64
        np.testing.assert_array_equal(hashes, np.unique(every)[:SKETCH])


def test_copies_and_edited_copies_are_dropped_and_the_first_stays():
    original = text(5)
    edited = original[:1500] + b"something else entirely" + original[1500:]
    respaced = original.replace(b" ", b"\n    ")
    names = {"a": original, "b": text(6), "c": edited, "d": respaced, "e": original}
    dropped = find_duplicates([Document(name, data) for name, data in names.items()], 0.3)
    assert [(d.name, d.kept) for d in dropped] == [("c", "a"), ("d", "a"), ("e", "a")]
    assert dropped[0].similarity > 0.9
    assert dropped[1].similarity == dropped[2].similarity == 1.0


def test_threshold_one_drops_only_copies_up_to_white_space():
    original = text(7)
    documents = [
        Document("a", original),
        Document("b", original + b" more"),
        Document("c", original + b"\n\n"),
    ]
    assert [d.name for d in find_duplicates(documents, 1.0)] == ["c"]


def test_different_texts_are_all_kept_and_the_result_repeats():
    documents = [Document(str(i), text(100 + i)) for i in range(30)]
    documents.append(Document("copy", documents[3].data + b" tail"))
    first = find_duplicates(documents, 0.3)
    assert [(d.name, d.kept) for d in first] == [("copy", "3")]
    assert find_duplicates(documents, 0.3) == first
