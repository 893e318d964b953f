"""Latent attention: absorbed against expanded, no positions, padding, precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.mla import LatentAttention, MlaCache, MlaConfig
from k3jax.parallel.mesh import AXES
from pallas_kernels.numerics import relative_error

CFG = MlaConfig(heads=3, q_lora_rank=20, kv_lora_rank=24, nope_dim=12, shared_dim=8, value_dim=10)
D = 32

# Chained float32 sums of up to 33 terms, in another order or with brackets set otherwise.
REORDERED = 1e-5
# The same of one token or one logit alone, which may be small against what it sums.
ALONE = 1e-4
# Sums of nine terms, grouped otherwise by the exact zeros of masked keys among them.
PADDED = 1e-6


@pytest.fixture(scope="module")
def layer(draw_layer):
    """The module with drawn parameters, and both forms compiled once."""
    net = LatentAttention(CFG)
    params = draw_layer(net, jnp.zeros((1, 1, D)), None)
    whole = jax.jit(lambda x, ids: net.apply(params, x, ids)[0])
    step = jax.jit(lambda x, c, n: net.apply(params, x, None, MlaCache(c), n)[:2])
    return net, params, whole, step


def inputs(rng, B, T):
    return jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)


def test_absorbed_token_by_token_equals_expanded(layer, rng):
    _, _, whole, step = layer
    x = inputs(rng, 2, 33)
    expected = whole(x, None)
    rows = jnp.full((2, 40, CFG.kv_lora_rank + CFG.shared_dim), jnp.nan)  # unread rows may be NaN
    for t in range(33):
        y, cache = step(x[:, t : t + 1], rows, jnp.full((2,), t, jnp.int32))
        rows = cache.latents
        assert relative_error(y[:, 0], expected[:, t]) < ALONE


def test_several_new_tokens_at_once_equal_one_by_one(layer, rng):
    _, _, whole, step = layer
    x = inputs(rng, 1, 12)
    rows = jnp.zeros((1, 16, CFG.kv_lora_rank + CFG.shared_dim))
    _, cache = step(x[:, :7], rows, jnp.zeros((1,), jnp.int32))
    y, _ = step(x[:, 7:], cache.latents, jnp.full((1,), 7, jnp.int32))
    assert relative_error(y, whole(x, None)[:, 7:]) < REORDERED


def test_the_last_token_does_not_see_the_order_of_the_earlier_ones(layer, rng):
    _, _, whole, _ = layer
    x = inputs(rng, 1, 20)
    order = np.concatenate([rng.permutation(19), [19]])
    assert relative_error(whole(x[:, order], None)[:, -1], whole(x, None)[:, -1]) < REORDERED


def test_shifting_every_position_changes_nothing(layer, rng):
    # 1,000 tokens of padding in front shift all positions; the shared key is never rotated.
    _, _, whole, _ = layer
    x = inputs(rng, 1, 9)
    pad = jnp.concatenate([jnp.zeros((1, 1000, D)), x], axis=1)
    ids = jnp.concatenate([jnp.zeros((1, 1000), jnp.int32), jnp.ones((1, 9), jnp.int32)], axis=1)
    assert relative_error(whole(pad, ids)[:, 1000:], whole(x, None)) < PADDED


def test_padded_rows_are_finite_and_poison_reaches_no_other_token(layer, rng):
    net, params, whole, _ = layer
    x = inputs(rng, 1, 8)
    ids = jnp.array([[0, 0, 1, 1, 1, 2, 2, 0]], jnp.int32)
    clean = whole(x, ids)
    assert np.all(np.isfinite(np.asarray(clean)))
    poisoned = whole(jnp.where(ids[..., None] > 0, x, jnp.nan), ids)
    np.testing.assert_array_equal(np.asarray(clean)[0, 2:7], np.asarray(poisoned)[0, 2:7])

    def total(x):
        return jnp.sum(jnp.where(ids[..., None] > 0, net.apply(params, x, ids)[0], 0.0))

    gradient = np.asarray(jax.grad(total)(x))
    assert np.all(np.isfinite(gradient)) and not np.any(gradient[0, [0, 1, 7]])


def test_largest_logits_are_those_of_the_expanded_form(layer, rng):
    net, params, _, _ = layer
    x = inputs(rng, 2, 6)
    top = jax.jit(lambda x: net.apply(params, x, None, max_logits=True)[2])(x)
    assert top.shape == (CFG.heads,) and top.dtype == jnp.float32
    p = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), params["params"])
    low = jnp.einsum("btd,dr->btr", x, p["w_q_a"])
    low = low * jax.lax.rsqrt(jnp.mean(low**2, -1, keepdims=True) + CFG.latent_norm_eps)
    low = low * p["q_norm"]
    q = jnp.einsum("btr,rhk->bthk", low, p["w_q_b"])
    both = jnp.einsum("btd,dr->btr", x, p["w_kv_a"])
    c, shared = both[..., :24], both[..., 24:]
    c = c * jax.lax.rsqrt(jnp.mean(c**2, -1, keepdims=True) + CFG.latent_norm_eps) * p["kv_norm"]
    logits = jnp.einsum("bthk,bshk->bhts", q[..., :12], jnp.einsum("btr,rhk->bthk", c, p["w_k_b"]))
    logits = (logits + jnp.einsum("bthk,bsk->bhts", q[..., 12:], shared)) * CFG.query_dim**-0.5
    seen = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), logits, -jnp.inf)
    np.testing.assert_allclose(top, jnp.max(seen, axis=(0, 2, 3)), rtol=ALONE)


def test_queries_without_a_latent_and_no_output_gate_are_kimi_linears(draw_layer):
    cfg = dataclasses.replace(CFG, q_lora_rank=None, output_gate=False)
    params = draw_layer(LatentAttention(cfg), jnp.zeros((1, 1, D)), None)["params"]
    assert set(params) == {"w_q", "w_kv_a", "kv_norm", "w_k_b", "w_v_b", "w_o"}


@pytest.mark.parametrize("field,value", [("heads", 0), ("q_lora_rank", 0), ("kv_lora_rank", -1)])
def test_impossible_shapes_are_refused_with_name_and_value(field, value):
    with pytest.raises(ValueError, match=f"mla.{field}={value}"):
        dataclasses.replace(CFG, **{field: value})


def test_a_split_sequence_is_refused_with_the_way_out(rng):
    mesh = jax.make_mesh((1, 1, 1, 2), AXES)
    net = LatentAttention(CFG)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"context=2.*axis to 1 \(train.mesh.context"),
    ):
        net.init(jax.random.key(0), jnp.zeros((1, 2, D)), None)
