"""expert_ffn against a dense loop over experts: values, every gradient, masks, saved arrays.

float32 tolerance 1e-5 relative: three chained sums of at most 64 products.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import numerics
from pallas_kernels.grouped_matmul import expert_ffn
from pallas_kernels.grouped_matmul.expert_vjp import RAGGED, routed_ffn
from pallas_kernels.situ_glu import situ_glu

S, k, E, L, F = 61, 3, 8, 24, 20


def arrays(rng, dtype=jnp.float32):
    """x, indices (distinct per token), p, w_gate_up, w_down and a cotangent."""
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) * 0.5, dtype)  # noqa: E731
    indices = jnp.asarray(np.stack([rng.permutation(E)[:k] for _ in range(S)]), jnp.int32)
    p = jnp.asarray(rng.uniform(0.1, 1.0, (S, k)), jnp.float32)
    return draw(S, L), indices, p, draw(E, L, 2, F), draw(E, F, L), draw(S, L).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames=("implementation", "block_size"))
def run(x, indices, p, w1, w2, du, mask=None, *, implementation=None, block_size=None):
    """u and the gradients of x, p, w_gate_up, w_down."""

    def f(x, p, w1, w2):
        if implementation == "ragged_dot":  # refused on CPU by name; slow but right there
            ragged = functools.partial(routed_ffn, RAGGED, situ_glu, None)
            every = jax.shard_map(ragged, in_specs=jax.P(), out_specs=jax.P())
            return every(x, indices, p, w1, w2)
        return expert_ffn(
            x, indices, p, w1, w2, activation=situ_glu, token_mask=mask,
            implementation=implementation, block_size=block_size,
        )  # fmt: skip

    u, pull = jax.vjp(f, x, p, w1, w2)
    return u, *pull(du)


def dense_loop(x, indices, p, w1, w2):
    """Σ_i p_i e_i(x) in float64, one route at a time."""
    x, p, w1, w2 = (np.asarray(a, np.float64) for a in (x, p, w1, w2))
    out = np.zeros_like(x)
    for s, i in np.ndindex(*p.shape):
        e = int(indices[s, i])
        if 0 <= e < w1.shape[0]:
            g, u = x[s] @ w1[e, :, 0], x[s] @ w1[e, :, 1]
            a = 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
            out[s] += p[s, i] * (a @ w2[e])
    return out


def close(actual, expected, tolerance=1e-5):
    """Asserts every pair of arrays within the tolerance."""
    for a, e in zip(actual, expected, strict=True):
        assert numerics.relative_error(a, e) < tolerance


@pytest.mark.parametrize(
    ("implementation", "block_size"),
    [("blocked", None), ("blocked", 7), ("ragged_dot", None)],
)
def test_values_and_all_gradients_equal_the_dense_loop(rng, implementation, block_size):
    operands = arrays(rng)
    options = dict(implementation=implementation, block_size=block_size)
    actual, oracle = run(*operands, **options), run(*operands, implementation="reference")
    assert numerics.relative_error(actual[0], dense_loop(*operands[:5])) < 1e-5
    close(actual, oracle)


@pytest.mark.parametrize("routing", ["one_expert", "some_empty", "twice_the_same"])
def test_any_routing_is_computed_in_full(rng, routing):
    x, indices, p, w1, w2, du = arrays(rng)
    if routing == "one_expert":
        indices = jnp.where(jnp.arange(k) == 0, 3, -1) + jnp.zeros_like(indices)
    elif routing == "some_empty":
        indices = 2 * (indices % 2) + 1
    else:
        indices = jnp.broadcast_to(indices[:, :1], indices.shape)
    actual = run(x, indices, p, w1, w2, du)
    close(actual, run(x, indices, p, w1, w2, du, implementation="reference"))
    for e in set(range(E)) - set(np.asarray(indices).ravel().tolist()):
        np.testing.assert_array_equal(actual[3][e], 0.0)
        np.testing.assert_array_equal(actual[4][e], 0.0)


def test_a_weight_of_zero_still_gets_its_exact_gradient(rng):
    x, indices, p, w1, w2, du = arrays(rng)
    p = p.at[5].set(0.0)
    actual = run(x, indices, p, w1, w2, du)
    np.testing.assert_array_equal(actual[0][5], 0.0)
    np.testing.assert_array_equal(actual[1][5], 0.0)
    outputs = np.stack(
        [dense_loop(x[5:6], indices[5:6, i : i + 1], jnp.ones((1, 1)), w1, w2)[0] for i in range(k)]
    )
    close([actual[2][5]], [outputs @ np.asarray(du[5], np.float64)])


def test_masked_tokens_take_no_rows_and_their_nan_reaches_nothing(rng):
    x, indices, p, w1, w2, du = arrays(rng)
    mask = jnp.asarray(rng.random(S) < 0.6)
    poison = lambda a: jnp.where(mask[:, None], a, jnp.nan)  # noqa: E731
    actual = run(poison(x), indices, poison(p), w1, w2, poison(du), mask)
    without = jnp.where(mask[:, None], indices, -1)
    close(actual, run(x, without, p, w1, w2, du, implementation="reference"))
    for per_token in actual[:3]:
        np.testing.assert_array_equal(per_token[np.flatnonzero(~mask)], 0.0)
    nothing = run(x, indices, p, w1, w2, du, jnp.zeros(S, bool))
    assert all(not bool(jnp.any(a)) for a in nothing)


def test_routes_to_experts_held_elsewhere_are_left_out(rng):
    x, indices, p, w1, w2, du = arrays(rng)
    halves = [(slice(0, 4), 0), (slice(4, E), 4)]
    parts = [run(x, indices - first, p, w1[held], w2[held], du) for held, first in halves]
    whole = run(x, indices, p, w1, w2, du)
    close([a + b for a, b in zip(parts[0][:3], parts[1][:3], strict=True)], whole[:3])
    close([jnp.concatenate(ab) for ab in zip(parts[0][3:], parts[1][3:], strict=True)], whole[3:])


def test_renumbering_the_experts_changes_no_bit_of_a_token(rng):
    x, indices, p, w1, w2, du = arrays(rng)
    order = rng.permutation(E)
    place = jnp.asarray(np.argsort(order), jnp.int32)
    first = run(x, indices, p, w1, w2, du, block_size=8)
    second = run(x, place[indices], p, w1[order], w2[order], du, block_size=8)
    again = run(x, indices, p, w1, w2, du, block_size=8)
    for a, b, c in zip(first[:3], second[:3], again[:3], strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_bfloat16_stays_near_the_float32_oracle(rng):
    operands = arrays(rng, jnp.bfloat16)
    wide = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in operands]
    actual = run(*operands)
    assert actual[0].dtype == jnp.float32 and actual[3].dtype == jnp.bfloat16
    tolerances = (numerics.FORWARD_TOLERANCE, *4 * (numerics.GRADIENT_TOLERANCE,))
    for a, e, tolerance in zip(
        actual, run(*wide, implementation="reference"), tolerances, strict=True
    ):
        assert numerics.relative_error(a.astype(jnp.float32), e) < tolerance["bfloat16"]


def test_the_experts_outputs_are_not_kept_for_the_backward(rng):
    x, indices, p, w1, w2, _ = arrays(rng)
    f = lambda x, p, w1, w2: expert_ffn(  # noqa: E731
        x, indices, p, w1, w2, activation=situ_glu, block_size=8
    )
    kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], x, p, w1, w2))
    rows = (S * k + E * 7) // 8 * 8
    # Of all arrays with a line per row, the pre-activations and the rows' routes.
    by_row = [leaf.shape for leaf in kept if leaf.shape[:1] == (rows,)]
    assert sorted(by_row) == [(rows,), (rows, 2 * F)]


def test_no_tokens_and_no_choices_give_zeros(rng):
    x, indices, p, w1, w2, _ = arrays(rng)
    call = functools.partial(expert_ffn, w_gate_up=w1, w_down=w2, activation=situ_glu)
    assert call(x[:0], indices[:0], p[:0]).shape == (0, L)
    np.testing.assert_array_equal(call(x, indices[:, :0], p[:, :0]), 0.0)


def test_mistakes_are_refused_with_the_rule(rng):
    x, indices, p, w1, w2, _ = arrays(rng)
    call = functools.partial(expert_ffn, activation=situ_glu)
    with pytest.raises(ValueError, match="gate before up"):
        call(x, indices, p, w1.reshape(E, L, 2 * F), w2)
    with pytest.raises(ValueError, match="flatten leading axes"):
        call(x[None], indices, p, w1, w2)
    with pytest.raises(ValueError, match="one row for each row of x"):
        call(x, indices[1:], p, w1, w2)
    with pytest.raises(ValueError, match="int32 and float32"):
        call(x, indices, p.astype(jnp.bfloat16), w1, w2)
    with pytest.raises(ValueError, match="cast to one dtype"):
        call(x, indices, p, w1.astype(jnp.bfloat16), w2)
    with pytest.raises(ValueError, match="must be bool"):
        call(x, indices, p, w1, w2, token_mask=jnp.ones(S))
    with pytest.raises(ValueError, match="masked dense product"):
        call(x, indices, p, w1, w2, implementation="ragged_dot")
