"""Decoding step by step equals prefill, and the pool is touched only where it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.kda import POOL_LAYOUT, kda, kda_decode
from pallas_kernels.numerics import relative_error

# A state sums the thousand tokens it remembers, each rounded at 6e-8: 6e-5 if all err one way.
STATE = 1e-4
# Outputs of a thousand tokens together: roundings of both signs, 6e-8 times the root of a thousand.
OUTPUTS = 1e-5
# One step: sums of 8 products of order one; entries near zero need a floor.
ONE_STEP = {"rtol": 1e-5, "atol": 1e-6}


def test_4096_decoded_tokens_equal_chunked_prefill_and_the_oracle(oracle):
    T, H, K, V = 4096, 2, 16, 8
    normal = np.random.default_rng(0).standard_normal
    # Logits near -8.5: a log-decay near -1e-3, so that the state remembers a thousand tokens.
    x = {"q": normal((1, T, H, K)), "k": normal((1, T, H, K)), "v": normal((1, T, H, V))}
    x |= {"g": 0.1 * normal((1, T, H, K)) - 8.5}
    x = {name: jnp.asarray(value, jnp.bfloat16) for name, value in x.items()}
    # β stays float32: rounded, it would enter the state at every one of the 4096 tokens.
    x["beta"] = jax.nn.sigmoid(jnp.asarray(normal((1, T, H)), jnp.float32))
    x["v"] = x["v"].astype(jnp.float32)  # and so does the output, for the comparison
    options = {"a_log": jnp.zeros(H), "lower_bound": -5.0, "qk_l2norm": True}

    @jax.jit
    def prefill(x):
        return kda(**x, **options, return_final_state=True)

    @jax.jit
    def decode(x):
        def step(pool, token):
            o, pool = kda_decode(*token, pool, jnp.array([1], jnp.int32), **options)
            return pool, o

        tokens = tuple(jnp.moveaxis(x[n], 1, 0) for n in ("q", "k", "v", "g", "beta"))
        return jax.lax.scan(step, jnp.zeros((3, H, K, V)), tokens)

    o, state = prefill(x)
    pool, steps = decode(x)
    exact = {name: np.asarray(value, np.float64) for name, value in x.items()}
    for name in "qk":
        exact[name] /= np.sqrt(np.sum(exact[name] ** 2, -1, keepdims=True) + 1e-6)
    exact["g"] = -5 / (1 + np.exp(-exact["g"]))
    expected, final = oracle(*(exact[n] for n in ("q", "k", "v", "g", "beta")))
    assert relative_error(pool[1], state[0]) < STATE
    assert relative_error(pool[1], final[0, 1]) < STATE
    assert relative_error(state[0], final[0, 1]) < STATE
    steps = np.moveaxis(np.asarray(steps), 0, 1)
    for start in range(0, T, T // 4):  # the error does not grow with the length
        part = slice(start, start + T // 4)
        assert relative_error(steps[:, part], expected[:, part]) < OUTPUTS
        assert relative_error(o[:, part], expected[:, part]) < OUTPUTS
    assert np.all(np.asarray(pool)[[0, 2]] == 0)


def step_inputs(draw, B):
    x = draw(1, B=B)
    return {n: a[:, 0] if n in ("q", "k", "v", "g", "beta") else a for n, a in x.items()}


def decode(x, pool, slots):
    return kda_decode(
        **x, pool=pool, slots=jnp.asarray(slots, jnp.int32), lower_bound=-5.0, qk_l2norm=True
    )


def test_a_step_reads_and_writes_the_slot_it_is_given(draw, evaluate):
    x = step_inputs(draw, 3)
    pool = np.random.default_rng(1).standard_normal((5, 2, 8, 12)).astype(np.float32)
    o, after = jax.jit(decode)(x, pool, [4, 0, 2])
    row = {n: a[:, None] if n in ("q", "k", "v", "g", "beta") else a for n, a in x.items()}
    expected, _ = evaluate(
        row | {"initial_state": pool[[4, 0, 2]]},
        return_final_state=True,
        implementation="reference",
    )
    np.testing.assert_allclose(o, expected["o"][:, 0], **ONE_STEP)
    state = np.asarray(after)[[4, 0, 2]]
    np.testing.assert_allclose(state, expected["state"], **ONE_STEP)
    np.testing.assert_array_equal(np.asarray(after)[[1, 3]], pool[[1, 3]])


def test_idle_entries_output_zero_and_touch_no_slot_even_with_poison_inside(draw):
    x = step_inputs(draw, 3)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][[0, 2]] = np.nan
    pool = np.full((4, 2, 8, 12), np.nan, np.float32)
    pool[3] = 1.0
    o, after = jax.jit(decode)(x, pool, [-1, 3, -7])
    assert np.all(np.asarray(o)[[0, 2]] == 0) and np.all(np.isfinite(o))
    np.testing.assert_array_equal(np.asarray(after)[:3], pool[:3])
    assert np.all(np.isfinite(after[3])) and np.any(after[3] != 1)


def test_the_pool_is_key_first(draw):
    x = step_inputs(draw, 1)
    assert POOL_LAYOUT == ("slot", "head", "key", "value")
    x["k"] = np.zeros_like(x["k"])
    x["k"][..., 3] = 1  # one key channel writes one row of the state, over all values
    _, after = jax.jit(decode)(x, jnp.zeros((1, 2, 8, 12)), [0])
    np.testing.assert_array_equal(np.any(np.asarray(after[0]) != 0, axis=(0, 2)), np.arange(8) == 3)


@pytest.mark.parametrize(
    ("pool", "slots", "message"),
    [
        (jnp.zeros((2, 2, 8, 12), jnp.bfloat16), jnp.zeros(1, jnp.int32), "pool has dtype bfloat"),
        (jnp.zeros((2, 2, 8, 12)), jnp.zeros(1, jnp.int8), "slots has dtype int8"),
    ],
)
def test_a_pool_or_slots_of_the_wrong_dtype_are_refused(pool, slots, message, draw):
    with pytest.raises(ValueError, match=message):
        kda_decode(**step_inputs(draw, 1), pool=pool, slots=slots)


def test_a_value_first_pool_is_refused_by_its_shape(draw):
    with pytest.raises(ValueError, match=r"pool has shape .* = \(2, 2, 8, 12\); keys come before"):
        decode(step_inputs(draw, 1), jnp.zeros((2, 2, 12, 8)), [0])
    with pytest.raises(ValueError, match=r"slots has shape \(2,\), must be \[B\] = \(1,\)"):
        decode(step_inputs(draw, 1), jnp.zeros((2, 2, 8, 12)), [0, 1])


def test_decoding_has_no_chunked_form(draw):
    with pytest.raises(UnsupportedError, match="'chunked' is unknown; choose from reference"):
        kda_decode(
            **step_inputs(draw, 1),
            pool=jnp.zeros((2, 2, 8, 12)),
            slots=jnp.zeros(1, jnp.int32),
            implementation="chunked",
        )


def test_numpy_operands_step_like_jax_arrays(rng):
    shapes = ((2, 1, 8),) * 2 + ((2, 1, 5), (2, 1, 8), (2, 1), (3, 1, 8, 5))
    q, k, v, g, beta, pool = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    arrays = (q, k, v, -np.abs(g), beta, pool, np.array([2, 0], np.int32))
    for ours, wanted in zip(
        kda_decode(*arrays), kda_decode(*map(jnp.asarray, arrays)), strict=True
    ):
        np.testing.assert_array_equal(ours, wanted)
