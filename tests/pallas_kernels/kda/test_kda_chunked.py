"""The chunked form equals the recurrence: every length, chunk size and kind of gate and key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda
from pallas_kernels.kda.triangular import unit_lower_inverse
from pallas_kernels.numerics import cosine, relative_error

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 65, 200)
SIZES = (16, 32, 64)
# A few roundings of 2^-24 per token in both forms: 2.4e-5 for one in each of 200 tokens.
TOLERANCE = 1e-4
# One compilation each; every pair is covered in one padded shape, and the rest by the slow run.
DEFAULT_PAIRS = {(1, 16), (17, 16), (65, 32), (64, 64)}


def crop(x, T):
    """The first T tokens."""
    return {n: a[:, :T] if n in ("q", "k", "v", "g", "beta") else a for n, a in x.items()}


def tail(T, total=200):
    """Segment ids of a row of T tokens padded to `total`."""
    return np.broadcast_to((np.arange(total) < T).astype(np.int32), (2, total))


def assert_close(actual, expected, tolerance=TOLERANCE):
    for name, value in expected.items():
        assert relative_error(actual[name], value) < tolerance, name


@pytest.fixture(scope="module")
def long_row(draw):
    return draw(200, states=(1,))


@pytest.fixture(scope="module")
def padded_run(long_row, evaluate, cotangent):
    """Runs the first T tokens in the one compiled shape, with the state before and after."""

    @functools.cache
    def run(T, **options):
        ids = tail(T)
        d_o = cotangent((2, 200, 2, 12)) * ids[..., None, None]
        return evaluate(
            long_row, segment_ids=ids, num_segments=1, return_final_state=True, d_o=d_o, **options
        )

    return run


@pytest.mark.parametrize("size", SIZES)
def test_any_length_equals_the_recurrence_with_its_gradients(size, padded_run):
    for T in LENGTHS:
        expected = padded_run(T, implementation="reference")
        got = padded_run(T, chunk_size=size)
        for actual, wanted in zip(got, expected, strict=True):
            assert_close(actual, wanted)


@pytest.mark.parametrize(
    ("T", "size"),
    [
        pytest.param(T, size, marks=() if (T, size) in DEFAULT_PAIRS else pytest.mark.slow)
        for T in LENGTHS
        for size in SIZES
    ],
)
def test_a_row_of_exactly_this_length_equals_the_padded_recurrence(
    T, size, long_row, padded_run, evaluate
):
    expected, wanted = padded_run(T, implementation="reference")
    x = crop(long_row, T) | {"initial_state": long_row["initial_state"][:, 0]}
    got, gradients = evaluate(x, return_final_state=True, chunk_size=size)
    assert relative_error(got["o"], expected["o"][:, :T]) < TOLERANCE
    assert relative_error(got["state"], expected["state"][:, 0]) < TOLERANCE
    wanted = crop(wanted, T) | {"initial_state": wanted["initial_state"][:, 0]}
    assert_close(gradients, wanted)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("kind", ["all", "one", "alternating", "infinite"])
def test_any_log_decay_is_finite_and_exact(kind, size, long_row, evaluate):
    g = np.full((2, 200, 2, 8), -1e-3, np.float32)
    if kind == "all":
        g[:] = -1e4
    elif kind == "one":
        g[:, 37] = -1e4  # a running sum would lose every small term behind it
    elif kind == "alternating":
        g[:, ::3, :, ::2] = -1e4
    else:
        g[:, 50:52] = -np.inf
    x = {n: long_row[n] for n in ("q", "k", "v", "beta", "initial_state")} | {"g": g}
    for ids in (tail(200), tail(200) * (1 + np.arange(200) // 90).astype(np.int32)):
        x["initial_state"] = np.repeat(long_row["initial_state"], 3, axis=1)
        options = {"segment_ids": ids, "num_segments": 3, "return_final_state": True}
        expected, wanted = evaluate(x, implementation="reference", **options)
        got, gradients = evaluate(x, chunk_size=size, **options)
        assert all(np.all(np.isfinite(a)) for a in (*got.values(), *gradients.values()))
        assert_close(got, expected)
        assert_close(gradients, wanted)


@pytest.mark.parametrize(("B", "T", "K", "V"), [(8, 8, 16, 20), (8, 9, 16, 20), (8, 8, 16, 32)])
def test_no_product_reads_memory_that_was_never_written(B, T, K, V, rng):
    # Widths at which the CPU backend did (tests/conftest.py fills new memory).
    q, k, g = (rng.normal(size=(B, T, 2, K)).astype(np.float32) for _ in range(3))
    v = rng.normal(size=(B, T, 2, V)).astype(np.float32)
    beta = rng.uniform(0.1, 0.9, (B, T, 2)).astype(np.float32)
    gate = {"a_log": np.zeros(2, np.float32), "lower_bound": -5.0, "qk_l2norm": True}
    run = lambda name: jax.jit(lambda *x: kda(*x, **gate, implementation=name)[0])  # noqa: E731
    x = (q, k, v, g, beta)
    assert relative_error(run("chunked")(*x), run("reference")(*x)) < TOLERANCE


def correlated(T, mean_cosine, dtype, K=128, V=128):
    """Keys around one common direction; β = 0.95, log-decay -1e-3 everywhere."""
    normal = np.random.default_rng(1).standard_normal

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    noise = normal((1, T, 1, K)) / np.sqrt(K) * np.sqrt(1 / mean_cosine - 1)
    k = unit(unit(normal((1, 1, 1, K))) + noise)
    cosines = k[0, :, 0] @ k[0, :, 0].T
    assert (cosines.sum() - T) / (T * (T - 1)) == pytest.approx(mean_cosine, abs=5e-3)
    x = {"q": unit(normal((1, T, 1, K))), "k": k, "v": normal((1, T, 1, V))}
    x |= {"g": np.full((1, T, 1, K), -1e-3), "beta": np.full((1, T, 1), 0.95)}
    return {name: jnp.asarray(value, dtype) for name, value in x.items()}


@pytest.mark.parametrize("size", SIZES)
def test_correlated_keys_with_slow_decay_keep_full_accuracy(size, oracle, evaluate):
    for mean_cosine in (0.9, 0.99):
        x = correlated(256, mean_cosine, jnp.float32)
        options = {"return_final_state": True, "qk_l2norm": False}
        got, gradients = evaluate(x, chunk_size=size, **options)
        o, final = oracle(*(x[name] for name in ("q", "k", "v", "g", "beta")))
        assert cosine(got["o"], o) > 0.9999 and cosine(got["state"][0], final[0, 1]) > 0.9999
        assert relative_error(got["o"], o) < TOLERANCE
        assert relative_error(got["state"][0], final[0, 1]) < TOLERANCE
        assert_close(gradients, evaluate(x, implementation="reference", **options)[1])


@pytest.mark.parametrize("size", SIZES)
def test_correlated_keys_in_bfloat16_stay_close_to_the_oracle(size, oracle):
    run = jax.jit(lambda x: kda(**x, return_final_state=True, chunk_size=size))
    for mean_cosine in (0.9, 0.99):
        x = correlated(256, mean_cosine, jnp.bfloat16)
        got, state = run(x)
        o, final = oracle(*(x[name] for name in ("q", "k", "v", "g", "beta")))
        assert got.dtype == jnp.bfloat16 and state.dtype == jnp.float32
        assert cosine(got, o) > 0.999 and cosine(state[0], final[0, 1]) > 0.999


def test_chunk_sizes_agree_with_each_other_in_value_and_gradient(padded_run):
    runs = [padded_run(192, chunk_size=size) for size in SIZES]
    for outputs, gradients in runs[1:]:
        assert_close(outputs, runs[0][0])
        assert_close(gradients, runs[0][1], 1e-3)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_outputs_do_not_see_the_future_bit_for_bit(lower_bound, draw):
    x = draw(50)
    run = jax.jit(lambda x: kda(**x, lower_bound=lower_bound, qk_l2norm=True, chunk_size=32)[0])
    before = run(x)
    for t in (0, 21, 31, 32, 49):
        changed = {n: a.copy() for n, a in x.items()}
        for name in ("q", "k", "v", "g", "beta"):
            changed[name][:, t] *= -0.5
        after = run(changed)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.any(after[:, t] != before[:, t])


@pytest.mark.parametrize("size", [2, 16, 64])
def test_triangular_inverse_is_the_inverse_with_its_derivative(size):
    with jax.enable_x64(True):
        # Entries near 0.9 everywhere: the powers of this matrix reach 1e16 at size 64.
        strict = np.tril(0.9 + 0.05 * np.random.default_rng(0).standard_normal((3, size, size)), -1)
        identity = np.eye(size)
        direction = np.tril(np.random.default_rng(1).standard_normal(strict.shape), -1)
        pushed = jax.jit(lambda x, dx: jax.jvp(unit_lower_inverse, (x,), (dx,)))
        inverse, tangent = pushed(strict, direction)
        np.testing.assert_allclose(inverse @ (identity + strict), 0 * strict + identity, atol=1e-12)
        np.testing.assert_allclose(tangent, -inverse @ direction @ inverse, atol=1e-12)
