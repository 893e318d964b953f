"""Rows hold every token once with its true next token; bad segment ids are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.data.packing import PackedStream, check_segment_ids, from_cu_seqlens
from k3jax.data.tokens import TokenArrays

PAD, BOS, EOS = 0, 1, 2


def stream(lengths: list[int], T: int, order=None) -> tuple[PackedStream, list[list[int]]]:
    """A stream over documents of distinct ids, and those documents with their special ids."""
    ids = iter(range(3, 10_000))
    documents = [np.array([next(ids) for _ in range(n)], int) for n in lengths]
    arrays = TokenArrays.from_documents(documents, 10_000)
    order = np.arange(len(lengths)) if order is None else np.array(order)
    full = [[BOS, *documents[d].tolist(), EOS] for d in order]
    return PackedStream(arrays, order, T, (PAD, BOS, EOS)), full


def test_the_layout_of_two_documents_by_hand():
    packed, _ = stream([3, 2], 6)
    first, second = packed.row(0), packed.row(1)
    assert len(packed) == 2
    assert first["tokens"].tolist() == [BOS, 3, 4, 5, EOS, BOS]
    assert first["targets"].tolist() == [3, 4, 5, EOS, PAD, 6]
    assert first["weights"].tolist() == [1, 1, 1, 1, 0, 1]
    assert first["segment_ids"].tolist() == [1, 1, 1, 1, 1, 2]
    assert second["tokens"].tolist() == [6, 7, EOS, PAD, PAD, PAD]
    assert second["targets"].tolist() == [7, EOS, PAD, PAD, PAD, PAD]
    assert second["weights"].tolist() == [1, 1, 0, 0, 0, 0]
    assert second["segment_ids"].tolist() == [1, 1, 1, 0, 0, 0]
    assert second["document_ids"].tolist() == [1, 1, 1, -1, -1, -1]
    dtypes = {name: array.dtype.name for name, array in first.items()}
    assert dtypes.pop("weights") == "float32" and set(dtypes.values()) == {"int32"}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(2, 9), st.data())
def test_every_token_is_an_input_once_and_a_target_once(lengths, T, data):
    order = data.draw(st.permutations(range(len(lengths))))
    packed, documents = stream(lengths, T, order)
    rows = [packed.row(i) for i in range(len(packed))]
    tokens, targets, segments, weights, owners = (
        np.concatenate([row[name] for row in rows])
        for name in ("tokens", "targets", "segment_ids", "weights", "document_ids")
    )
    assert tokens[segments > 0].tolist() == sum(documents, [])
    assert targets[weights > 0].tolist() == sum((d[1:] for d in documents), [])
    assert not tokens[segments == 0].any() and not weights[segments == 0].any()
    assert owners[segments > 0].tolist() == [
        d for d, ids in zip(order, documents, strict=True) for _ in ids
    ]
    for row in rows:
        check_segment_ids(row["segment_ids"][None])
        assert row["segment_ids"][0] == 1
        changes = np.diff(row["document_ids"][row["segment_ids"] > 0]) != 0
        np.testing.assert_array_equal(np.diff(row["segment_ids"][row["segment_ids"] > 0]), changes)


@pytest.mark.parametrize(
    "ids",
    [
        [[1, 1, 2, 2]],
        [[0, 0, 1, 1, 0, 2, 0]],
        [[3, 3, 7, 7]],
        [[0, 0], [1, 1]],
    ],
)
def test_good_segment_ids_pass(ids):
    check_segment_ids(np.array(ids, np.int32))
    check_segment_ids(np.array(ids, np.int32), num_segments=7)


@pytest.mark.parametrize(
    ("ids", "where", "word"),
    [
        ([[1, 1], [1, -1]], r"\[1, 1\] = -1", "positive"),
        ([[1, 2, 1]], r"\[0, 2\] = 1", "must not decrease"),
        ([[2, 0, 1]], r"\[0, 2\] = 1", "must not decrease"),
        ([[1, 0, 1]], r"\[0, 2\] = 1", "padding must not stand inside"),
        ([[1, 4]], r"\[0, 1\] = 4", "raise num_segments"),
    ],
)
def test_bad_segment_ids_are_refused_with_row_index_and_value(ids, where, word):
    with pytest.raises(ValueError, match=f"{where}: .*{word}"):
        check_segment_ids(np.array(ids, np.int32), num_segments=3)


def test_segment_base_shifts_the_allowed_range():
    ids = np.array([[0, 5, 6, 0]], np.int32)
    check_segment_ids(ids, num_segments=2, segment_base=4)
    with pytest.raises(ValueError, match=r"\[0, 2\] = 6.*at most"):
        check_segment_ids(ids, num_segments=1, segment_base=4)
    with pytest.raises(ValueError, match=r"\[0, 1\] = 5.*segment_base=5"):
        check_segment_ids(ids, num_segments=2, segment_base=5)


@pytest.mark.parametrize(
    ("ids", "word"),
    [(np.ones((1, 2), np.int64), "int64"), (np.ones(2, np.int32), r"\[2\].*\[B, T\]")],
)
def test_wrong_dtype_and_rank_are_refused(ids, word):
    with pytest.raises(ValueError, match=word):
        check_segment_ids(ids)


def test_cumulative_lengths_become_ids_and_empty_sequences_leave_theirs_out():
    ids = from_cu_seqlens([0, 5, 5, 9], 9)
    assert ids.tolist() == [[1] * 5 + [3] * 4]
    assert ids.dtype == np.int32
    check_segment_ids(ids, num_segments=3)


@pytest.mark.parametrize(
    ("cu", "word"),
    [
        ([0, 12, 8, 16], r"\[2\] = 8 follows 12"),
        ([0, 5, 5, 9], r"\[3\] = 9: must end at T = 128"),
        ([1, 128], r"\[0\] = 1: must be 0"),
        ([0], "at least two"),
        ([0.0, 128.0], "float64"),
    ],
)
def test_bad_cumulative_lengths_are_refused_with_the_index(cu, word):
    with pytest.raises(ValueError, match=word):
        from_cu_seqlens(np.array(cu), 128)
