"""The KDA mixer: gate formulas, initial values, decoding against the whole sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers import kda as kda_layer
from k3jax.layers.kda import KdaCache, KdaConfig, KimiDeltaAttention
from pallas_kernels.numerics import relative_error

CFG = KdaConfig(heads=2, key_dim=8, value_dim=12, decay_rank=6)
D, B, T = 24, 2, 21

# Steps against chunks: some roundings of 6e-8 in each of 21 tokens, raised by the output's norm.
STEPS = 1e-4
# The same chunked form, its chunks cut elsewhere: as many sums, in another order.
CHUNKS = 1e-5
# One projection of order one, a sum of 24 products in another order.
PROJECTION = 1e-6


@pytest.fixture(scope="module")
def params(draw_layer):
    return draw_layer(KimiDeltaAttention(CFG), jnp.zeros((1, 1, D)), None)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)


def apply(params, x, ids=None, cache=None, cfg=CFG):
    return _apply(cfg)(params, x, ids, cache)


@functools.cache
def _apply(cfg):
    return jax.jit(KimiDeltaAttention(cfg).apply)


def empty():
    state = jnp.zeros((B, CFG.heads, CFG.key_dim, CFG.value_dim))
    return KdaCache(state, jnp.zeros((B, 3, CFG.heads * (2 * 8 + 12))))


def test_initial_values_lie_in_their_documented_ranges():
    init = jax.jit(lambda key: KimiDeltaAttention(CFG).init(key, jnp.zeros((1, 1, D)), None))
    p = init(jax.random.key(0))["params"]
    assert not np.any(np.asarray(p["a_log"]))
    dt = np.log1p(np.exp(np.asarray(p["dt_bias"], np.float64)))
    assert dt.min() >= 1e-3 * 0.999 and dt.max() <= 1e-1 * 1.001
    for name in ("conv_q", "conv_k", "conv_v"):
        assert np.abs(np.asarray(p[name])).max() <= 0.5
        assert np.std(np.asarray(p[name])) > 0.2
    assert np.all(np.asarray(p["o_norm"]) == 1.0)


def test_decoding_token_by_token_equals_the_whole_sequence(params, x):
    expected, _ = apply(params, x)
    cache, outputs = empty(), []
    for t in range(T):
        y, cache = apply(params, x[:, t : t + 1], None, cache)
        outputs.append(y)
    assert relative_error(jnp.concatenate(outputs, axis=1), expected) < STEPS
    ids = jnp.ones((B, T), jnp.int32)
    y, filled = apply(params, x, ids, empty())
    assert relative_error(y, expected) < CHUNKS
    assert relative_error(cache.state, filled.state) < STEPS
    np.testing.assert_allclose(cache.conv, filled.conv, atol=PROJECTION)


def test_several_tokens_in_a_decoding_step_are_refused_not_dropped(params, x):
    with pytest.raises(ValueError, match="3 tokens in a decoding step.*segment_ids"):
        apply(params, x[:, :3], None, empty())


def test_a_prompt_in_two_pieces_equals_one(params, x):
    whole, last = apply(params, x, jnp.ones((B, T), jnp.int32), empty())
    for cut in (1, 2, 5):
        # The first piece has padding behind it and the second one before it: one shape for all.
        first = jnp.broadcast_to(jnp.arange(T) < cut, (B, T))
        a, cache = apply(params, x, first.astype(jnp.int32), empty())
        b, end = apply(params, x, (~first).astype(jnp.int32), cache)
        assert relative_error(jnp.where(first[..., None], a, b), whole) < CHUNKS
        assert relative_error(end.state, last.state) < CHUNKS
        np.testing.assert_allclose(end.conv, last.conv, atol=PROJECTION)


def test_the_missing_lower_bound_selects_the_other_formula(params, x):
    softplus = dataclasses.replace(CFG, gate_lower_bound=None)
    bounded, _ = apply(params, x)
    unbounded, _ = apply(params, x, cfg=softplus)
    nearly_zero, _ = apply(params, x, cfg=dataclasses.replace(CFG, gate_lower_bound=-1e-6))
    assert relative_error(unbounded, bounded) > 1e-2
    assert relative_error(unbounded, nearly_zero) > 1e-2


@pytest.mark.parametrize("bound", [0.0, 1.0, -5.5, -8.0])
def test_a_bound_outside_its_range_is_refused_with_the_value(bound):
    with pytest.raises(ValueError, match=rf"gate_lower_bound={bound}.*\[-5, 0\)"):
        dataclasses.replace(CFG, gate_lower_bound=bound)


def test_the_head_decay_rate_changes_the_output(params, x):
    changed = jax.tree.map(lambda a: a, params)
    changed["params"]["a_log"] = changed["params"]["a_log"] + jnp.array([0.0, 0.7])
    y, _ = apply(params, x)
    z, _ = apply(changed, x)
    assert relative_error(z, y) > 1e-3


def test_order_of_the_earlier_tokens_matters_to_the_recurrence(params, x):
    swapped = x[:, jnp.array([1, 0, *range(2, T)])]
    y, _ = apply(params, x)
    z, _ = apply(params, swapped)
    assert relative_error(z[:, -1], y[:, -1]) > 1e-4


def test_low_rank_output_gate_is_kimi_linears():
    cfg = dataclasses.replace(CFG, output_gate_rank=8)
    shapes = jax.eval_shape(
        lambda k: KimiDeltaAttention(cfg).init(k, jnp.zeros((1, 1, D)), None), jax.random.key(0)
    )["params"]
    assert shapes["w_g_a"].shape == (D, 8) and shapes["w_g_b"].shape == (8, 2, 12)
    assert "w_g" not in shapes


@pytest.mark.parametrize("way", ["training", "prefill", "decoding"])
def test_beta_of_bfloat16_activations_reaches_the_op_in_float32(params, x, monkeypatch, way):
    # Of 21 values of a sigmoid hardly one is a bfloat16 number: rounded on the way, all are.
    x = x[:, : 1 if way == "decoding" else T].astype(jnp.bfloat16)
    seen = {}

    def whole(q, k, v, g, beta, **options):
        state = options.get("initial_state")
        return jnp.broadcast_to(beta[..., None], v.shape), state

    def step(q, k, v, g, beta, pool, slots, **options):
        return jnp.broadcast_to(beta[..., None], v.shape), pool

    def norm(o, weight, gate, eps):
        seen["beta"] = np.asarray(o[..., 0])
        return o.astype(gate.dtype)

    monkeypatch.setattr(kda_layer, "kda", whole)
    monkeypatch.setattr(kda_layer, "kda_decode", step)
    monkeypatch.setattr(kda_layer, "gated_rms_norm", norm)
    # A configuration of its own: functions traced before the patch are found again by theirs.
    cfg = dataclasses.replace(CFG, norm_eps=1e-4)
    ids = jnp.ones(x.shape[:2], jnp.int32) if way == "prefill" else None
    KimiDeltaAttention(cfg).apply(params, x, ids, None if way == "training" else empty())
    logits = jnp.einsum("btd,dh->bth", x, params["params"]["w_beta"].astype(jnp.bfloat16))
    beta = seen["beta"]
    assert beta.dtype == np.float32
    np.testing.assert_array_equal(beta, jax.nn.sigmoid(logits.astype(jnp.float32)))
    assert np.mean(beta == np.asarray(beta.astype(jnp.bfloat16), np.float32)) < 0.3
