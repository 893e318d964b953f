"""QK-Clip on arrays: factors, the product they give, scanned copies, dtypes and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.optim import weight_clip
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.parallel.mesh import AXES

R, H, NOPE, SHARED, TAU = 8, 3, 5, 2, 100.0


def test_only_a_head_above_the_threshold_has_a_factor_below_one():
    logits = jnp.array([-5.0, 0.0, 99.0, 100.0, 400.0, -jnp.inf, jnp.inf, jnp.nan])
    factors = weight_clip.head_factors(logits, TAU)
    assert factors.tolist() == [1, 1, 1, 1, 0.25, 1, 1, 1]


@pytest.mark.parametrize("direct", [False, True], ids=["query latent", "direct queries"])
def test_every_logit_of_a_clipped_head_is_gamma_times_the_old_one(rng, direct):
    query = "w_q" if direct else "w_q_b"
    layer = {
        query: rng.standard_normal((2, R, H, NOPE + SHARED)),
        "w_k_b": rng.standard_normal((2, R, H, NOPE)),
        "w_kv_a": rng.standard_normal((2, R, 4)),
    }
    low, c, k_shared = (rng.standard_normal((6, n)) for n in (R, R, SHARED))
    params = {"a": {"mixer": jax.tree.map(jnp.asarray, layer)}, "head": jnp.ones(3)}
    top = jnp.array([[50.0, 200.0, 100.0], [1e4, -3.0, 50.0]])
    rows = [(("a", "mixer"), 0), (("a", "mixer"), 1)]
    after = weight_clip.clip(params, top, TAU, rows, NOPE)["a"]["mixer"]

    def logits(leaves):
        q = np.einsum("tr,lrhk->lthk", low, np.asarray(leaves[query], np.float64))
        k = np.einsum("sr,lrhk->lshk", c, np.asarray(leaves["w_k_b"], np.float64))
        content = np.einsum("lthk,lshk->lhts", q[..., :NOPE], k)
        return content + np.einsum("lthk,sk->lhts", q[..., NOPE:], k_shared)

    gamma = np.array([[1, 0.5, 1], [0.01, 1, 1]])[..., None, None]
    # One float32 square root and two products.
    np.testing.assert_allclose(logits(after), gamma * logits(layer), rtol=1e-5, atol=1e-6)
    assert after["w_kv_a"] is params["a"]["mixer"]["w_kv_a"]


def test_rows_of_several_modules_reach_their_own_layer_in_any_order(rng):
    def leaves():
        return {"w_q_b": jnp.ones((1, R, H, NOPE + SHARED)), "w_k_b": jnp.ones((1, R, H, NOPE))}

    params = {"first": leaves(), "extra": {"mixer": leaves()}}
    top = jnp.array([[TAU] * H, [4 * TAU] * H])
    after = weight_clip.clip(params, top, TAU, [(("extra", "mixer"), 0), (("first",), 0)], NOPE)
    assert np.all(after["extra"]["mixer"]["w_k_b"] == 1)
    assert np.all(after["first"]["w_k_b"] == 0.5)
    assert np.all(after["first"]["w_q_b"] == np.array([0.5] * NOPE + [0.25] * SHARED))


def test_split_bfloat16_weights_keep_their_sharding_dtype_and_the_bits_of_calm_heads(rng):
    w = jnp.asarray(rng.standard_normal((1, R, H, NOPE + SHARED)), jnp.bfloat16)
    k, top = w[..., :NOPE], np.float32([[1e3, 1.0, 2.0]])

    def clip(w, k):
        return weight_clip.clip({"w_q": w, "w_k_b": k}, jnp.asarray(top), TAU, [((), 0)], NOPE)

    alone = clip(w, k)
    with jax.set_mesh(jax.make_mesh((1, 8, 1, 1), AXES)):
        split = jax.jit(clip)(*(jax.device_put(x, P(None, "data", None, None)) for x in (w, k)))
        for name, x in split.items():
            assert x.dtype == jnp.bfloat16 and x.addressable_shards[0].data.size * 8 == x.size
            np.testing.assert_array_equal(x, alone[name])
    np.testing.assert_array_equal(alone["w_q"][..., 1:, :], w[..., 1:, :])
    assert not np.array_equal(alone["w_q"], w)


def test_layers_that_were_not_named_are_refused():
    with pytest.raises(ValueError, match="max_logits has 2 rows and 1 layers were named; name"):
        weight_clip.clip({}, jnp.ones((2, H)), TAU, [(("a",), 0)], NOPE)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_threshold_that_turns_heads_off_is_refused(value):
    with pytest.raises(ValueError, match=f"qk_clip={value}: .* none for no clipping"):
        dataclasses.replace(OptimizerConfig(peak_lr=1e-3), qk_clip=value)
