"""Chunked cross-entropy: values, gradients and boundaries against a float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from pallas_kernels.cross_entropy import chunked, cross_entropy, token_nll, token_scores
from pallas_kernels.numerics import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error

D, V = 12, 37

# Two float32 sums of the same 50 terms in another order; terms of both signs need a floor.
REORDERED = {"rtol": 1e-5, "atol": 1e-5}
# The value of the same chunks, summed in the same order by a program with less in it.
SAME_CHUNKS = {"rtol": 1e-6}
# One more float32 product per entry than the gradient it is compared to.
SCALED = {"rtol": 1e-5, "atol": 1e-6}


def oracle(x, w, targets, weights):
    """nll [N], loss, dx and dw, float64."""
    x, w, weights = (np.asarray(a, np.float64) for a in (x, w, weights))
    z = x @ w
    z = z - z.max(axis=1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    nll = -np.take_along_axis(log_p, np.asarray(targets)[:, None], axis=1)[:, 0]
    dz = weights[:, None] * (np.exp(log_p) - np.eye(w.shape[1])[np.asarray(targets)])
    return nll, (weights * nll).sum(), dz @ w.T, x.T @ dz


def draw(rng, N, dtype=jnp.float32):
    """x, w, targets and weights of both signs, some of them 0."""
    x = jnp.asarray(rng.normal(size=(N, D)), dtype)
    w = jnp.asarray(rng.normal(size=(D, V)), dtype)
    weights = rng.normal(size=N) * (rng.random(N) < 0.8)
    targets = jnp.asarray(rng.integers(0, V, N), jnp.int32)
    return x, w, targets, jnp.asarray(weights, jnp.float32)


@functools.partial(jax.jit, static_argnames=("chunk_size", "implementation"))
def value_and_gradients(x, w, targets, weights, **options):
    """Loss and its gradients in x and w."""
    loss = functools.partial(cross_entropy, **options)
    return jax.value_and_grad(loss, (0, 1))(x, w, targets, weights)


def check(operands, dtype="float32", **options):
    """Sums of at most a few hundred float32 terms; relative to their norm."""
    value, (dx, dw) = value_and_gradients(*operands, **options)
    _, loss, dx64, dw64 = oracle(*operands)
    assert value.dtype == jnp.float32 and value.shape == ()
    assert (dx.dtype, dw.dtype) == (operands[0].dtype, operands[1].dtype)
    assert abs(float(value) - loss) < FORWARD_TOLERANCE[dtype] * max(abs(loss), 1.0)
    assert relative_error(dx, dx64) < GRADIENT_TOLERANCE[dtype]
    assert relative_error(dw, dw64) < GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("N", "chunk_size"), [(1, None), (1, 8), (50, 1), (50, 7), (50, 25), (50, 64), (129, 64)]
)
def test_any_chunk_size_equals_the_oracle(N, chunk_size, rng):
    check(draw(rng, N), chunk_size=chunk_size)


def test_the_reference_equals_the_oracle(rng):
    check(draw(rng, 50), implementation="reference")


def test_bfloat16_operands_give_a_float32_loss_and_bfloat16_gradients(rng):
    check(draw(rng, 50, jnp.bfloat16), "bfloat16", chunk_size=16)


@pytest.mark.parametrize("chunk_size", [1, 16, None])
def test_token_nll_equals_the_oracle(chunk_size, rng):
    x, w, targets, weights = draw(rng, 50)
    nll = token_nll(x, w, targets, chunk_size=chunk_size)
    assert nll.shape == (50,) and nll.dtype == jnp.float32
    assert relative_error(nll, oracle(x, w, targets, weights)[0]) < FORWARD_TOLERANCE["float32"]
    total = cross_entropy(x, w, targets, weights)
    np.testing.assert_allclose(jnp.sum(weights * nll), total, **REORDERED)


@pytest.mark.parametrize("chunk_size", [16, None])
def test_the_best_token_is_the_argmax_of_the_logits_and_the_lowest_of_equals(chunk_size, rng):
    x, w, targets, _ = draw(rng, 50)
    x = x.at[7].set(0.0)  # all logits equal
    nll, best = token_scores(x, w, targets, chunk_size=chunk_size)
    assert np.array_equal(nll, token_nll(x, w, targets, chunk_size=chunk_size))
    expected = np.argmax(np.asarray(x, np.float64) @ np.asarray(w, np.float64), axis=-1)
    assert best.dtype == jnp.int32 and best.tolist() == expected.tolist() and best[7] == 0


def test_the_value_is_the_same_with_and_without_gradients(rng):
    operands = draw(rng, 50)
    alone = jax.jit(functools.partial(cross_entropy, chunk_size=16))(*operands)
    together = value_and_gradients(*operands, chunk_size=16)[0]
    np.testing.assert_allclose(alone, together, **SAME_CHUNKS)


def test_the_gradient_is_linear_in_the_cotangent(rng):
    x, w, targets, weights = draw(rng, 20)
    once = value_and_gradients(x, w, targets, weights)[1]
    loss = lambda x, w: 0.5 * cross_entropy(x, w, targets, weights) ** 2  # noqa: E731
    chained = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    scale = cross_entropy(x, w, targets, weights)
    for a, b in zip(chained, once, strict=True):
        np.testing.assert_allclose(a, scale * b, **SCALED)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_rows_of_weight_zero_add_exactly_nothing(implementation, rng):
    x, w, targets, weights = draw(rng, 30)
    idle = np.asarray(weights == 0)
    assert idle.any()
    clean = value_and_gradients(
        jnp.where(idle[:, None], 0.0, x), w, targets, weights, implementation=implementation
    )
    dirty = value_and_gradients(
        jnp.where(idle[:, None], jnp.nan, x),
        w,
        jnp.where(idle, -100, targets),  # not a word of the vocabulary
        weights,
        implementation=implementation,
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    np.testing.assert_array_equal(dirty[1][0][idle], 0.0)


def test_without_any_weight_everything_is_zero(rng):
    x, w, targets, weights = draw(rng, 9)
    for leaf in jax.tree.leaves(value_and_gradients(x * jnp.nan, w, targets, 0.0 * weights)):
        np.testing.assert_array_equal(leaf, 0.0)


def test_logits_of_ten_thousand_stay_finite(rng):
    x, w, targets, weights = draw(rng, 30)
    operands = (x * 1e4, w, targets, weights)
    value, (dx, dw) = value_and_gradients(*operands, chunk_size=8)
    assert all(np.isfinite(a).all() for a in (value, dx, dw))
    _, loss, _, dw64 = oracle(*operands)
    # A logit of 1e4 carries an absolute float32 error near 1e-3, so does the weight of a word.
    assert abs(float(value) - loss) < 1e-4 * abs(loss)
    assert relative_error(dw, dw64) < 1e-2


def test_weights_are_not_differentiated(rng):
    x, w, targets, weights = draw(rng, 9)
    for implementation in ("chunked", "reference"):
        loss = lambda weights, i=implementation: cross_entropy(  # noqa: E731
            x, w, targets, weights, implementation=i
        )
        np.testing.assert_array_equal(jax.grad(loss)(weights), 0.0)


def test_vmap_equals_a_loop(rng):
    rows = [draw(rng, 10) for _ in range(3)]
    w = rows[0][1]
    x, targets, weights = (jnp.stack([row[i] for row in rows]) for i in (0, 2, 3))
    one = functools.partial(value_and_gradients, chunk_size=4)
    together = jax.jit(jax.vmap(one, in_axes=(0, None, 0, 0)))(x, w, targets, weights)
    for n in range(3):
        alone = one(x[n], w, targets[n], weights[n])
        jax.tree.map(
            lambda a, b, n=n: np.testing.assert_allclose(a[n], b, **REORDERED),
            together,
            alone,
        )


def traced(f, N=4096, D=8, V=1024):
    """Equations of `f`'s trace at a size that tells N, D and V apart."""
    shape = jax.ShapeDtypeStruct
    operands = (shape((N, D), jnp.float32), shape((D, V), jnp.float32))
    operands += (shape((N,), jnp.int32), shape((N,), jnp.float32))
    return list(equations(jax.make_jaxpr(f)(*operands).jaxpr))


