"""grouped_matmul against a dense loop: group sizes, unused rows, gradients, dtypes, refusals.

float32 tolerance 1e-5 relative: sums of up to 300 products, each rounded at 2^-24.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import numerics
from pallas_kernels.dispatch import FallbackWarning, UnsupportedError
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.ragged import ragged_matmul

K, N = 32, 48
M, E = 500, 6
# Sizes off the block grid, empty groups at both ends, all rows in one group, rows in none.
SIZES = {
    "odd": (0, 1, 63, 64, 65, 300),
    "one_takes_all": (0, 0, 500, 0, 0, 0),
    "ends_empty": (0, 7, 0, 9, 3, 0),
    "none": (0, 0, 0, 0, 0, 0),
}


def arrays(rng, sizes, dtype=jnp.float32):
    """lhs [M, K], rhs [E, K, N], group sizes [E] and a cotangent [M, N]."""
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    return draw(M, K), draw(E, K, N), jnp.array(sizes, jnp.int32), draw(M, N)


def dense_loop(lhs, rhs, sizes, d_out):
    """Output, d_lhs and d_rhs in float64, one group at a time."""
    lhs, rhs, d_out = (np.asarray(a, np.float64) for a in (lhs, rhs, d_out))
    out, d_lhs, d_rhs = np.zeros_like(d_out), np.zeros_like(lhs), np.zeros_like(rhs)
    start = 0
    for e, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        out[rows] = lhs[rows] @ rhs[e]
        d_lhs[rows] = d_out[rows] @ rhs[e].T
        d_rhs[e] = lhs[rows].T @ d_out[rows]
        start += size
    return out, d_lhs, d_rhs


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(name, block_size, lhs, rhs, sizes, d_out):
    """Output, d_lhs and d_rhs of one implementation."""
    if name == "ragged_dot":  # refused on CPU; it has no sharding rule under an explicit mesh
        op = jax.shard_map(ragged_matmul, in_specs=jax.P(), out_specs=jax.P())
    else:
        op = functools.partial(grouped_matmul, implementation=name, block_size=block_size)
    out, pull = jax.vjp(lambda a, b: op(a, b, sizes), lhs, rhs)
    return out, *pull(d_out)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize(
    ("name", "block_size"),
    [("blocked", None), ("blocked", 5), ("blocked", 64), ("reference", None), ("ragged_dot", None)],
)
def test_values_and_gradients_equal_a_dense_loop(rng, sizes, name, block_size):
    lhs, rhs, group_sizes, d_out = arrays(rng, sizes)
    actual = run(name, block_size, lhs, rhs, group_sizes, d_out)
    for a, e in zip(actual, dense_loop(lhs, rhs, sizes, d_out), strict=True):
        assert numerics.relative_error(a, e) < 1e-5
    for e, size in enumerate(sizes):
        if size == 0:
            np.testing.assert_array_equal(actual[2][e], 0.0)


@pytest.mark.parametrize("name", ["blocked", "ragged_dot", "reference"])
def test_nan_in_unused_rows_and_their_cotangents_leaks_nowhere(rng, name):
    sizes = (0, 1, 30, 12, 0, 99)
    lhs, rhs, group_sizes, d_out = arrays(rng, sizes)
    used = sum(sizes)
    clean = run(name, None, lhs, rhs, group_sizes, d_out)
    poison = lambda a: a.at[used:].set(jnp.nan)  # noqa: E731
    dirty = run(name, None, poison(lhs), rhs, group_sizes, poison(d_out))
    for a, e in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(a, e)
    np.testing.assert_array_equal(dirty[0][used:], 0.0)
    np.testing.assert_array_equal(dirty[1][used:], 0.0)


def test_an_empty_group_with_nan_weights_touches_nothing(rng):
    lhs, rhs, group_sizes, d_out = arrays(rng, (5, 0, 20, 0, 1, 0))
    rhs = rhs.at[jnp.array([1, 3, 5])].set(jnp.nan)
    for actual in run("blocked", None, lhs, rhs, group_sizes, d_out):
        assert bool(jnp.isfinite(actual).all())


def test_bfloat16_accumulates_in_float32(rng):
    sizes = (40, 0, 25, 7, 300, 0)
    lhs, rhs, group_sizes, d_out = arrays(rng, sizes, jnp.bfloat16)
    actual = run("blocked", None, lhs, rhs, group_sizes, d_out)
    for a, e in zip(actual, dense_loop(lhs, rhs, sizes, d_out), strict=True):
        assert a.dtype == jnp.bfloat16
        # Exact operands and float32 sums leave one rounding of 2^-9 at the end.
        assert numerics.relative_error(a.astype(jnp.float32), e) < 2**-9


def test_sizes_past_the_rows_are_cut_and_no_rows_is_allowed(rng):
    lhs, rhs, _, d_out = arrays(rng, SIZES["odd"])
    over, fitting = ((100, 0, 0, 0, 300, n) for n in (900, 100))
    for a, b in zip(
        run("blocked", None, lhs, rhs, jnp.array(over, jnp.int32), d_out),
        run("blocked", None, lhs, rhs, jnp.array(fitting, jnp.int32), d_out),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert grouped_matmul(lhs[:0], rhs, jnp.zeros(E, jnp.int32)).shape == (0, N)


def test_two_runs_are_bit_identical(rng):
    operands = arrays(rng, SIZES["odd"])
    for a, b in zip(*(run("blocked", None, *operands) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_ragged_dot_is_refused_on_cpu_with_the_reason_and_falls_back_aloud(rng):
    operands = arrays(rng, SIZES["odd"])[:3]
    with pytest.raises(UnsupportedError, match="masked dense product of E times the work on CPU"):
        grouped_matmul(*operands, implementation="ragged_dot")
    with pytest.warns(FallbackWarning, match="grouped_matmul falls back to 'blocked'"):
        grouped_matmul(*operands, implementation=("ragged_dot", "blocked"))


@pytest.mark.parametrize("name", ["ragged_dot", "reference"])
def test_a_block_size_is_refused_where_there_are_no_blocks(rng, name):
    operands = arrays(rng, SIZES["odd"])[:3]
    with pytest.raises(UnsupportedError, match=f"{name}' has no blocks.*, got block_size 8"):
        grouped_matmul(*operands, implementation=name, block_size=8)


def test_an_unnamed_choice_with_a_block_size_takes_blocks_on_gpu_and_says_so(rng, monkeypatch):
    operands = arrays(rng, SIZES["odd"])[:3]
    expected = grouped_matmul(*operands, implementation="blocked", block_size=8)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.warns(FallbackWarning, match="'blocked': 'ragged_dot' has no blocks"):
        actual = grouped_matmul(*operands, block_size=8)
    np.testing.assert_array_equal(actual, expected)


def test_mistakes_are_refused_with_the_rule(rng):
    lhs, rhs, sizes, _ = arrays(rng, SIZES["odd"])
    with pytest.raises(ValueError, match="last axis of lhs"):
        grouped_matmul(lhs[:, 1:], rhs, sizes)
    with pytest.raises(ValueError, match="one entry for each of the 6 groups"):
        grouped_matmul(lhs, rhs, sizes[:1])
    with pytest.raises(ValueError, match="must be int32"):
        grouped_matmul(lhs, rhs, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match="cast one"):
        grouped_matmul(lhs.astype(jnp.bfloat16), rhs, sizes)
    with pytest.raises(ValueError, match="block_size 0"):
        grouped_matmul(lhs, rhs, sizes, block_size=0)


def test_numpy_operands_and_cotangents_work_like_jax_arrays(rng):
    lhs, rhs, sizes, d_out = arrays(rng, SIZES["ends_empty"])
    lhs, d_out = lhs[:20], d_out[:20]
    expected, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes), lhs, rhs)
    out, pull_arrays = jax.vjp(grouped_matmul, *map(np.asarray, (lhs, rhs, sizes)))
    np.testing.assert_array_equal(out, expected)
    gradients = pull_arrays(np.asarray(d_out))
    for ours, wanted in zip(gradients[:2], pull(d_out), strict=True):
        np.testing.assert_array_equal(ours, wanted)
