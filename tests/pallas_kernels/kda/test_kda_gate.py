"""Both gates: published values, that they are two functions, and gradients where they saturate."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda
from pallas_kernels.kda.gate import log_decay
from pallas_kernels.kda.inputs import l2_normalize


def decay(logit, a_log, lower_bound):
    """Scalar gate without bias."""
    logits, rate = jnp.full((1, 1), logit, jnp.float32), jnp.array([a_log], jnp.float32)
    return float(log_decay(logits, rate, None, lower_bound)[0, 0])


@pytest.mark.parametrize(
    ("a_log", "logit", "expected"),
    [
        (0, 0, -2.5),
        (0, 2, -4.4039853894),
        (0.5, -1, -0.8064092420),
        (1, 3, -4.9985637143),
        (-0.4, -6, -0.0880155089),
        (np.log(2), 1, -4.403985),
    ],
)
def test_bounded_gate_gives_the_published_values(a_log, logit, expected):
    # float32 rounds the logit and the sigmoid once each.
    assert decay(logit, a_log, -5.0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("a_log", "logit", "expected"),
    [(0, 0, -0.6931471806), (0.5, -1, -0.5164812072), (2, 1.5, -12.5718381585)],
)
def test_softplus_gate_gives_the_published_values(a_log, logit, expected):
    assert decay(logit, a_log, None) == pytest.approx(expected, rel=1e-6)


def test_a_rate_belongs_to_a_head_and_a_bias_to_a_channel():
    logits = jnp.ones((2, 3))
    g = log_decay(logits, jnp.log(jnp.array([1.0, 2.0])), jnp.zeros((2, 3)), -5.0)
    assert np.ptp(g[0]) == 0 and np.ptp(g[1]) == 0 and g[0, 0] != g[1, 0]
    biased = log_decay(logits, jnp.zeros(2), jnp.array([[0.0, 1, 2], [0, 0, 0]]), -5.0)
    assert len(set(np.asarray(biased[0]).tolist())) == 3 and np.ptp(biased[1]) == 0


def test_softplus_of_100_is_exactly_100():
    assert decay(100.0, 0.0, None) == -100.0


@pytest.mark.parametrize("lower_bound", [-5.001, 0, 1.0, float("nan"), float("-inf")])
def test_a_lower_bound_outside_its_range_is_refused(lower_bound, draw):
    x = draw(1)
    with pytest.raises(ValueError, match=r"outside \[-5, 0\)"):
        kda(**x, lower_bound=lower_bound)


# Saturated: the derivative, or 1 - σ, is below what float32 can hold.
SATURATED = {
    "bounded": [(20, 80), (20, -80), (80, 80), (80, -80), (0, 80)],
    "softplus": [(20, 0), (20, 80), (80, 0), (80, 80)],
}


EXTREMES = list(itertools.product((-20.0, 0.0, 20.0, 80.0), (-80.0, 0.0, 80.0)))


@pytest.fixture(scope="module")
def run_extremes(draw, evaluate):
    """One head per pair of A_log and logit; or ordinary values of both in the same program."""

    def run(implementation, gate, dtype=jnp.float32, ordinary=False):
        heads, T, K = len(EXTREMES), 5, 8
        x = draw(T, B=1, H=heads, K=K, V=4)
        if not ordinary:
            x["a_log"] = np.array([a for a, _ in EXTREMES], np.float32)
            logits = np.array([g for _, g in EXTREMES], np.float32)
            x["g"] = np.broadcast_to(logits[:, None], (1, T, heads, K))
            x["dt_bias"] = np.zeros((heads, K), np.float32)
        return evaluate(
            {name: jnp.asarray(value, dtype) for name, value in x.items()},
            lower_bound=-5.0 if gate == "bounded" else None,
            implementation=implementation,
            d_o=np.ones((1, T, heads, 4), np.float32),
        )

    return run


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("reference", jnp.float32), ("chunked", jnp.float32), ("chunked", jnp.bfloat16)],
)
def test_gradients_are_finite_at_every_extreme_and_zero_where_the_gate_saturates(
    implementation, dtype, gate, run_extremes
):
    outputs, gradients = run_extremes(implementation, gate, dtype)
    for leaf in jax.tree.leaves((gradients, outputs)):
        assert np.all(np.isfinite(np.asarray(leaf, np.float32)))
    for head, extreme in enumerate(EXTREMES):
        if extreme in SATURATED[gate]:
            assert np.all(np.asarray(gradients["g"], np.float32)[:, :, head] == 0)
            assert float(gradients["a_log"][head]) == 0


def test_no_lower_bound_means_another_gate_and_not_a_bound_of_five(run_extremes):
    bounded, softplus = (
        run_extremes("reference", gate, ordinary=True)[0]["o"] for gate in ("bounded", "softplus")
    )
    assert not np.allclose(bounded, softplus, rtol=1e-2)


def test_a_rate_beyond_float32_is_a_step_with_finite_gradients():
    for lower_bound in (-5.0, None):
        value, gradient = jax.value_and_grad(
            lambda a, bound=lower_bound: jnp.exp(
                log_decay(jnp.array([[-3.0, 3.0]]), a, None, bound)
            ).sum()
        )(jnp.array([1e4]))
        assert np.isfinite(value) and gradient[0] == 0


def test_normalising_a_zero_row_gives_zero_with_zero_gradient():
    x = jnp.zeros((2, 4)).at[1].set(3.0)
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(l2_normalize(x)))(x)
    np.testing.assert_array_equal(gradient[0], 0)
    # Σ x² + 1e-6 inside the root: not max(‖x‖, ε).
    assert float(value) == pytest.approx(4 * 3 / np.sqrt(36 + 1e-6), rel=1e-6)
