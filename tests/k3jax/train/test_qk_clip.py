"""QK-Clip in whole steps: exact factors, only the head concerned, every mesh, every micro-batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import MODEL, same_bits

from k3jax.models.kimi_k3 import depth, model
from k3jax.optim import optimizer
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.parallel.mesh import MeshConfig, make_mesh
from k3jax.train.feed import place
from k3jax.train.state import create_state
from k3jax.train.step import train_step

# One latent-attention layer: its input does not depend on its own weights, so that after a clip
# with everything else frozen the same batch has exactly the logits times gamma.
ONE = dataclasses.replace(MODEL, num_layers=1, mla_layers=(0,), attn_res_block=None)
DIRECT = dataclasses.replace(ONE, mla=dataclasses.replace(ONE.mla, q_lora_rank=None))
PATH = ("backbone", "block_0", "group_0", "layer_0", "mixer")
TAU = 8.0
# gamma times float32 weights, and products of up to 24 terms: a few roundings of 6e-8.
ROUNDING = 3e-6


class Frozen:
    """A transformation that changes nothing."""

    def init(self, params):
        return ()

    def update(self, grads, state, params=None):
        return jax.tree.map(jnp.zeros_like, grads), state


@functools.cache
def step(cfg, threshold=TAU):
    return jax.jit(train_step(cfg, Frozen(), lambda _: jnp.float32(0), qk_clip=threshold))


@functools.cache
def logits(cfg):
    def largest(params, router, ids):
        variables = {"params": params, "router": router}
        return model.forward(cfg, variables, ids, max_logits=True).max_logits

    return jax.jit(largest)


def mixer(params):
    return functools.reduce(lambda tree, key: tree[key], PATH, params)


def state_of(cfg, boost, head=0):
    """A fresh state whose head has query weights `boost` times as large."""
    state = create_state(cfg, Frozen(), 0)
    name = "w_q" if cfg.mla.q_lora_rank is None else "w_q_b"
    w = mixer(state.params)[name]
    w = w * jnp.where(jnp.arange(w.shape[-2]) == head, boost, 1.0)[:, None]
    return state._replace(params=with_leaf(state.params, (*PATH, name), w))


def with_leaf(tree, path, leaf):
    return {**tree, path[0]: with_leaf(tree[path[0]], path[1:], leaf)} if path else leaf


def batch_of(rows=8, length=16, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 256, (rows, length)).astype(np.int32)
    return {
        "tokens": ids, "targets": np.roll(ids, -1, 1), "segment_ids": np.ones_like(ids),
        "weights": np.ones(ids.shape, np.float32),
    }  # fmt: skip


@pytest.mark.parametrize(
    "cfg",
    [
        pytest.param(ONE, id="query latent"),
        pytest.param(DIRECT, id="direct queries", marks=pytest.mark.slow),
    ],
)
def test_a_clipped_head_has_its_logits_scaled_to_the_threshold_and_no_other_head_moves(cfg):
    before, batch = state_of(cfg, boost=40.0), batch_of()
    [old] = logits(cfg)(before.params, before.router, batch["tokens"])
    assert old[0] > 3 * TAU and old[1] < TAU
    after, measured = step(cfg)(before, (place(batch),))
    [new] = logits(cfg)(after.params, after.router, batch["tokens"])
    np.testing.assert_allclose(measured.max_logit, old[:1], rtol=ROUNDING)
    np.testing.assert_allclose(new[0], TAU, rtol=ROUNDING)
    assert new[1] == old[1]
    gamma, nope = TAU / float(old[0]), cfg.mla.nope_dim
    query = "w_q" if cfg.mla.q_lora_rank is None else "w_q_b"
    for name, w in mixer(after.params).items():
        was = np.asarray(mixer(before.params)[name])
        expected = was.copy()
        if name == query:
            expected[..., 0, :nope] *= gamma**0.5
            expected[..., 0, nope:] *= gamma
        elif name == "w_k_b":
            expected[..., 0, :] *= gamma**0.5
        np.testing.assert_allclose(w, expected, rtol=ROUNDING, err_msg=name)
        if name in (query, "w_k_b"):
            assert np.array_equal(w[..., 1, :], was[..., 1, :])
        else:
            assert np.array_equal(w, was), name


@pytest.mark.slow
def test_a_step_below_the_threshold_leaves_the_bits_of_a_step_without_clipping():
    before, batch = state_of(ONE, boost=1.0), (place(batch_of()),)
    clipped, measured = step(ONE)(before, batch)
    plain, _ = step(ONE, None)(before, batch)
    assert 0 < measured.max_logit[0] < TAU
    assert same_bits(clipped, plain)


@pytest.mark.slow
def test_the_largest_logit_of_all_micro_batches_decides():
    """The batch whose second piece alone has the largest logit gives the same weights."""
    before, batch = state_of(ONE, boost=40.0), batch_of()
    tops = [
        float(logits(ONE)(before.params, before.router, np.tile(ids, (8, 1)))[0, 0])
        for ids in batch["tokens"]
    ]
    batch = {name: value[np.argsort(tops)] for name, value in batch.items()}
    halves = tuple(place({n: v[i : i + 4] for n, v in batch.items()}) for i in (0, 4))
    whole, one = step(ONE)(before, (place(batch),))
    pieces, two = step(ONE)(before, halves)
    np.testing.assert_allclose(two.max_logit, one.max_logit, rtol=ROUNDING)
    first = step(ONE)(before, halves[:1])[1]
    assert first.max_logit < 0.99 * one.max_logit
    for name in ("w_q_b", "w_k_b"):
        np.testing.assert_allclose(
            mixer(pieces.params)[name], mixer(whole.params)[name], rtol=ROUNDING
        )


@pytest.mark.slow
def test_eight_devices_clip_by_the_largest_logit_of_all_of_them():
    batch, alone = batch_of(), state_of(ONE, boost=40.0)
    expected, one = step(ONE)(alone, (place(batch),))
    with jax.set_mesh(make_mesh(MeshConfig(data=4, expert=2))):
        after, measured = step(ONE)(state_of(ONE, boost=40.0), (place(batch),))
        np.testing.assert_allclose(measured.max_logit, one.max_logit, rtol=1e-5)
        for name in ("w_q_b", "w_k_b"):
            new, old = mixer(after.params)[name], mixer(alone.params)[name]
            assert new.addressable_shards[0].data.size * 8 == new.size  # stays split
            np.testing.assert_allclose(new, mixer(expected.params)[name], rtol=1e-5)
            assert not np.allclose(new, old, rtol=1e-2)


def test_every_row_of_the_largest_logits_names_its_layer(tiny_config):
    paths = depth.mla_paths(tiny_config)
    assert len(paths) == len(tiny_config.mla_layers)
    repeated = dataclasses.replace(
        tiny_config, num_layers=8, mla_layers=(1, 3, 5, 7), attn_res_block=4
    )
    rows = depth.mla_paths(repeated)
    assert len(set(rows)) == 4
    params = jax.eval_shape(lambda key: model.init(repeated, key), jax.random.key(0))["params"]
    for path, copy in rows:
        leaves = functools.reduce(lambda tree, key: tree[key], path, params)
        assert "w_k_b" in leaves and copy < leaves["w_k_b"].shape[0]


@pytest.mark.slow
def test_clipping_tames_an_explosion_and_does_not_hurt_the_loss():
    """Weights that explode at step 0 and a rate that would let them grow on."""
    steps, batch = 30, batch_of()
    curves = {}
    for threshold in (None, 5.0):
        cfg = OptimizerConfig(peak_lr=2e-2, schedule="constant", qk_clip=threshold)
        tx, state = optimizer.make_optimizer(cfg, steps), state_of(ONE, boost=200.0)
        state = state._replace(opt_state=tx.init(state.params))
        update = jax.jit(
            train_step(ONE, tx, optimizer.learning_rate(cfg, steps), qk_clip=threshold)
        )
        curves[threshold] = loss, top = [], []
        for _ in range(steps):
            top.append(float(logits(ONE)(state.params, state.router, batch["tokens"]).max()))
            state, measured = update(state, (place(batch),))
            loss.append(float(measured.loss))
    (plain, wild), (clipped, tame) = curves[None], curves[5.0]
    assert tame[0] == wild[0] > 30 and min(wild[1:]) > 15
    # A step's update comes before its clip, which knows the batch's logits before the update: one
    # update's growth is all that a later step can show above the threshold.
    assert max(tame[1:]) < 5.0 * 1.5
    assert clipped[-1] < 1.02 * plain[-1]
    assert clipped[-1] < 0.5 * clipped[0]
