"""Token choice against a distribution small enough to write down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.models.kimi_k3.sampling import Sampling, filtered_logits, sample

# In an order that is not sorted, so that a filter applied to the wrong axis shows.
PROBABILITIES = np.array([0.15, 0.5, 0.05, 0.2, 0.1])

filter_row = jax.jit(lambda t, k, p: filtered_logits(jnp.log(PROBABILITIES)[None], t, k, p)[0])
draw = jax.jit(
    lambda key, t, k, p: sample(jnp.log(jnp.tile(PROBABILITIES, (2000, 1))), key, t, k, p)
)


@pytest.mark.parametrize(
    "top_k, top_p, kept",
    [
        (0, 1.0, [0, 1, 2, 3, 4]),
        (1, 1.0, [1]),
        (3, 1.0, [0, 1, 3]),
        (9, 1.0, [0, 1, 2, 3, 4]),
        (0, 0.45, [1]),  # the token that crosses p is kept
        (0, 0.6, [1, 3]),
        (0, 1e-9, [1]),  # one token always stays
        (2, 0.75, [1, 3]),  # 0.5 / 0.7 < 0.75: renormalised after top-k
        (2, 0.70, [1]),  # 0.5 / 0.7 = 0.714 already reaches 0.70
    ],
)
def test_filters_keep_exactly_the_tokens_worked_out_by_hand(top_k, top_p, kept):
    assert np.flatnonzero(np.isfinite(filter_row(1.0, top_k, top_p))).tolist() == kept


@pytest.mark.parametrize(
    "size, p, kept", [(100, 0.1, 10), (100, 0.5, 50), (4, 0.5, 2), (8192, 0.25, 2048), (3, 0.34, 2)]
)
def test_a_mass_of_exactly_p_is_enough(size, p, kept):
    filtered = filtered_logits(jnp.zeros((1, size)), 1.0, 0, jnp.float32(p))
    assert np.flatnonzero(np.isfinite(filtered[0])).tolist() == list(range(kept))


@pytest.mark.parametrize("scale", [0.0, 3.0, 30.0])
def test_a_top_p_of_one_drops_no_token_of_a_real_vocabulary(scale, rng):
    logits = jnp.asarray(scale * rng.normal(size=(2, 8192)), jnp.float32)
    np.testing.assert_array_equal(filtered_logits(logits, 1.0, 0, jnp.float32(1.0)), logits)


def test_the_nucleus_is_the_one_of_float64_sums(rng):
    logits = jnp.asarray(3.0 * rng.normal(size=(1, 8192)), jnp.float32)
    wide = np.sort(np.exp(np.asarray(logits[0], np.float64)))[::-1]
    mass = np.cumsum(wide) / np.sum(wide)
    for p in (0.1, 0.5, 0.9, 0.99):
        kept = np.isfinite(filtered_logits(logits, 1.0, 0, jnp.float32(p))[0]).sum()
        needed = np.searchsorted(mass, [p * (1 - 3e-6), p * (1 + 3e-6)]) + 1
        assert needed[0] <= kept <= needed[1] and needed[1] - needed[0] <= 3


def test_top_k_keeps_k_tokens_when_all_are_equal_and_prefers_low_ids():
    kept = filtered_logits(jnp.zeros((1, 8)), 1.0, 3, 1.0)
    assert np.flatnonzero(np.isfinite(kept[0])).tolist() == [0, 1, 2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_drawn_frequencies_are_the_tempered_probabilities(temperature):
    expected = PROBABILITIES ** (1 / temperature)
    expected /= expected.sum()
    counts = sum(
        np.bincount(draw(jax.random.key(seed), temperature, 0, 1.0), minlength=5)
        for seed in range(5)
    )
    # 10,000 draws: the standard error of a share is below 0.005; four of them.
    np.testing.assert_allclose(counts / counts.sum(), expected, atol=0.02)


def test_temperature_zero_is_the_first_largest_logit():
    logits = jnp.array([[0.0, 3.0, 3.0, 1.0], [2.0, -1.0, 0.0, 1.0]])
    assert sample(logits, jax.random.key(0), 0.0, 0, 1.0).tolist() == [1, 0]


def test_equal_keys_draw_equal_tokens_and_a_row_ignores_its_neighbours():
    logits = jax.random.normal(jax.random.key(1), (16, 50))
    key = jax.random.key(2)
    once, again = sample(logits, key, 1.0, 0, 1.0), sample(logits, key, 1.0, 0, 1.0)
    assert once.tolist() == again.tolist()
    assert sample(logits[:3], key, 1.0, 0, 1.0).tolist() == once[:3].tolist()
    assert sample(logits, jax.random.key(3), 1.0, 0, 1.0).tolist() != once.tolist()


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k -1 must be an integer"),
        ({"top_k": 2.5}, "top_k 2.5 must be an integer"),
        ({"top_k": True}, "top_k True must be an integer"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_settings_without_a_meaning_are_refused_by_name(settings, name):
    with pytest.raises(ValueError, match=name):
        Sampling(**settings)
