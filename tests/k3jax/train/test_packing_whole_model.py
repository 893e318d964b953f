"""Documents packed in a row, and padding, through the whole model and its gradient."""

import jax
import numpy as np
import pytest
from small_runs import LENGTH, MODEL, largest_error, packed

from k3jax.models.kimi_k3 import model


@pytest.fixture(scope="module")
def logits():
    """(state, tokens, segment ids [ROWS, LENGTH]) -> logits of row 0; compiled once."""
    compiled = jax.jit(lambda v, t, s: model.logits(MODEL, v, t, s)[0])
    return lambda state, t, s: np.asarray(
        compiled({"params": state.params, "router": state.router}, t, s)
    )


def test_a_packed_row_has_the_token_weighted_mean_loss_of_its_documents(whole_gradient, fresh, rng):
    documents = [rng.integers(0, 256, n) for n in (5, 9, 1, 30)]
    (together, _), grads = whole_gradient(fresh(), packed(documents))
    loss, weight, apart = 0.0, 0.0, jax.tree.map(np.zeros_like, grads)
    for ids in documents:
        alone = packed([ids])
        (value, _), grad = whole_gradient(fresh(), alone)
        n = alone["weights"].sum()
        loss, weight = loss + n * value, weight + n
        apart = jax.tree.map(lambda a, g, n=n: a + n * np.asarray(g), apart, grad)
    assert abs(together - loss / weight) < 1e-5
    # float32 sums in another order.
    assert largest_error(grads, jax.tree.map(lambda a: a / weight, apart)) < 1e-4


def test_a_changed_token_reaches_no_other_document_of_its_row(logits, fresh, rng):
    # Through convolution, KDA state, attention mask and depth mixture: not one bit.
    row = packed([rng.integers(0, 256, n) for n in (5, 9, 3)])
    before = logits(fresh(), row["tokens"], row["segment_ids"])
    row["tokens"][0, 2] ^= 1
    after = logits(fresh(), row["tokens"], row["segment_ids"])
    assert np.array_equal(before[5:], after[5:])
    assert np.array_equal(before[:2], after[:2])
    assert np.all(np.any(before[2:5] != after[2:5], axis=-1))


@pytest.mark.parametrize("length", [3, 7])
def test_left_padding_changes_no_logit(logits, fresh, rng, length):
    row = packed([rng.integers(0, 256, length)])
    right = logits(fresh(), row["tokens"], row["segment_ids"])[:length]
    left = [np.roll(row[name], LENGTH - length, axis=1) for name in ("tokens", "segment_ids")]
    # Logits are about 1; the chunk grid meets the tokens elsewhere, so sums run in another order.
    np.testing.assert_allclose(logits(fresh(), *left)[-length:], right, atol=2e-5)


def test_left_padding_changes_no_gradient_and_keeps_it_finite(whole_gradient, fresh, rng):
    right = packed([rng.integers(0, 256, 3)], [rng.integers(0, 256, 7)])
    left = {name: np.zeros_like(value) for name, value in right.items()}
    for row, length in enumerate((3, 7)):
        for name in left:
            left[name][row, -length:] = right[name][row, :length]
    (loss, _), grads = whole_gradient(fresh(), right)
    (left_loss, _), left_grads = whole_gradient(fresh(), left)
    assert abs(loss - left_loss) < 1e-5
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(left_grads))
    assert largest_error(grads, left_grads) < 1e-4


def test_the_histogram_counts_a_token_once_under_recomputation_and_padding_never(
    whole_gradient, fresh, rng
):
    assert MODEL.remat  # the gradient runs every layer's forward pass twice
    documents = [rng.integers(0, 256, n) for n in (5, 9)]
    (_, stats), _ = whole_gradient(fresh(), packed(documents))
    assert np.all(np.sum(stats.histogram, axis=-1) == 14)
    assert np.all(np.sum(stats.load, axis=-1) == 14 * MODEL.moe.top_k)
