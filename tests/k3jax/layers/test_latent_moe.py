"""Stable LatentMoE against a dense loop; padding, norm and bias in their places."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.activations import ActivationConfig, gated
from k3jax.layers.latent_moe import MoeConfig, StableLatentMoE
from pallas_kernels.numerics import relative_error, tree_relative_error

CFG = MoeConfig(
    experts=6, top_k=2, expert_width=14, latent_dim=20, shared_experts=2, histogram_bins=32
)
ACT = ActivationConfig()
D, B, T = 24, 2, 15
VALID = jnp.ones((B, T), bool)

# Four chained float32 sums of at most 28 products, in another order: 100 roundings of 6e-8.
LAYER = 1e-5
# Back through the norm and the gates as well: a decade more.
GRADIENT = 1e-4
# Single entries: rows lie elsewhere in the blocks, and entries near zero need a floor.
MOVED = {"rtol": 1e-4, "atol": 1e-5}
# A part got by subtraction keeps the error of the whole; single entries of it a decade more.
PART, PART_ENTRIES = 1e-4, {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(scope="module")
def params(draw_layer):
    net = StableLatentMoE(CFG, ACT)
    return plain(draw_layer(net, jnp.zeros((1, 1, D)), jnp.zeros(6), VALID[:1, :1]))


def plain(tree):
    """The same values without mesh axes in their types, so that the dense loop may slice them."""
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), tree)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)


def apply(params, x, bias=None, valid=VALID, cfg=CFG, train=False):
    bias = jnp.zeros(6) if bias is None else bias
    return _apply(cfg, train)(params, x, bias, valid)


@functools.cache
def _apply(cfg, train):
    return jax.jit(functools.partial(StableLatentMoE(cfg, ACT).apply, train=train))


@jax.jit
def dense_loop(p, x, bias):
    """Eq. 11 with every expert computed on every token."""
    s = jax.nn.sigmoid(x @ p["w_router"])
    kth = jnp.sort(s + bias, axis=-1)[..., -CFG.top_k][..., None]
    weights = jnp.where(s + bias >= kth, s, 0.0)
    weights = weights / jnp.sum(weights, -1, keepdims=True)
    act, z = gated(ACT), x @ p["w_latent_down"]
    u = 0.0
    for e in range(CFG.experts):
        gate_up, down = p["experts"]["w_gate_up"][e], p["experts"]["w_down"][e]
        u += weights[..., e, None] * (act(z @ gate_up[:, 0], z @ gate_up[:, 1]) @ down)
    scale = jax.lax.rsqrt(jnp.mean(u**2, -1, keepdims=True) + CFG.norm_eps)
    r = (u * scale * p["latent_norm"]) @ p["w_latent_up"]
    shared = p["shared"]["w_gate_up"]
    return r + act(x @ shared[:, 0], x @ shared[:, 1]) @ p["shared"]["w_down"]


def test_layer_equals_a_dense_loop_over_experts(params, x, rng):
    bias = jnp.asarray(rng.normal(size=6) * 0.1, jnp.float32)
    y, stats = apply(params, x, bias)
    assert stats is None
    assert relative_error(plain(y), dense_loop(params["params"], x, bias)) < LAYER


def test_gradients_equal_those_of_the_dense_loop(params, x):
    probe = jnp.cos(jnp.arange(D))
    ours = jax.grad(lambda p, x: jnp.sum(apply(p, x)[0] * probe), argnums=(0, 1))
    loop = jax.jit(
        jax.grad(lambda p, x: jnp.sum(dense_loop(p["params"], x, 0.0) * probe), argnums=(0, 1))
    )
    errors = tree_relative_error(ours(params, x), loop(params, x))
    assert max(errors.values()) < GRADIENT, errors


def test_padding_reaches_no_expert_and_is_not_counted(params, x):
    valid = VALID.at[0, 4:9].set(False)
    y, stats = apply(params, jnp.where(valid[..., None], x, 1e4), valid=valid, train=True)
    clean, _ = apply(params, x)
    keep = np.asarray(valid)
    np.testing.assert_allclose(np.asarray(y)[keep], np.asarray(clean)[keep], **MOVED)
    assert int(jnp.sum(stats.load)) == int(jnp.sum(valid)) * CFG.top_k
    np.testing.assert_array_equal(np.sum(stats.histogram, -1), int(jnp.sum(valid)))


def test_the_latent_norm_acts_and_sits_before_the_up_projection(params, x):
    half = jax.tree.map(lambda a: a, params)
    half["params"]["latent_norm"] = half["params"]["latent_norm"] * 0.5
    base, halved = plain(apply(params, x)[0]), plain(apply(half, x)[0])
    shared = base - dense_loop_routed(params["params"], x)
    np.testing.assert_allclose(halved - shared, 0.5 * (base - shared), **PART_ENTRIES)


def dense_loop_routed(p, x):
    """The routed part alone: the loop less the shared experts."""
    shared = p["shared"]["w_gate_up"]
    act = gated(ACT)
    everything = dense_loop(p, x, 0.0)
    return everything - act(x @ shared[:, 0], x @ shared[:, 1]) @ p["shared"]["w_down"]


def test_shared_experts_are_the_sum_of_separate_ones(params, x):
    p, F, act = params["params"]["shared"], CFG.expert_width, gated(ACT)
    separate = sum(
        act(x @ p["w_gate_up"][:, 0, i : i + F], x @ p["w_gate_up"][:, 1, i : i + F])
        @ p["w_down"][i : i + F]
        for i in (0, F)
    )
    ours = plain(apply(params, x)[0]) - dense_loop_routed(params["params"], x)
    assert relative_error(ours, separate) < PART


def test_the_width_of_a_shared_expert_is_the_routed_ones_unless_it_is_given():
    assert CFG.shared_total == 2 * CFG.expert_width
    assert dataclasses.replace(CFG, shared_width=5).shared_total == 2 * 5


def test_without_a_latent_the_experts_work_at_model_width():
    cfg = dataclasses.replace(CFG, latent_dim=None, latent_norm=False)
    net = StableLatentMoE(cfg, ActivationConfig("swiglu"))
    shapes = jax.eval_shape(
        lambda k: net.init(k, jnp.zeros((1, 1, D)), jnp.zeros(6), VALID[:1, :1]),
        jax.random.key(0),
    )["params"]
    assert shapes["experts"]["w_gate_up"].shape == (6, D, 2, 14)
    assert {"w_latent_down", "w_latent_up", "latent_norm"}.isdisjoint(shapes)


@pytest.mark.parametrize("top_k", [0, 6, 7])
def test_no_rejected_expert_is_refused_at_configuration(top_k):
    with pytest.raises(ValueError, match=f"top_k={top_k}.*one rejected expert"):
        dataclasses.replace(CFG, top_k=top_k)
