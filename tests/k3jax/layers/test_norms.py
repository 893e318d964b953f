"""The gated norm of the KDA output: its gradient against differences of a float64 one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.norms import gated_rms_norm

EPS = 1e-5
# float32 gradients against float64 differences of a step of 1e-6.
DIFFERENCES = 1e-5


def by_hand(x, weight, gate):
    normed = weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS)
    return normed / (1.0 + np.exp(-gate))


def differences(arrays, name, cotangent):
    """Central differences of Σ cotangent · out in every entry of one argument, float64."""
    result = np.zeros_like(arrays[name])
    for index in np.ndindex(result.shape):
        ends = []
        for sign in (1.0, -1.0):
            moved = {**arrays, name: arrays[name].copy()}
            moved[name][index] += sign * 1e-6
            ends.append(np.sum(cotangent * by_hand(**moved)))
        result[index] = (ends[0] - ends[1]) / 2e-6
    return result


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (2, 3, 2, 5), (1, 4, 3, 16)])
def test_gradients_of_norm_times_gate_equal_finite_differences(shape, rng):
    arrays = {
        "x": 3.0 * rng.normal(size=shape), "weight": 1.0 + 0.3 * rng.normal(size=shape[-1]),
        "gate": 2.0 * rng.normal(size=shape),
    }  # fmt: skip
    cotangent = rng.normal(size=shape)
    single = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}

    def loss(arrays):
        return jnp.sum(jnp.asarray(cotangent, jnp.float32) * gated_rms_norm(**arrays, eps=EPS))

    plain = jax.jit(jax.value_and_grad(loss))(single)
    recomputed = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))(single)
    for ours, again in zip(jax.tree.leaves(plain), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_array_equal(ours, again)
    for name, gradient in plain[1].items():
        exact = differences(arrays, name, cotangent)
        error = np.linalg.norm(gradient - exact) / np.linalg.norm(exact)
        assert error < DIFFERENCES, name
