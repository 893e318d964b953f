"""Softmax attention: values, gradients and boundaries against a dense float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from pallas_kernels import dispatch
from pallas_kernels.attention import attention, tiles
from pallas_kernels.numerics import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error

B, H, K, V = 2, 3, 12, 8


def oracle(q, k, v, do, query_ids=None, key_ids=None, causal=True, scale=None):
    """o, dq, dk, dv and the largest logit of each head, dense, float64."""
    q, k, v, do = (np.asarray(a, np.float64) for a in (q, k, v, do))
    T, S = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = np.ones((q.shape[0], 1, T, S), bool)
    if causal:
        mask &= np.arange(S) <= np.arange(T)[:, None] + S - T
    if query_ids is not None:
        query_ids, key_ids = np.asarray(query_ids), np.asarray(key_ids)
        mask &= ((query_ids[:, :, None] == key_ids[:, None]) & (query_ids[:, :, None] > 0))[:, None]
    logits = np.where(mask, np.einsum("bthk,bshk->bhts", q, k) * scale, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    e = np.where(mask, np.exp(logits - np.where(np.isfinite(top), top, 0.0)), 0.0)
    total = e.sum(axis=-1, keepdims=True)
    p = e / np.where(total > 0, total, 1.0)
    o = np.einsum("bhts,bshv->bthv", p, v)
    dp = np.einsum("bthv,bshv->bhts", do, v)
    ds = scale * p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    return (
        o,
        np.einsum("bhts,bshk->bthk", ds, k),
        np.einsum("bhts,bthk->bshk", ds, q),
        np.einsum("bhts,bthv->bshv", p, do),
        logits.max(axis=(0, 2, 3)),
    )


def draw(rng, T, S=None, dtype=jnp.float32):
    """q, k, v and a cotangent."""
    S = T if S is None else S
    shapes = ((B, T, H, K), (B, S, H, K), (B, S, H, V), (B, T, H, V))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def draw_ids(rng, T):
    """Packed documents with padding in front and behind; the second row is one document."""
    ids = np.sort(rng.integers(1, 4, (B, T)), axis=1)
    ids[0, : T // 9], ids[0, T - T // 7 :] = 0, 0
    ids[1] = 5
    return jnp.asarray(ids, jnp.int32)


_STATIC = ("causal", "scale", "out_dtype", "implementation", "block_size")


@functools.partial(jax.jit, static_argnames=_STATIC)
def run(q, k, v, do, **options):
    """Output, gradients of q, k, v, and the largest logits."""

    def attend(q, k, v):
        return attention(q, k, v, return_max_logits=True, **options)

    (o, top), pull = jax.vjp(attend, q, k, v)
    return o, *pull((do.astype(o.dtype), jnp.ones_like(top))), top


def check(actual, expected, dtype="float32"):
    """Output, three gradients, logits: float32 sums of at most a few hundred terms."""
    assert relative_error(actual[0], expected[0]) < FORWARD_TOLERANCE[dtype]
    for a, e in zip(actual[1:4], expected[1:4], strict=True):
        assert relative_error(a, e) < GRADIENT_TOLERANCE[dtype]
    finite = np.isfinite(expected[4])
    assert (np.isfinite(actual[4]) == finite).all()
    assert relative_error(actual[4][finite], expected[4][finite]) < FORWARD_TOLERANCE[dtype]


@pytest.mark.parametrize("T", [1, 2, 17, 64, 65, 130])
def test_packed_rows_equal_the_oracle_for_any_length(T, rng):
    operands, ids = draw(rng, T), draw_ids(rng, T)
    check(run(*operands, segment_ids=ids, block_size=64), oracle(*operands, ids, ids))


@pytest.mark.parametrize(
    ("T", "S", "causal"), [(5, 70, True), (70, 37, True), (33, 50, False), (50, 33, False)]
)
def test_queries_and_keys_may_differ_in_number(T, S, causal, rng):
    operands = draw(rng, T, S)
    actual = run(*operands, causal=causal, block_size=16, scale=0.4)
    check(actual, oracle(*operands, causal=causal, scale=0.4))
    if causal and T > S:  # the first T - S queries come before every key
        assert not np.any(actual[0][:, : T - S])
        assert not np.any(actual[1][:, : T - S])


def test_a_suffix_of_queries_sees_documents_of_the_whole_row(rng):
    T, S = 20, 50
    operands, ids = draw(rng, T, S), draw_ids(rng, S)
    options = {"segment_ids": ids[:, S - T :], "kv_segment_ids": ids}
    check(run(*operands, block_size=8, **options), oracle(*operands, ids[:, S - T :], ids))


def test_the_reference_equals_the_oracle(rng):
    operands, ids = draw(rng, 33), draw_ids(rng, 33)
    actual = run(*operands, segment_ids=ids, implementation="reference")
    check(actual, oracle(*operands, ids, ids))


def test_packed_documents_equal_documents_run_alone(rng):
    lengths = (21, 1, 21, 7)
    operands = draw(rng, sum(lengths))
    ids = np.repeat(np.arange(1, 5, dtype=np.int32), lengths)
    ids = jnp.asarray(np.tile(ids, (B, 1)))
    packed = run(*operands, segment_ids=ids, block_size=16)
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        alone = run(*(a[:, here] for a in operands), block_size=16)
        for a, e in zip(packed[:4], alone[:4], strict=True):
            # Only the order of float32 additions differs; dq and dk of a lone token are 0.
            np.testing.assert_allclose(a[:, here], e, rtol=1e-5, atol=1e-5)
        start += length


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_padding_is_zero_and_leaks_nothing_whatever_it_holds(implementation, rng):
    T = 40
    operands, ids = draw(rng, T), draw_ids(rng, T)
    ids = ids.at[1].set(0)  # one row of the batch is nothing but padding
    padding = np.asarray(ids == 0)
    run_it = lambda *a: run(*a, segment_ids=ids, implementation=implementation)  # noqa: E731
    clean = run_it(*(jnp.where(padding[:, :, None, None], 0.0, a) for a in operands))
    dirty = run_it(*(jnp.where(padding[:, :, None, None], jnp.nan, a) for a in operands))
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
    for a in dirty[:4]:
        np.testing.assert_array_equal(a[padding], 0.0)


def test_the_last_query_does_not_know_the_order_of_earlier_keys(rng):
    T = 90
    q, k, v, _ = draw(rng, T)
    order = np.append(rng.permutation(T - 1), T - 1)
    last = jax.jit(lambda k, v: attention(q[:, -1:], k, v, block_size=32)[0])
    # The same float32 sum in another order.
    np.testing.assert_allclose(last(k[:, order], v[:, order]), last(k, v), rtol=1e-5, atol=1e-6)


def test_a_head_without_an_allowed_pair_has_maximum_minus_infinity(rng):
    q, k, v, _ = draw(rng, 9)
    nothing = jnp.zeros((B, 9), jnp.int32)
    o, top = attention(q, k, v, segment_ids=nothing, return_max_logits=True)
    np.testing.assert_array_equal(top, -np.inf)
    np.testing.assert_array_equal(o, 0.0)
    assert attention(q, k, v)[1] is None


def test_the_maximum_has_no_gradient(rng):
    q, k, v, _ = draw(rng, 9)
    top = lambda q: jnp.sum(attention(q, k, v, return_max_logits=True)[1])  # noqa: E731
    np.testing.assert_array_equal(jax.grad(top)(q), 0.0)


def test_logits_of_ten_thousand_stay_finite(rng):
    q, k, v, do = draw(rng, 40)
    operands = (q * 1e4, k, v, do)
    actual = run(*operands, block_size=16)
    assert all(np.isfinite(a).all() for a in actual)
    # A logit of 1e4 carries an absolute float32 error near 1e-3, so does the weight.
    assert relative_error(actual[0], oracle(*operands)[0]) < 1e-2


def test_bfloat16_operands_can_give_a_float32_output(rng):
    operands, ids = draw(rng, 65, dtype=jnp.bfloat16), draw_ids(rng, 65)
    actual = run(*operands, segment_ids=ids, out_dtype=jnp.float32, block_size=32)
    assert [a.dtype for a in actual] == [jnp.float32, *[jnp.bfloat16] * 3, jnp.float32]
    check(actual, oracle(*operands, ids, ids), "bfloat16")
    rounded = attention(*operands[:3], segment_ids=ids, block_size=32)[0]
    assert rounded.dtype == jnp.bfloat16
    # Same sums, so the float32 output differs from the rounded one by its rounding only.
    assert relative_error(rounded, actual[0]) < 2.0**-8


def test_vmap_equals_a_loop(rng):
    rows = [draw(rng, 20)[:3] for _ in range(3)]
    stacked = [jnp.stack(a) for a in zip(*rows, strict=True)]

    def loss(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v, block_size=8)[0]))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
    together = jax.jit(jax.vmap(gradients))(*stacked)
    for n, row in enumerate(rows):
        for a, e in zip(together, gradients(*row), strict=True):
            np.testing.assert_allclose(a[n], e, rtol=1e-5, atol=1e-5)


def shapes_in(jaxpr):
    """Shapes of all values of a jaxpr and of those inside its equations."""
    return {v.aval.shape for e in equations(jaxpr) for v in (*e.invars, *e.outvars)}


@pytest.mark.parametrize(("implementation", "square"), [("chunked", False), ("reference", True)])
def test_only_the_reference_holds_an_array_of_length_squared(implementation, square):
    T = 1024
    row = lambda width: jax.ShapeDtypeStruct((1, T, 2, width), jnp.float32)  # noqa: E731
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(q, k, v, ids):
        return jnp.sum(attention(q, k, v, segment_ids=ids, implementation=implementation)[0])

    for f in (loss, jax.grad(loss, (0, 1, 2))):
        shapes = shapes_in(jax.make_jaxpr(f)(row(K), row(K), row(V), ids).jaxpr)
        assert any(sum(n >= T for n in shape) > 1 for shape in shapes) == square
        assert square or (1, 2, 512, 512) in shapes  # the walk did reach the tiles


def test_causal_calls_skip_tiles_above_the_diagonal():
    plan = tiles.Plan(512, 512, 128, 128, True, 1.0, np.dtype("float32"))
    assert len(tiles.tile_starts(plan)) == 10
    assert len(tiles.tile_starts(plan._replace(causal=False))) == 16
    assert len(tiles.tile_starts(plan._replace(queries=128))) == 4  # the last rows see all keys


def test_blocks_cut_a_length_evenly():
    assert tiles.even_block(130, 64) == 48  # three of 48, not three of 64
    assert tiles.even_block(1024, 128) == 128
    assert tiles.even_block(17, 64) == 17
    assert all(-(-n // tiles.even_block(n, 64)) <= -(-n // 64) for n in range(1, 400))


def test_a_remat_policy_can_spare_the_second_forward_pass(rng):
    q, k, v, _ = draw(rng, 20)
    names = jax.checkpoint_policies.save_only_these_names("attention_output", "attention_logsumexp")

    def scans(policy):
        block = jax.checkpoint(lambda q: jnp.sum(attention(q, k, v)[0]), policy=policy)
        return str(jax.make_jaxpr(jax.grad(block))(q)).count(" scan[")

    assert scans(names) == scans(jax.checkpoint_policies.nothing_saveable) - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (B, 9, H, K + 1)}, "repeat shared key heads"),
        ({"v": (B, 8, H, V)}, "repeat shared key heads"),
        ({"q": (B, 0, H, K)}, "at least one query"),
        ({"segment_ids": (B, 8)}, r"must be int32\[2, 9\]"),
        ({"kv_segment_ids": (B, 9)}, "pass both, or neither"),
        ({"q": (B, 4, H, K), "segment_ids": (B, 4)}, "pass kv_segment_ids"),
        ({"block_size": 0}, "block_size 0 must be at least 1"),
        ({"implementation": "flash"}, "choose from chunked, reference"),
        ({"implementation": "reference", "block_size": 8}, "has no blocks"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    arguments = {"q": (B, 9, H, K), "k": (B, 9, H, K), "v": (B, 9, H, V)} | change
    for name, value in arguments.items():
        if isinstance(value, tuple):
            arguments[name] = jnp.zeros(value, jnp.int32 if "ids" in name else jnp.float32)
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **arguments)


def test_mixed_dtypes_are_refused(rng):
    q, k, v, _ = draw(rng, 4)
    with pytest.raises(ValueError, match="one floating dtype"):
        attention(q, k.astype(jnp.bfloat16), v)


def test_a_sequence_of_implementations_falls_back_with_a_warning(rng):
    q, k, v, _ = draw(rng, 4)
    dispatch._announced.clear()
    with pytest.warns(dispatch.FallbackWarning, match="falls back to 'chunked'"):
        attention(q, k, v, implementation=("reference", "chunked"), block_size=4)
