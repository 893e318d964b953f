"""Router: golden numbers, the bias's role, precision, ties, and the histogram."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from k3jax.layers.router import route, statistics
from pallas_kernels.numerics import det


def logit(s):
    return np.log(s) - np.log1p(-np.asarray(s))


def route_logits(logits, bias, k, **options):
    """Routes given logits: the identity matrix makes them the scores' logits."""
    logits = jnp.asarray(logits, jnp.float32)
    return route(logits, jnp.eye(logits.shape[-1]), jnp.asarray(bias, jnp.float32), k, **options)


def test_golden_choice_and_weights_leave_the_bias_out_of_the_weights():
    r = route_logits([[0.3, -1.2, 2.0, 0.9, -0.1, 1.1]], [0, 0.5, -0.4, 0, 0.2, -0.1], 3)
    order = np.argsort(r.indices[0])
    np.testing.assert_array_equal(np.asarray(r.indices[0])[order], [1, 3, 4])
    expected = [0.163304488, 0.501570951, 0.335124562]
    np.testing.assert_allclose(np.asarray(r.weights[0])[order], expected, atol=1e-6)
    biased = np.sort(np.asarray(r.scores[0] + jnp.array([0, 0.5, -0.4, 0, 0.2, -0.1])))[::-1]
    np.testing.assert_allclose(r.cutoff[0], biased[3], atol=1e-7)


def test_weights_sum_to_the_scaling_factor_and_a_common_bias_changes_nothing(rng):
    x = rng.normal(size=(64, 16))
    plain = route_logits(x, np.zeros(16), 4, scaling_factor=2.446)
    shifted = route_logits(x, np.full(16, 0.25), 4, scaling_factor=2.446)
    np.testing.assert_allclose(np.sum(plain.weights, -1), 2.446, rtol=1e-6)
    np.testing.assert_array_equal(plain.indices, shifted.indices)
    np.testing.assert_allclose(plain.weights, shifted.weights, rtol=1e-6)
    raw = route_logits(x, np.zeros(16), 4, renormalize=False)
    chosen = np.take_along_axis(np.asarray(raw.scores), np.asarray(raw.indices), -1)
    np.testing.assert_allclose(raw.weights, chosen, rtol=1e-6)


def test_a_large_bias_always_chooses_its_expert(rng):
    r = route_logits(rng.normal(size=(100, 4)), [10.0, 0, 0, 0], 1)
    assert np.all(np.asarray(r.indices) == 0)


def test_equal_scores_go_to_the_lower_expert():
    r = route(jnp.ones((1024, 8)), jnp.zeros((8, 4)), jnp.zeros(4), 2)
    assert np.all(np.asarray(r.indices) == [0, 1])


def test_near_ties_are_decided_as_in_float64(rng):
    # bfloat16 activations, experts 1e-4 apart in score: a bfloat16 product would flip them.
    x = jnp.asarray(rng.normal(size=(256, 64)), jnp.bfloat16)
    w = rng.normal(size=(64, 1)).astype(np.float32) * 0.05
    w = np.concatenate([w, w + 4e-4 * rng.normal(size=(64, 1)).astype(np.float32)], axis=1)
    w = np.concatenate([w, np.full((64, 1), 0.0, np.float32)], axis=1)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    r = route(x, jnp.asarray(w), jnp.array([0.0, 0.0, -5.0]), 1)
    np.testing.assert_array_equal(r.indices[:, 0], np.argmax(exact[:, :2], axis=-1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_product_and_its_gradients_are_float32_at_full_precision(dtype):
    """On a CPU every float32 product is; on a GPU TF32 would flip near-ties."""

    def total(x, w):
        return jnp.sum(route(x, w, jnp.zeros(5), 2).weights ** 2)

    operands = jnp.ones((8, 6), dtype), jnp.ones((6, 5), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(*operands).jaxpr
    found = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert len(found) == 3
    for product in found:
        assert {str(v.aval.dtype) for v in product.invars} == {"float32"}
        assert set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}


def test_the_bias_and_the_choice_get_no_gradient(rng):
    x = jnp.asarray(rng.normal(size=(8, 6)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(6, 5)), jnp.float32)

    def total(w, bias):
        r = route(x, w, bias, 2)
        stats = statistics(r, bias, jnp.ones(8, bool), 10)
        return jnp.sum(r.weights**2) + stats.low + stats.width

    dw, dbias = jax.grad(total, argnums=(0, 1))(w, jnp.zeros(5))
    assert np.any(np.asarray(dw)) and not np.any(np.asarray(dbias))


def test_histogram_and_load_equal_a_count_in_float64_and_skip_padding(rng):
    m, n, k, bins = 200, 7, 2, 50
    bias = rng.normal(size=n).astype(np.float32) * 0.1
    counted = rng.random(m) < 0.7
    r = route_logits(rng.normal(size=(m, n)), bias, k)
    stats = jax.jit(lambda r: statistics(r, jnp.asarray(bias), jnp.asarray(counted), bins))(r)
    required = (np.asarray(r.cutoff)[:, None] - np.asarray(r.scores))[counted]
    edges = bias.min() - 1 + np.arange(bins + 1) * (bias.max() - bias.min() + 2) / bins
    for e in range(n):
        counts, _ = np.histogram(required[:, e], edges)
        # A value within rounding of an edge may fall on either side.
        assert np.abs(np.cumsum(counts) - np.cumsum(stats.histogram[e])).max() <= 1
    np.testing.assert_array_equal(np.sum(stats.histogram, -1), counted.sum())
    load = np.bincount(np.asarray(r.indices)[counted].ravel(), minlength=n)
    np.testing.assert_array_equal(stats.load, load)


@pytest.mark.parametrize(
    "balancing, present",
    [
        ("histogram", {"histogram", "low", "width"}),
        ("quantile", {"required"}),
        ("sign", set()),
        ("aux_loss", {"score_sum"}),
        ("none", set()),
    ],
)
def test_each_balancing_rule_counts_what_it_needs_and_all_count_the_load(rng, balancing, present):
    bias = np.linspace(-0.1, 0.1, 7).astype(np.float32)
    counted = rng.random(40) < 0.7
    r = route_logits(rng.normal(size=(40, 7)), bias, 2)
    stats = statistics(r, jnp.asarray(bias), jnp.asarray(counted), 16, balancing)
    assert {n for n, v in stats._asdict().items() if v is not None} == {"load"} | present
    assert int(stats.load.sum()) == 2 * counted.sum()
    scores = np.asarray(r.scores, np.float64)
    if balancing == "quantile":
        expected = np.asarray(r.cutoff)[:, None] - scores
        expected[~counted] = np.inf
        np.testing.assert_allclose(stats.required, expected, atol=1e-6)
    if balancing == "aux_loss":
        shares = scores / scores.sum(-1, keepdims=True)
        np.testing.assert_allclose(stats.score_sum, shares[counted].sum(0), rtol=1e-5)


def test_golden_cutoffs_of_the_balancing_example():
    s = 1 / (1 + np.exp(-(2 * det((8, 4), 1.7, 0.4) + np.array([1.5, 0.8, 0.2, -1.0]))))
    r = route_logits(logit(s), np.zeros(4), 1)
    expected = [
        0.907109070, 0.858397290, 0.693370937, 0.595880456,
        0.714706127, 0.720570032, 0.689283211, 0.490873683,
    ]  # fmt: skip
    np.testing.assert_allclose(r.cutoff, expected, atol=2e-6)
    load = statistics(r, jnp.zeros(4), jnp.ones(8, bool), 1000).load
    np.testing.assert_array_equal(load, [5, 1, 2, 0])
