"""Packed rows: documents do not touch each other, and padding touches nothing."""

import numpy as np
import pytest

from pallas_kernels.numerics import relative_error

TOKENS = ("q", "k", "v", "g", "beta")
T = 40
LENGTHS = (5, 9, 3, 17)
# Where each document's tokens sit: one row packed from the left, one with padding between, one
# left-padded, one with padding inside the documents.
ROWS = [
    [list(range(start, start + n)) for start, n in zip((0, 5, 14, 17), LENGTHS, strict=True)],
    [list(range(start, start + n)) for start, n in zip((1, 7, 18, 23), LENGTHS, strict=True)],
    [list(range(start, start + n)) for start, n in zip((6, 11, 20, 23), LENGTHS, strict=True)],
    [[0, 2, 3, 4, 6], [7, *range(9, 17)], [17, 20, 21], [*range(22, 30), *range(31, 40)]],
]
IDS = [(1, 2, 3, 4), (2, 3, 7, 100), (1, 2, 3, 4), (5, 6, 7, 8)]

# Packing moves the bounds of chunks through a document: the same float32 sums in another order.
PACKED_TOLERANCE = 1e-4
# One token in closed form: a dozen float32 roundings, and an absolute floor near zero.
ONE_TOKEN = {"rtol": 1e-5, "atol": 1e-7}


@pytest.fixture(scope="module")
def documents(draw):
    """Four documents as four tail-padded rows."""
    return draw(T, B=4)


@pytest.fixture(scope="module")
def separate(documents, evaluate, cotangent):
    ids = np.arange(T) < np.array(LENGTHS)[:, None]
    d_o = cotangent((4, T, 2, 12)) * ids[..., None, None]
    return evaluate(documents, segment_ids=ids.astype(np.int32), d_o=d_o, chunk_size=16)


def place(rows, name_to_array, fill=0.0):
    """Moves document d's tokens, row d of the input, to its places in every packed row."""
    packed = {n: np.full_like(a, fill) for n, a in name_to_array.items()}
    for b, row in enumerate(rows):
        for d, places in enumerate(row):
            for name, array in name_to_array.items():
                packed[name][b, places] = array[d, : len(places)]
    return packed


def packed_ids():
    ids = np.zeros((4, T), np.int32)
    for b, row in enumerate(ROWS):
        for d, places in enumerate(row):
            ids[b, places] = IDS[b][d]
    return ids


@pytest.fixture(scope="module")
def run_packed(documents, evaluate, cotangent):
    def run(fill, **options):
        tokens = place(ROWS, {n: documents[n] for n in TOKENS}, fill)
        d_o = place(ROWS, {"o": cotangent((4, T, 2, 12))})["o"]
        x = documents | tokens
        # The recurrence has no chunks whose size could be set.
        size = None if options.get("implementation") == "reference" else 16
        options = {"chunk_size": size} | options
        return evaluate(x, segment_ids=packed_ids(), d_o=d_o, **options)

    return run


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize("fill", [0.0, 1e30, np.nan])
def test_packed_documents_equal_separate_ones_whatever_padding_holds(
    fill, implementation, separate, run_packed
):
    outputs, gradients = run_packed(fill, implementation=implementation)
    expected, wanted = separate
    o = place(ROWS, {"o": expected["o"]})["o"]
    for b in range(4):
        assert relative_error(outputs["o"][b], o[b]) < PACKED_TOLERANCE
    for name, value in place(ROWS, {n: wanted[n] for n in TOKENS}).items():
        assert relative_error(gradients[name], value) < PACKED_TOLERANCE, name
    # Every document is packed four times.
    for name in ("a_log", "dt_bias"):
        assert relative_error(gradients[name], 4 * wanted[name]) < PACKED_TOLERANCE, name
    padding = packed_ids() == 0
    assert np.all(outputs["o"][padding] == 0)
    assert all(np.all(gradients[name][padding] == 0) for name in TOKENS)


def test_packed_documents_with_the_softplus_gate_equal_the_recurrence(run_packed):
    expected, wanted = run_packed(0.0, lower_bound=None, implementation="reference")
    got, gradients = run_packed(0.0, lower_bound=None, chunk_size=32)
    assert relative_error(got["o"], expected["o"]) < PACKED_TOLERANCE
    for name, value in wanted.items():
        assert relative_error(gradients[name], value) < PACKED_TOLERANCE, name


@pytest.mark.parametrize(("lower_bound", "size"), [(-5.0, 16), (None, 32)])
def test_changing_a_document_leaves_the_others_bitwise_unchanged(
    lower_bound, size, documents, evaluate
):
    options = {"segment_ids": packed_ids(), "chunk_size": size, "lower_bound": lower_bound}
    x = documents | place(ROWS, {n: documents[n] for n in TOKENS})
    before = evaluate(x, **options)[0]["o"]
    changed = {n: a.copy() for n, a in x.items()}
    for name in TOKENS:
        changed[name][0, 7] *= -0.5
    after = evaluate(changed, **options)[0]["o"]
    others = np.setdiff1d(np.arange(T), ROWS[0][1])
    np.testing.assert_array_equal(after[0, others], before[0, others])
    np.testing.assert_array_equal(after[1:], before[1:])
    assert np.any(after[0, 7:14] != before[0, 7:14])


def test_many_short_documents_with_long_ones_equal_separate_runs(draw, evaluate, cotangent):
    lengths = (2049, 1011, 513, 256, 128, 65, 32, 16, 7, 4, 5, 1)
    total, longest, count = sum(lengths), max(lengths), len(lengths)
    x = draw(longest, B=count, H=1, K=8, V=8)
    alone = (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int32)
    d_o = cotangent(x["v"].shape) * alone[..., None, None]
    expected, wanted = evaluate(x, segment_ids=alone, d_o=d_o)

    def join(array):
        return np.concatenate([row[:n] for row, n in zip(array, lengths, strict=True)])[None]

    packed = x | {n: join(x[n]) for n in TOKENS}
    ids = np.repeat(np.arange(1, count + 1, dtype=np.int32), lengths)[None]
    assert ids.shape == (1, total) == (1, 4087)
    got, gradients = evaluate(packed, segment_ids=ids, d_o=join(d_o))
    assert relative_error(got["o"], join(expected["o"])) < PACKED_TOLERANCE
    for name in TOKENS:
        assert relative_error(gradients[name], join(wanted[name])) < PACKED_TOLERANCE, name
    for name in ("a_log", "dt_bias"):
        assert relative_error(gradients[name], wanted[name]) < PACKED_TOLERANCE, name
    q, k = (packed[n][0, -1] / np.sqrt(np.sum(packed[n][0, -1] ** 2) + 1e-6) for n in "qk")
    closed = packed["beta"][0, -1, :, None] * np.sum(q * k) * packed["v"][0, -1] * 8**-0.5
    np.testing.assert_allclose(got["o"][0, -1], closed, **ONE_TOKEN)
