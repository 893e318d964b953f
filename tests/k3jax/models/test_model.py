"""The whole model: initial values, documents kept apart, padding, modes, Kimi-Linear, mesh."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.activations import ActivationConfig
from k3jax.models.kimi_k3 import cache, model
from k3jax.parallel import specs
from k3jax.parallel.mesh import MeshConfig, make_mesh
from pallas_kernels.numerics import relative_error, tree_relative_error


@pytest.fixture(scope="module")
def net(tiny_config, draw):
    """Variables and a compiled logits function of the tiny model."""
    variables = draw(tiny_config)
    run = jax.jit(lambda ids, segments: model.logits(tiny_config, variables, ids, segments))
    return tiny_config, variables, run


def tokens(rng, cfg, *shape):
    return jnp.asarray(rng.integers(0, cfg.vocab_size, shape), jnp.int32)


def test_same_seed_same_bits_and_another_seed_other_bits(tiny_config):
    init = jax.jit(lambda key: model.init(tiny_config, key))
    a, b, c = (init(jax.random.key(seed)) for seed in (0, 0, 1))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.all(np.isfinite(np.asarray(x)))
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(a["params"]["embedding"], c["params"]["embedding"])


def test_first_loss_is_that_of_uniform_guessing(tiny_config, rng):
    cfg = dataclasses.replace(tiny_config, init_std=0.02, vocab_size=4096)
    variables = jax.jit(lambda key: model.init(cfg, key))(jax.random.key(0))
    ids = tokens(rng, cfg, 2, 33)
    full = jax.jit(lambda ids: model.logits(cfg, variables, ids))(ids[:, :-1])
    nll = -jnp.take_along_axis(jax.nn.log_softmax(full), ids[:, 1:, None], -1)
    assert abs(float(jnp.mean(nll)) - math.log(4096)) < 0.3


def test_a_token_of_one_document_changes_no_bit_of_the_others(net, rng):
    # Packed 5, 9 and 3 tokens: convolution, state, mask and depth mixing must all restart.
    cfg, _, run = net
    ids = tokens(rng, cfg, 1, 17)
    segments = jnp.repeat(jnp.array([1, 2, 3]), jnp.array([5, 9, 3]), total_repeat_length=17)[None]
    before = np.asarray(run(ids, segments))
    for at, others in ((2, slice(5, 17)), (9, slice(14, 17))):
        changed = ids.at[0, at].set((ids[0, at] + 1) % cfg.vocab_size)
        after = np.asarray(run(changed, segments))
        np.testing.assert_array_equal(after[0, others], before[0, others])
        np.testing.assert_array_equal(after[0, :at], before[0, :at])
        assert np.any(after[0, at] != before[0, at])


def test_packed_documents_equal_separate_ones(net, rng):
    cfg, _, run = net
    ids = tokens(rng, cfg, 1, 17)
    segments = jnp.repeat(jnp.array([1, 2, 3]), jnp.array([5, 9, 3]), total_repeat_length=17)[None]
    packed = run(ids, segments)
    for start, stop in ((0, 5), (5, 14), (14, 17)):
        alone = jnp.zeros((1, 17), jnp.int32).at[0, : stop - start].set(ids[0, start:stop])
        ones = (jnp.arange(17) < stop - start).astype(jnp.int32)[None]
        out = run(alone, ones)[0, : stop - start]
        assert relative_error(packed[0, start:stop], out) < 1e-5


def test_left_padding_changes_neither_logits_nor_the_gradient(net, rng):
    cfg, variables, run = net
    prompts = [tokens(rng, cfg, n) for n in (3, 7)]
    ids, segments = jnp.zeros((2, 8), jnp.int32), jnp.zeros((2, 8), jnp.int32)
    for row, p in enumerate(prompts):
        ids, segments = ids.at[row, -len(p) :].set(p), segments.at[row, -len(p) :].set(1)
    padded = run(ids, segments)
    for row, p in enumerate(prompts):
        alone = model.logits(cfg, variables, p[None])
        assert relative_error(padded[row, -len(p) :], alone[0]) < 1e-5

    def loss(params, ids, segments):
        out = model.logits(cfg, {**variables, "params": params}, ids, segments)
        return jnp.sum(jnp.where(segments[..., None] > 0, jnp.sin(out), 0.0))

    both = jax.jit(jax.grad(loss))(variables["params"], ids, segments)
    assert all(np.all(np.isfinite(np.asarray(g))) for g in jax.tree.leaves(both))


def test_poisoned_padding_tokens_leave_the_other_rows_alone(net, rng):
    cfg, _, run = net
    ids = tokens(rng, cfg, 2, 9)
    segments = jnp.array([[0, 0, 1, 1, 1, 1, 1, 0, 0], [1] * 9], jnp.int32)
    other = jnp.where(segments > 0, ids, (ids + 7) % cfg.vocab_size)
    np.testing.assert_array_equal(run(ids, segments), run(other, segments))


def test_decoding_equals_the_whole_sequence_and_depth_mixing_needs_no_cache(net, rng):
    cfg, variables, run = net
    ids = tokens(rng, cfg, 2, 12)
    expected = run(ids, None)
    prefill = jax.jit(lambda ids, c: cache.prefill(cfg, variables, ids, None, c))
    step = jax.jit(lambda ids, c: cache.decode_step(cfg, variables, ids, c))
    logits, state = prefill(ids[:, :4], cache.init_cache(cfg, 2, 16))
    assert set(state._fields) == {"kda", "mla", "lengths"}
    for t in range(4, 12):
        assert relative_error(logits, expected[:, t - 1]) < 1e-4
        logits, state = step(ids[:, t], state)
    assert relative_error(logits, expected[:, -1]) < 1e-4


@pytest.mark.parametrize("change", ["scan", "remat", "tie", "kimi_linear"])
def test_layout_options_change_the_program_but_not_the_result(tiny_config, draw, rng, change):
    cfg = dataclasses.replace(tiny_config, num_layers=9, attn_res_block=8, mla_layers=(3, 7, 8))
    other = {
        "scan": dict(unroll_layers=True), "remat": dict(remat=True),
        "tie": dict(tie_embeddings=True),
        "kimi_linear": dict(attn_res_block=None, activation=ActivationConfig("swiglu")),
    }[change]  # fmt: skip
    changed = dataclasses.replace(cfg, **other)
    variables = draw(changed)
    ids = tokens(rng, cfg, 1, 8)

    def loss(cfg):
        def f(params):
            out = model.forward(cfg, {**variables, "params": params}, ids, train=True)
            head = model.project(params, cfg, out.hidden)
            return jnp.sum(jnp.sin(head)), (head, out.stats)

        return jax.jit(jax.value_and_grad(f, has_aux=True))(variables["params"])

    (value, (head, stats)), gradient = loss(changed)
    assert np.isfinite(value) and head.shape == (1, 8, cfg.vocab_size)
    np.testing.assert_array_equal(jnp.sum(stats.load, -1), 8 * cfg.moe.top_k)
    if change in ("scan", "remat"):
        (same, (_, counted)), expected = loss(cfg)
        np.testing.assert_allclose(value, same, rtol=1e-5)
        # Recomputation must not count a token twice.
        np.testing.assert_array_equal(stats.histogram, counted.histogram)
        assert max(tree_relative_error(gradient, expected).values()) < 1e-3


def test_eight_devices_give_the_logits_of_one(tiny_config, draw, rng):
    cfg = dataclasses.replace(  # widths that eight devices divide
        tiny_config, hidden_size=64, dense_width=64,
        kda=dataclasses.replace(tiny_config.kda, decay_rank=16),
        mla=dataclasses.replace(tiny_config.mla, q_lora_rank=32),
        moe=dataclasses.replace(tiny_config.moe, latent_dim=40, expert_width=24),
    )  # fmt: skip
    variables = draw(cfg)
    ids = tokens(rng, cfg, 8, 8)
    one = jax.jit(lambda v, i: model.logits(cfg, v, i))(variables, ids)
    mesh = make_mesh(MeshConfig(data=4, expert=2))
    host_ids = np.asarray(ids)
    with jax.set_mesh(mesh):
        place = lambda a, spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))  # noqa: E731
        many = jax.tree.map(lambda a: place(np.asarray(a), specs.REPLICATED), variables)
        out = jax.jit(lambda v, i: model.logits(cfg, v, i))(many, place(host_ids, specs.TOKENS))
        assert relative_error(np.asarray(out), np.asarray(one)) < 1e-5
