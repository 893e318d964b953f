"""The sign rule and the Switch loss against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.optim.load_balancing import sign_bias, switch_loss


def test_the_sign_rule_moves_each_bias_by_the_rate_towards_a_balanced_load():
    load = jnp.array([[4, 3, 1, 0], [2, 2, 2, 2], [0, 0, 0, 0]])
    bias = jnp.array([[0.1, -0.1, 0.2, -0.2], [0.3, 0.1, -0.3, -0.1], [0.25, 0.5, 1.0, 7.0]])
    new = np.asarray(sign_bias(load, bias, 1e-2))
    np.testing.assert_allclose(new[0], [0.09, -0.11, 0.21, -0.19], atol=1e-7)
    np.testing.assert_allclose(new[1], bias[1], atol=1e-7)
    assert np.array_equal(new[2], bias[2])  # no token: not even centred


def test_the_sign_rule_does_not_drift(rng):
    bias = jnp.zeros(5)
    for _ in range(200):
        bias = sign_bias(jnp.array([9, 1, 1, 1, 1]), bias, 1e-2)
    assert abs(float(jnp.mean(bias))) < 1e-6
    # One expert of five above the mean: it falls by 1.6 rates a step, the others rise by 0.4.
    np.testing.assert_allclose(bias, [-3.2, 0.8, 0.8, 0.8, 0.8], rtol=1e-4)


def test_the_switch_loss_is_one_a_layer_when_uniform_and_more_when_loads_follow_scores():
    k, m, n = 2, 12, 4
    uniform = switch_loss(jnp.full((3, n), m / n), jnp.full((3, n), m * k // n), k)
    np.testing.assert_allclose(uniform, 3.0, rtol=1e-6)
    scores, load = m * jnp.array([0.7, 0.1, 0.1, 0.1]), jnp.array([12, 4, 4, 4])
    # n Σ f P = 4 (0.5 · 0.7 + 3 · (1/6) · 0.1)
    np.testing.assert_allclose(switch_loss(scores, load, k), 1.6, rtol=1e-6)
    assert switch_loss(jnp.zeros(n), jnp.zeros(n, int), k) == 0


def test_the_switch_loss_of_pieces_adds_up_and_its_gradient_is_the_shares(rng):
    sums = jnp.asarray(rng.uniform(size=(4, 2, 6)), jnp.float32)
    load = jnp.asarray(rng.integers(1, 9, (2, 6)))
    whole = switch_loss(sums.sum(0), load, 3)
    np.testing.assert_allclose(sum(switch_loss(s, load, 3) for s in sums), whole, rtol=1e-6)
    gradient = jax.grad(switch_loss)(sums[0], load, 3)
    share = np.asarray(load) / np.asarray(load).sum(-1, keepdims=True)
    tokens = np.asarray(load).sum(-1, keepdims=True) / 3
    np.testing.assert_allclose(gradient, 6 * share / tokens, rtol=1e-6)
