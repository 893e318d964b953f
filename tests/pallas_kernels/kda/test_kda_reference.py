"""The recurrence against numpy, the published vectors and what the equation says by itself."""

import jax
import numpy as np
import pytest

from pallas_kernels.kda import kda
from pallas_kernels.numerics import det, relative_error

GOLDEN_O = np.array(
    [
        [-0.000708161, 0.001353064, 0.002390318],
        [-0.149573888, 0.052620214, 0.214992388],
        [-0.054131426, -0.05920059, -0.019467928],
        [-0.184815853, -0.117097407, 0.039238023],
        [0.068847778, 0.070940614, 0.019347008],
        [0.063356755, 0.10542532, 0.067710104],
    ]
)
GOLDEN_STATE = np.array(
    [
        [0.100907933, 0.171801847, 0.112679548],
        [0.053143374, 0.086494026, 0.054387724],
        [-0.062552056, -0.115156223, -0.080612456],
        [-0.093547104, -0.155498881, -0.099772206],
    ]
)


def golden_inputs():
    """One head, T = 6, K = 4, V = 3, float64."""
    return {
        "q": det((6, 4), 0.7, 0.1)[None, :, None],
        "k": det((6, 4), 1.3, 0.5)[None, :, None],
        "v": det((6, 3), 0.9, -0.3)[None, :, None],
        "g": 2 * det((6, 4), 0.37, 1.0)[None, :, None],
        "beta": 1 / (1 + np.exp(-det((6,), 2.1, 0.2)))[None, :, None],
        "a_log": np.array([0.2]),
    }


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_published_vectors_come_out_to_their_last_digit_in_float64(implementation):
    with jax.enable_x64(True):
        options = {"lower_bound": -5.0, "qk_l2norm": True, "return_final_state": True}
        run = jax.jit(lambda x: kda(**x, **options, implementation=implementation))
        o, state = run(golden_inputs())
        # The vectors are printed with nine decimals.
        np.testing.assert_allclose(o[0, :, 0], GOLDEN_O, atol=6e-10, rtol=0)
        np.testing.assert_allclose(state[0, 0], GOLDEN_STATE, atol=6e-10, rtol=0)


def test_recurrence_equals_the_matrix_form_of_eq_1_in_float64(draw, oracle):
    x = {name: value.astype(np.float64) for name, value in draw(6, B=1, H=1, K=4, V=3).items()}
    g, beta, k, v = -np.exp(x["g"]), x["beta"], x["k"], x["v"]
    expected = np.zeros((4, 3))
    for t in range(6):
        k_t, b_t = k[0, t, 0], beta[0, t, 0]
        transition = (np.eye(4) - b_t * np.outer(k_t, k_t)) @ np.diag(np.exp(g[0, t, 0]))
        expected = transition @ expected + b_t * np.outer(k_t, v[0, t, 0])
    with jax.enable_x64(True):
        _, state = kda(x["q"], k, v, g, beta, return_final_state=True, implementation="reference")
    np.testing.assert_allclose(state[0, 0], expected, atol=1e-15, rtol=1e-14)
    _, by_token = oracle(x["q"], k, v, g, beta)
    np.testing.assert_allclose(by_token[0, 1][0], expected, atol=1e-15, rtol=1e-14)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_packed_rows_with_states_equal_the_oracle(implementation, draw, oracle, evaluate):
    x = draw(23, states=(4,))
    ids = np.zeros((2, 23), np.int32)
    ids[0, 2:7], ids[0, 8:11], ids[0, 11:20] = 6, 6, 8  # padding in front, inside, behind; 7 absent
    ids[1, :1], ids[1, 1:23] = 3, 5
    base = np.array([5, 1], np.int32)
    got, gradients = evaluate(
        x,
        segment_ids=ids,
        segment_base=base,
        num_segments=4,
        return_final_state=True,
        implementation=implementation,
    )
    unit = {n: x[n] / np.sqrt(np.sum(x[n] ** 2, -1, keepdims=True) + 1e-6) for n in "qk"}
    rate = np.exp(x["a_log"])[:, None]
    g = -5 / (1 + np.exp(-rate * (x["g"] + x["dt_bias"])))
    named = [(b, n, (b, base[b] + n + 1)) for b in range(2) for n in range(4)]
    states = {key: x["initial_state"][b, n] for b, n, key in named}
    o, final = oracle(unit["q"], unit["k"], x["v"], g, x["beta"], ids, states)
    assert relative_error(got["o"], o) < 1e-5
    for b, n, key in named:
        assert relative_error(got["state"][b, n], final[key]) < 1e-5
    # Absent ids pass through untouched, and so does their gradient.
    for b, n in ((0, 1), (0, 3), (1, 0), (1, 2)):
        np.testing.assert_array_equal(got["state"][b, n], x["initial_state"][b, n])
    for name in ("q", "k", "v", "g", "beta"):
        assert np.all(gradients[name][ids == 0] == 0)


def test_channels_of_a_head_decay_at_their_own_rates(evaluate):
    zero = np.zeros((1, 8, 1, 2), np.float32)
    x = {"q": zero, "k": zero, "v": zero, "beta": zero[..., 0], "g": zero - np.float32([0, 5])}
    x["initial_state"] = np.ones((1, 1, 2, 2), np.float32)
    got, _ = evaluate(x, return_final_state=True, implementation="reference")
    np.testing.assert_allclose(got["state"][0, 0], [[1, 1], [np.exp(-40)] * 2], rtol=1e-5)


def test_a_single_token_from_a_zero_state_has_its_closed_form(draw):
    x = draw(1)
    g = -np.abs(x["g"])
    expected = x["beta"][..., None] * np.sum(x["q"] * x["k"], -1, keepdims=True) * x["v"]
    o, state = jax.jit(lambda x: kda(x["q"], x["k"], x["v"], g, x["beta"], scale=0.25))(x)
    assert state is None
    np.testing.assert_allclose(o, 0.25 * expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_no_tokens_leave_the_state_as_it_was(implementation, draw, evaluate):
    x = draw(0, states=())
    got, _ = evaluate(x, return_final_state=True, implementation=implementation)
    assert got["o"].shape == (2, 0, 2, 12)
    np.testing.assert_array_equal(got["state"], x["initial_state"])
