"""short_conv against its oracle: values, gradients, documents, padding, states and pieces.

float32 tolerance 1e-5 relative: sums of at most a few hundred products, each rounded at 2^-24.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import numerics
from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.short_conv import short_conv

C, W = 5, 4
# Padding before, between and after documents; one document; none; documents of one token; a
# document shorter than the window behind padding longer than it; a document at the end; a second
# document so close to the row's start that its window reaches before the first.
IDS = np.array(
    [
        [0, 0, 1, 1, 1, 1, 0, 2, 2, 3, 0, 0],
        [1] * 12,
        [0] * 12,
        [1, 2, 2, 0, 0, 3, 3, 3, 3, 3, 3, 3],
        [0] * 9 + [1, 1, 0],
        [0] * 6 + [4] * 6,
        [1, 2] + [0] * 10,
    ],
    np.int32,
)


def arrays(rng, B, T, dtype=jnp.float32):
    """x [B, T, C], w [C, W] and a state [B, W-1, C]."""
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    return draw(B, T, C), draw(C, W), draw(B, W - 1, C)


@functools.partial(jax.jit, static_argnames=("implementation", "activation"))
def run(x, w, ids=None, state=None, *, implementation=None, activation="silu"):
    """Output and final state."""
    return short_conv(
        x, w, segment_ids=ids, initial_state=state, return_final_state=True,
        activation=activation, implementation=implementation,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames="implementation")
def gradients(x, w, ids, state, cotangents, implementation):
    """Cotangents of x, w and the state."""
    f = lambda x, w, state: run(x, w, ids, state, implementation=implementation)  # noqa: E731
    return jax.vjp(f, x, w, state)[1](cotangents)


def test_the_published_taps_give_the_published_outputs():
    x = jnp.array([1.0, 2.0, -1.0, 0.5, 3.0])[None, :, None]
    taps = jnp.array([[0.1, 0.2, 0.3, 0.4]])
    before = run(x, taps, activation=None)[0][0, :, 0]
    np.testing.assert_allclose(before, [0.4, 1.1, 0.4, 0.4, 1.35], rtol=1e-6)
    after = run(x, taps)[0][0, :, 0]
    expected = [0.239475064, 0.825286116, 0.239475064, 0.239475064, 1.072074998]
    np.testing.assert_allclose(after, expected, rtol=1e-6)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_values_states_and_gradients_equal_the_token_recurrence(rng, with_ids, with_state):
    x, w, state = arrays(rng, *IDS.shape)
    ids, state = (IDS if with_ids else None), (state if with_state else None)
    actual, expected = (run(x, w, ids, state, implementation=i) for i in ("shifted", "reference"))
    for a, e in zip(actual, expected, strict=True):
        assert numerics.relative_error(a, e) < 1e-5
    cotangents = tuple(jnp.asarray(rng.standard_normal(e.shape), e.dtype) for e in expected)
    actual, expected = (
        gradients(x, w, ids, state, cotangents, i) for i in ("shifted", "reference")
    )
    errors = numerics.tree_relative_error(actual, expected)
    assert max(errors.values()) < 1e-5, errors


def test_the_tap_gradient_equals_a_float64_sum(rng):
    x, w, _ = arrays(rng, 3, 400)
    dy = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    f = lambda w: short_conv(x, w, activation=None)[0]  # noqa: E731
    actual = jax.jit(lambda w, dy: jax.vjp(f, w)[1](dy)[0])(w, dy)
    wide = np.pad(np.asarray(x, np.float64), ((0, 0), (W - 1, 0), (0, 0)))
    expected = [np.sum(wide[:, i : i + 400] * np.asarray(dy, np.float64), (0, 1)) for i in range(W)]
    assert numerics.relative_error(actual, np.stack(expected, -1)) < 1e-5


def test_nan_in_padding_reaches_no_output_state_or_gradient(rng):
    x, w, state = arrays(rng, *IDS.shape)
    poisoned = jnp.where((IDS == 0)[..., None], jnp.nan, x)
    clean, dirty = run(x, w, IDS, state), run(poisoned, w, IDS, state)
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])
    np.testing.assert_array_equal(dirty[0][IDS == 0], 0.0)
    ones = jnp.where((IDS == 0)[..., None], jnp.nan, jnp.ones_like(x)), jnp.ones_like(state)
    dx, dw, dstate = gradients(poisoned, w, IDS, state, ones, "shifted")
    np.testing.assert_array_equal(dx[IDS == 0], 0.0)
    assert all(bool(jnp.isfinite(g).all()) for g in (dx, dw, dstate))


def test_packed_documents_equal_separate_rows_and_do_not_see_each_other(rng):
    lengths, ids = (5, 9, 3), np.repeat([1, 2, 3], (5, 9, 3))[None].astype(np.int32)
    x, w, _ = arrays(rng, 1, 17)
    packed = run(x, w, ids)[0]
    start = 0
    for length in lengths:
        alone = run(x[:, start : start + length], w)[0]
        assert numerics.relative_error(packed[:, start : start + length], alone) < 1e-6
        start += length
    changed = run(x.at[0, 4].add(1.0), w, ids)[0]
    np.testing.assert_array_equal(changed[:, 5:], packed[:, 5:])
    assert bool((changed[:, 4] != packed[:, 4]).all())


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5, 6, 7, 8, 9), (4,), (3, 5, 6)])
def test_any_cut_with_the_state_carried_equals_the_whole_row(rng, cuts):
    x, w, state = arrays(rng, 2, 10)
    whole, final = run(x, w, None, state)
    pieces = []
    for a, b in zip((0, *cuts), (*cuts, 10), strict=True):
        y, state = run(x[:, a:b], w, None, state)
        pieces.append(y)
    assert numerics.relative_error(jnp.concatenate(pieces, 1), whole) < 1e-6
    np.testing.assert_array_equal(state, final)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_bucket_ends_in_the_state_of_exactly_its_tokens(rng, tokens, side):
    x, w, state = arrays(rng, 2, 16)
    live = slice(16 - tokens, 16) if side == "left" else slice(0, tokens)
    ids = np.zeros((2, 16), np.int32)
    ids[:, live] = 1
    y, final = run(x, w, ids, state)
    alone, expected = run(x[:, live], w, None, state)
    assert numerics.relative_error(y[:, live], alone) < 1e-6
    np.testing.assert_array_equal(final, expected)


def test_a_row_without_tokens_keeps_its_state_and_a_new_document_drops_it(rng):
    x, w, state = arrays(rng, *IDS.shape)
    final = run(x, w, IDS, state)[1]
    np.testing.assert_array_equal(final[2], state[2])
    # Row 0 ends with a document of one token: what lies before it is nothing, not the state.
    np.testing.assert_array_equal(final[0, :2], 0.0)
    np.testing.assert_array_equal(final[0, 2], x[0, 9])
    # Row 4 is still in its first document of two tokens: the state's last input remains.
    np.testing.assert_array_equal(final[4], jnp.stack([state[4, 2], x[4, 9], x[4, 10]]))


def test_bfloat16_is_the_float32_result_rounded_once(rng):
    x, w, state = arrays(rng, *IDS.shape, jnp.bfloat16)
    wide = (a.astype(jnp.float32) for a in (x, w))
    y, final = run(x, w, IDS, state.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    # One rounding of 2^-9, and one more where the two float32 sums straddle a midpoint.
    expected = run(*wide, IDS, state.astype(jnp.float32))[0]
    np.testing.assert_allclose(y.astype(jnp.float32), expected, rtol=2**-8, atol=1e-6)


def test_a_window_of_one_has_no_history(rng):
    x, w, _ = arrays(rng, 2, 6)
    y, state = run(x, w[:, :1], None, jnp.zeros((2, 0, C)))
    assert state.shape == (2, 0, C)
    np.testing.assert_allclose(y, jax.nn.silu(x * w[:, 0]), rtol=1e-5)


@pytest.mark.parametrize("with_ids", [False, True])
def test_inside_shard_map_the_gradients_equal_one_device(rng, mesh, with_ids):
    x, w, state = arrays(rng, 8, 12)
    ids = jnp.asarray(np.concatenate([IDS, IDS[:1]])) if with_ids else None
    dy = jnp.asarray(rng.standard_normal(x.shape), jnp.float32)
    rows = jax.P(("data", "expert"))

    def step(x, w, state, ids, dy):
        out, pull = jax.vjp(lambda *a: run(a[0], a[1], ids, a[2])[0], x, w, state)
        return out, *pull(dy)

    expected = step(x, w, state, ids, dy)
    eight = jax.make_mesh((1, 2, 4, 1), mesh.axis_names)
    with jax.set_mesh(eight):
        spread = jax.tree.map(lambda a: jax.device_put(a, rows), (x, state, ids, dy))
        mapped = jax.jit(
            jax.shard_map(
                step, in_specs=(rows, jax.P(), rows, rows, rows),
                out_specs=(rows, rows, jax.P(), rows), check_vma=True,
            )
        )  # fmt: skip
        actual = mapped(spread[0], jax.device_put(w, jax.P()), *spread[1:])
        text = str(jax.make_jaxpr(mapped)(spread[0], w, *spread[1:]))
    errors = numerics.tree_relative_error(jax.device_get(actual), expected)
    assert max(errors.values()) < 1e-5, errors
    # The one collective is the sum of the replicated taps' gradient.
    assert text.count("psum") == 1 and "all_gather" not in text


def test_rows_split_outside_shard_map_are_refused_with_the_way_out(rng, mesh):
    x, w, _ = arrays(rng, 8, 6)
    with jax.set_mesh(jax.make_mesh((1, 2, 4, 1), mesh.axis_names)):
        x = jax.device_put(x, jax.P(("data", "expert")))
        with pytest.raises(ValueError, match="call it inside jax.shard_map or reshard x"):
            short_conv(x, w)


def test_mistakes_are_refused_with_the_rule(rng):
    x, w, state = arrays(rng, 2, 6)
    with pytest.raises(ValueError, match="w \\[C, W\\]"):
        short_conv(x, w.T)
    with pytest.raises(ValueError, match="int32"):
        short_conv(x, w, segment_ids=jnp.ones((2, 6)))
    with pytest.raises(ValueError, match="oldest first"):
        short_conv(x, w, initial_state=state[:, 1:])
    with pytest.raises(ValueError, match="'gelu'"):
        short_conv(x, w, activation="gelu")
    with pytest.raises(UnsupportedError, match="shifted, reference"):
        short_conv(x, w, implementation="triton")
