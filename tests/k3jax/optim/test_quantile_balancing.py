"""Quantile Balancing against the report's worked example, golden numbers and a numpy oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.optim import quantile_balancing as qb

# The report's toy: 8 tokens, 4 experts, one chosen.
TOY = np.array(
    [
        [0.9, 0.6, 0.3, 0.1],
        [0.8, 0.7, 0.2, 0.1],
        [0.9, 0.5, 0.4, 0.2],
        [0.7, 0.65, 0.3, 0.2],
        [0.6, 0.8, 0.3, 0.15],
        [0.5, 0.7, 0.45, 0.1],
        [0.4, 0.75, 0.35, 0.3],
        [0.3, 0.4, 0.6, 0.25],
    ]
)
GOLDEN = 1 / (
    1 + np.exp(-(2 * np.sin(1.7 * np.arange(32) + 0.4).reshape(8, 4) + [1.5, 0.8, 0.2, -1]))
)


def required(scores, bias, k):
    """Oracle: r_ij = alpha_i - s_ij in float64."""
    alpha = np.sort(scores + bias, axis=1)[:, ::-1][:, k]
    return alpha[:, None] - scores


def load(scores, bias, k):
    """Tokens per expert; of equal scores the lower expert is chosen."""
    chosen = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :k]
    return np.bincount(chosen.ravel(), minlength=scores.shape[1])


def histogram(scores, bias, k, bins=1000):
    """Oracle of the forward pass: counts over [min b - 1, max b + 1], low edge, bin width."""
    low, width = bias.min() - 1, (bias.max() - bias.min() + 2) / bins
    # Floor of a rounded quotient: 1 / 0.002 is bin 500, which the golden numbers assume.
    index = np.clip(np.floor((required(scores, bias, k) - low) / width), 0, bins - 1).astype(int)
    counts = np.stack([np.bincount(column, minlength=bins) for column in index.T])
    return np.int32(counts), np.float32(low), np.float32(width)


@functools.partial(jax.jit, static_argnums=4)
def next_bias(counts, low, width, bias, k):
    return qb.bias_from_histogram(counts, low, width, bias, k)


def test_the_toy_of_the_report_gives_its_loads_and_its_next_bias():
    zero = np.zeros(4)
    assert load(TOY, zero, 1).tolist() == [4, 3, 1, 0]
    bias = qb.exact_bias(jnp.asarray(TOY, jnp.float32), jnp.zeros(4), 1)
    # float32 differences of numbers below one
    np.testing.assert_allclose(bias, [-0.1125, -0.2125, 0.0375, 0.2875], atol=2e-7)
    # One update need not balance the batch that it came from.
    assert load(TOY, np.array([-0.1125, -0.2125, 0.0375, 0.2875]), 1).tolist() == [4, 1, 2, 1]


def test_the_exact_rule_gives_the_golden_bias_and_stays_there():
    assert load(GOLDEN, np.zeros(4), 1).tolist() == [5, 1, 2, 0]
    scores = jnp.asarray(GOLDEN, jnp.float32)
    bias = qb.exact_bias(scores, jnp.zeros(4), 1)
    golden = [-0.199237083, 0.025899747, 0.147437588, 0.025899747]
    np.testing.assert_allclose(bias, golden, atol=5e-7)
    np.testing.assert_allclose(qb.exact_bias(scores, bias, 1), golden, atol=5e-7)


def test_the_histogram_rule_gives_the_golden_bias_and_the_golden_loads():
    counts, low, width = histogram(GOLDEN, np.zeros(4), 1)
    quantile = qb.histogram_quantile(counts, low, width, 1)
    np.testing.assert_allclose(quantile, [-0.276, 0.001, -0.106, 0.00133333], atol=1e-6)
    bias, loads = np.zeros(4, np.float32), []
    for _ in range(4):
        loads.append(load(GOLDEN, bias, 1).tolist())
        bias = np.asarray(next_bias(*histogram(GOLDEN, bias.astype(float), 1), bias, 1))
    assert loads == [[5, 1, 2, 0], [1, 3, 2, 2], [3, 2, 2, 1], [2, 2, 2, 2]]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 4), st.sampled_from([1, 3, 7]))
def test_the_histogram_quantile_is_within_one_bin_of_the_order_statistic(seed, skew, k):
    rng = np.random.default_rng(seed)
    m, n = 101, 8  # q = m k / n is never an integer here, so one order statistic is meant
    scores = 1 / (1 + np.exp(-(rng.normal(size=(m, n)) + skew * rng.normal(size=n))))
    bias = rng.normal(size=n) * 0.1
    counts, low, width = histogram(scores, bias, k, bins=64)
    exact = np.sort(required(scores, bias, k), axis=0)[-(-m * k // n) - 1]
    got = qb.histogram_quantile(counts, low, width, k)
    assert np.abs(np.asarray(got) - exact).max() <= width * (1 + 1e-4)
    new = np.asarray(next_bias(counts, low, width, np.float32(bias), k))
    assert abs(new.mean()) < 1e-6
    np.testing.assert_allclose(
        qb.exact_bias(jnp.asarray(scores, jnp.float32), jnp.asarray(bias, jnp.float32), k),
        exact - exact.mean(),
        atol=1e-6,
    )


def test_counting_every_token_twice_or_in_another_order_changes_no_bit(rng):
    """Recomputed forward passes, micro-batches and shards all sum to the same integers."""
    scores, bias = rng.uniform(size=(96, 6)), np.zeros(6)
    counts, low, width = histogram(scores, bias, 2)
    parts = [histogram(part, bias, 2)[0] for part in np.split(rng.permutation(scores), 8)]
    zero = np.zeros(6, np.float32)
    expected = np.asarray(next_bias(counts, low, width, zero, 2))
    for other in (sum(parts), 2 * counts):
        np.testing.assert_array_equal(next_bias(other, low, width, zero, 2), expected)


def test_the_bias_is_bitwise_equal_when_tokens_are_counted_on_eight_devices(rng, mesh):
    scores, bias = rng.uniform(size=(96, 6)), np.zeros(6, np.float32)
    parts = np.stack([histogram(part, np.zeros(6), 2)[0] for part in np.split(scores, 8)])
    counts, low, width = histogram(scores, np.zeros(6), 2)
    expected = np.asarray(next_bias(counts, low, width, bias, 2))
    with jax.set_mesh(jax.make_mesh((1, 8, 1, 1), mesh.axis_names)):
        spread = jax.device_put(parts, jax.sharding.PartitionSpec("data"))

        def total(part):
            return jax.lax.psum(part[0], "data")

        summed = jax.shard_map(total, out_specs=jax.sharding.PartitionSpec())(spread)
        np.testing.assert_array_equal(next_bias(summed, low, width, bias, 2), expected)


def test_layers_are_balanced_apart_and_an_empty_one_keeps_its_bias(rng):
    bias = np.float32(rng.normal(size=(3, 6)))
    made = [histogram(rng.uniform(size=(50, 6)), b.astype(float), 2) for b in bias]
    counts, low, width = (np.stack(x) for x in zip(*made, strict=True))
    counts[1] = 0
    new = np.asarray(next_bias(counts, low, width, bias, 2))
    np.testing.assert_array_equal(new[1], bias[1])
    for layer in (0, 2):
        alone = next_bias(counts[layer], low[layer], width[layer], bias[layer], 2)
        np.testing.assert_allclose(new[layer], alone, rtol=1e-6, atol=1e-7)


def test_an_expert_of_constant_score_and_counts_beyond_float32_stay_finite(rng):
    scores = rng.uniform(size=(64, 4))
    scores[:, 2] = 0.5
    counts, low, width = histogram(scores, np.zeros(4), 1)
    zero = np.zeros(4, np.float32)
    small = np.asarray(next_bias(counts, low, width, zero, 1))
    large = np.asarray(next_bias(counts * 2**24, low, width, zero, 1))
    assert np.isfinite(small).all()
    np.testing.assert_allclose(large, small, atol=1e-7)


def test_a_constant_added_to_the_bias_changes_nothing(rng):
    scores = jnp.asarray(rng.uniform(size=(40, 5)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=5), jnp.float32)
    moved = qb.exact_bias(scores, bias + 0.5, 2)
    np.testing.assert_allclose(moved, qb.exact_bias(scores, bias, 2), atol=1e-6)


@pytest.mark.parametrize("k", [0, 4, 5])
def test_a_router_that_rejects_no_expert_is_refused(k):
    with pytest.raises(ValueError, match=rf"top_k={k} of 4 experts: .* 1 <= top_k <= 3"):
        qb.exact_bias(jnp.zeros((8, 4)), jnp.zeros(4), k)
    with pytest.raises(ValueError, match="first rejected expert"):
        qb.bias_from_histogram(jnp.zeros((4, 9), int), 0.0, 0.1, jnp.zeros(4), k)


def test_a_skewed_router_is_balanced_within_a_few_steps():
    """Fresh tokens each step; the floor of a fresh batch is sqrt(2 ln n / q) = 0.15 here."""
    rng = np.random.default_rng(5)
    m, n, k = 4096, 64, 6
    popularity, bias, violations = rng.normal(size=n), np.zeros(n, np.float32), []
    for _ in range(5):
        scores = 1 / (1 + np.exp(-(rng.normal(size=(m, n)) + popularity)))
        violations.append(float(qb.max_violation(jnp.asarray(load(scores, bias, k)))))
        bias = np.asarray(next_bias(*histogram(scores, bias.astype(float), k), bias, k))
    assert violations[0] > 3
    assert violations[1] < 0.6
    assert max(violations[3:]) < 0.25


def test_dead_experts_and_violation_are_counted_per_layer():
    loads = np.zeros((3, 256), np.int32)
    loads[0, :14] = 100
    loads[1] = 7
    assert np.asarray(qb.dead_experts(loads)).tolist() == [242, 0, 0]
    np.testing.assert_allclose(qb.max_violation(loads), [256 / 14 - 1, 0, 0], rtol=1e-6)
