"""situ_glu and swiglu: published values, oracles, gradients, what is saved, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import numerics
from pallas_kernels.situ_glu import situ_glu, swiglu
from pallas_kernels.situ_glu.reference import reference_situ_glu, reference_swiglu

CAPS = [(4.0, 25.0), (1.0, None), (0.5, 3.0)]


def wide_situ(g, u, beta, linear_beta):
    """Eq. 12 in float64."""
    linear = u if linear_beta is None else linear_beta * np.tanh(u / linear_beta)
    return beta * np.tanh(g / beta) / (1 + np.exp(-g)) * linear


def test_the_golden_values_hold():
    g = jnp.array([1.0, -1.0, 3.0, 10.0, -8.0, 100.0])
    u = jnp.array([1.0, 2.0, -10.0, 50.0, 30.0, 100.0])
    expected = [0.7158178281, -0.5258288955, -22.9879175126]
    expected += [95.1080215340, -0.0269509509, 99.9329299740]
    np.testing.assert_allclose(situ_glu(g, u), expected, rtol=1e-6)
    v = jnp.array([0.1, 1.0, 5.0, 10.0, 100.0, -10.0])
    expected = [0.0052487, 0.71582, 16.631, 37.485, 99.933, 0.0017018]
    np.testing.assert_allclose(situ_glu(v, v), expected, rtol=3e-5)  # printed to 5 digits
    expected = [0.0052498, 0.73106, 24.833, 99.995, 10000.0, 0.0045398]
    np.testing.assert_allclose(swiglu(v, v), expected, rtol=3e-5)


@pytest.mark.parametrize(("beta", "linear_beta"), CAPS)
def test_values_equal_float64_and_gradients_equal_autodiff_of_the_oracle(rng, beta, linear_beta):
    g, u, dy = (jnp.asarray(4 * rng.standard_normal((3, 257)), jnp.float32) for _ in range(3))
    caps = dict(beta=beta, linear_beta=linear_beta)
    ours = functools.partial(situ_glu, **caps)
    oracle = functools.partial(reference_situ_glu, **caps)
    expected = wide_situ(*(np.asarray(a, np.float64) for a in (g, u)), beta, linear_beta)
    # A handful of float32 roundings; 1 - tanh² loses a few bits where tanh saturates.
    assert numerics.relative_error(ours(g, u), expected) < 1e-6
    for actual, oracle_gradient in zip(
        jax.vjp(ours, g, u)[1](dy), jax.vjp(oracle, g, u)[1](dy), strict=True
    ):
        assert numerics.relative_error(actual, oracle_gradient) < 2e-6


def test_swiglu_equals_its_oracle_in_value_and_gradient(rng):
    g, u, dy = (jnp.asarray(4 * rng.standard_normal((3, 257)), jnp.float32) for _ in range(3))
    np.testing.assert_allclose(swiglu(g, u), reference_swiglu(g, u), rtol=1e-6)
    for actual, expected in zip(
        jax.vjp(swiglu, g, u)[1](dy), jax.vjp(reference_swiglu, g, u)[1](dy), strict=True
    ):
        assert numerics.relative_error(actual, expected) < 2e-6


def test_the_output_is_bounded_and_everything_stays_finite():
    g, u = (a.ravel() for a in jnp.meshgrid(*2 * [jnp.array([-1e30, -90.0, 0.0, 90.0, 1e30])]))
    y, pull = jax.vjp(situ_glu, g, u)
    assert float(jnp.abs(y).max()) <= 100.0
    assert all(bool(jnp.isfinite(a).all()) for a in (y, *pull(jnp.ones_like(y))))
    at_zero = jax.vjp(situ_glu, jnp.zeros(2), jnp.zeros(2))
    np.testing.assert_array_equal(at_zero[0], 0.0)


def test_large_caps_approach_swiglu(rng):
    g, u = (jnp.asarray(rng.standard_normal(100), jnp.float32) for _ in range(2))
    # tanh(x / c) c = x (1 - (x / c)² / 3 …): with |x| < 4 and c = 1e4 the gap is below 1e-7.
    np.testing.assert_allclose(
        situ_glu(g, u, beta=1e4, linear_beta=1e4), swiglu(g, u), rtol=2e-6, atol=1e-7
    )


def test_bfloat16_is_computed_in_float32_and_rounded_once(rng):
    g, u, dy = (jnp.asarray(4 * rng.standard_normal(500), jnp.bfloat16) for _ in range(3))
    wide = [a.astype(jnp.float32) for a in (g, u, dy)]
    for f in (situ_glu, swiglu):
        y, pull = jax.vjp(f, g, u)
        y32, pull32 = jax.vjp(f, *wide[:2])
        for a, e in zip((y, *pull(dy)), (y32, *pull32(wide[2])), strict=True):
            assert a.dtype == jnp.bfloat16
            np.testing.assert_array_equal(a, e.astype(jnp.bfloat16))


@pytest.mark.parametrize("f", [situ_glu, swiglu])
def test_only_the_two_inputs_are_kept_for_the_backward(f):
    g, u = jnp.ones((8, 4)), jnp.ones((8, 4))
    kept = jax.tree.leaves(jax.eval_shape(lambda g, u: jax.vjp(f, g, u)[1], g, u))
    assert sum(leaf.size for leaf in kept) == 2 * g.size


def test_inside_shard_map_a_replicated_branch_gets_the_summed_gradient(rng, mesh):
    g = jnp.asarray(rng.standard_normal((8, 3)), jnp.float32)
    u = jnp.asarray(rng.standard_normal((1, 3)), jnp.float32)

    def step(g, u):
        y, pull = jax.vjp(lambda g, u: situ_glu(g, jnp.broadcast_to(u, g.shape)), g, u)
        return y, *pull(jnp.ones_like(y))

    expected = step(g, u)
    rows = jax.P(("data", "expert"))
    with jax.set_mesh(jax.make_mesh((1, 2, 4, 1), mesh.axis_names)):
        mapped = jax.shard_map(
            step, in_specs=(rows, jax.P()), out_specs=(rows, rows, jax.P()), check_vma=True
        )
        actual = jax.jit(mapped)(jax.device_put(g, rows), jax.device_put(u, jax.P()))
    errors = numerics.tree_relative_error(jax.device_get(actual), expected)
    assert max(errors.values()) < 1e-6, errors


def test_mistakes_are_refused_with_the_rule():
    one = jnp.ones(3)
    for caps in (dict(beta=0.0), dict(beta=-4.0), dict(linear_beta=0.0)):
        with pytest.raises(ValueError, match="positive"):
            situ_glu(one, one, **caps)
    with pytest.raises(ValueError, match="one shape and dtype"):
        situ_glu(one, jnp.ones(4))
    with pytest.raises(ValueError, match="one shape and dtype"):
        swiglu(one, one.astype(jnp.bfloat16))