@pytest.mark.parametrize(("implementation", "whole"), [("chunked", False), ("reference", True)])
def test_only_the_reference_holds_all_logits(implementation, whole):
    loss = functools.partial(cross_entropy, implementation=implementation)
    chunk = chunked.default_chunk(1024)
    for f in (loss, jax.value_and_grad(loss, (0, 1))):
        shapes = {v.aval.shape for e in traced(f) for v in e.outvars}
        assert any(np.prod(shape) >= 4096 * 1024 for shape in shapes) == whole
        assert whole or (chunk, 1024) in shapes  # the walk did reach the chunks


def test_the_value_takes_one_product_and_the_gradient_three():
    products = lambda f: sum(e.primitive.name == "dot_general" for e in traced(f))  # noqa: E731
    assert products(cross_entropy) == 1
    assert products(jax.value_and_grad(cross_entropy, (0, 1))) == 3


def test_differentiating_token_nll_is_refused_with_the_way_out(rng):
    x, w, targets, _ = draw(rng, 9)
    with pytest.raises(ValueError, match="use cross_entropy"):
        jax.grad(lambda x: jnp.sum(token_nll(x, w, targets)))(x)
    still = lambda x: jnp.sum(token_nll(jax.lax.stop_gradient(x), w, targets))  # noqa: E731
    np.testing.assert_array_equal(jax.grad(still)(x), 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": ((2, 3, D), jnp.float32)}, "flatten batch and sequence"),
        ({"x": ((0, D), jnp.float32)}, "none empty"),
        ({"w": ((D + 1, V), jnp.float32)}, "flatten batch and sequence"),
        ({"w": ((D, V), jnp.bfloat16)}, "one floating dtype"),
        ({"targets": ((4,), jnp.int32)}, "one for each of the 5 rows"),
        ({"targets": ((5,), jnp.float32)}, "must be int32"),
        ({"weights": ((5,), jnp.int32)}, "must be float32"),
        ({"chunk_size": 0}, "chunk_size 0 must be at least 1"),
        ({"implementation": "fused"}, "choose from chunked, reference"),
        ({"implementation": "reference", "chunk_size": 2}, "has no chunks"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    shapes = {
        "x": ((5, D), jnp.float32),
        "w": ((D, V), jnp.float32),
        "targets": ((5,), jnp.int32),
        "weights": ((5,), jnp.float32),
    }
    options = {name: value for name, value in change.items() if name not in shapes}
    shapes |= {name: value for name, value in change.items() if name in shapes}
    with pytest.raises(ValueError, match=message):
        cross_entropy(*(jnp.zeros(*shape) for shape in shapes.values()), **options)
