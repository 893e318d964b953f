"""The whole model: initial values, documents kept apart, padding, modes, Kimi-Linear, mesh."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.activations import ActivationConfig
from k3jax.models.kimi_k3 import cache, model
from k3jax.parallel import specs
from k3jax.parallel.mesh import MeshConfig, make_mesh
from pallas_kernels.numerics import relative_error, tree_relative_error

# The same form with its sums in another order: some 1e-6 a layer.
REORDERED = 1e-5
# Decoding steps against chunks, or partial sums of eight devices: a decade more by the last layer.
OTHER_FORM = 1e-4
# Gradients go through every layer twice, and so do the roundings: another decade.
GRADIENT = 1e-3


@pytest.fixture(scope="module")
def net(tiny_config, draw):
    """Variables and a compiled logits function of the tiny model."""
    variables = draw(tiny_config)
    run = jax.jit(lambda ids, segments: model.logits(tiny_config, variables, ids, segments))
    return tiny_config, variables, run


SHAPE = (2, 17)  # of every call of the compiled function


def tokens(rng, cfg, *shape):
    return jnp.asarray(rng.integers(0, cfg.vocab_size, shape), jnp.int32)


def test_initial_values_depend_on_the_seed_alone_and_guess_uniformly(tiny_config, rng):
    few = dict(num_layers=2, mla_layers=(1,))
    cfg = dataclasses.replace(tiny_config, init_std=0.02, vocab_size=4096, **few)
    init = jax.jit(lambda key: model.init(cfg, key))
    a, b, c = (init(jax.random.key(seed)) for seed in (0, 0, 1))
    chex.assert_tree_all_finite(a)
    chex.assert_trees_all_equal(a, b, strict=True)
    assert not np.array_equal(a["params"]["embedding"], c["params"]["embedding"])
    ids = tokens(rng, cfg, 2, 33)
    full = jax.jit(lambda ids: model.logits(cfg, a, ids))(ids[:, :-1])
    exact = np.asarray(full, np.float64)
    nll = np.log(np.sum(np.exp(exact), -1))
    nll = nll - np.take_along_axis(exact, np.asarray(ids)[:, 1:, None], -1)[..., 0]
    assert abs(np.mean(nll) - math.log(4096)) < 0.3


def test_packed_documents_equal_separate_ones(net, rng):
    cfg, _, run = net
    ids = tokens(rng, cfg, *SHAPE)
    segments = jnp.repeat(jnp.array([1, 2, 3]), jnp.array([5, 9, 3]), total_repeat_length=17)
    packed = run(ids, jnp.broadcast_to(segments, SHAPE))
    for start, stop in ((0, 5), (5, 14), (14, 17)):
        alone = jnp.zeros(SHAPE, jnp.int32).at[:, : stop - start].set(ids[:, start:stop])
        ones = jnp.broadcast_to((jnp.arange(17) < stop - start).astype(jnp.int32), SHAPE)
        out = run(alone, ones)[:, : stop - start]
        assert relative_error(packed[:, start:stop], out) < REORDERED


def test_poisoned_padding_tokens_leave_the_other_rows_alone(net, rng):
    cfg, _, run = net
    ids = tokens(rng, cfg, *SHAPE)
    place = jnp.arange(SHAPE[1])
    segments = jnp.stack([(place > 1) & (place < 11), place >= 0]).astype(jnp.int32)
    other = jnp.where(segments > 0, ids, (ids + 7) % cfg.vocab_size)
    np.testing.assert_array_equal(run(ids, segments), run(other, segments))


def test_decoding_equals_the_whole_sequence_and_depth_mixing_needs_no_cache(net, rng):
    cfg, variables, run = net
    ids = tokens(rng, cfg, *SHAPE)
    expected = run(ids, jnp.ones(SHAPE, jnp.int32))
    prefill = jax.jit(lambda ids, c: cache.prefill(cfg, variables, ids, None, c))
    step = jax.jit(lambda ids, c: cache.decode_step(cfg, variables, ids, c))
    logits, state = prefill(ids[:, :4], cache.init_cache(cfg, 2, 24))
    assert set(state._fields) == {"kda", "mla", "lengths"}
    for t in range(4, SHAPE[1]):
        assert relative_error(logits, expected[:, t - 1]) < OTHER_FORM
        logits, state = step(ids[:, t], state)
    assert relative_error(logits, expected[:, -1]) < OTHER_FORM


PAIRS = dict(num_layers=4, mla_layers=(1, 3), dense_layers=0, attn_res_block=4)
LAYOUTS = {
    "scan": {}, "unrolled, recomputed": dict(unroll_layers=True, remat=True),
    "kimi_linear, tied": dict(
        attn_res_block=None, activation=ActivationConfig("swiglu"), tie_embeddings=True
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def run_layout(tiny_config, draw):
    """Loss, statistics and gradient of the same two repeated groups under a layout option."""
    ids = tokens(np.random.default_rng(0), tiny_config, 1, 8)

    @functools.cache
    def run(name):
        cfg = dataclasses.replace(tiny_config, **PAIRS | LAYOUTS[name])
        variables = draw(cfg)

        def f(params):
            out = model.forward(cfg, {**variables, "params": params}, ids, train=True)
            return jnp.sum(jnp.sin(model.project(params, cfg, out.hidden))), out.stats

        return jax.jit(jax.value_and_grad(f, has_aux=True))(variables["params"])

    return run


@pytest.mark.slow
def test_unrolling_and_recomputation_change_the_program_not_the_result(run_layout):
    (value, stats), gradient = run_layout("unrolled, recomputed")
    (expected, counted), expected_gradient = run_layout("scan")
    np.testing.assert_allclose(value, expected, rtol=REORDERED)
    # Recomputation must not count a token twice.
    np.testing.assert_array_equal(stats.histogram, counted.histogram)
    assert max(tree_relative_error(gradient, expected_gradient).values()) < GRADIENT


@pytest.mark.parametrize(
    "name", [pytest.param("scan", marks=pytest.mark.slow), "kimi_linear, tied"]
)
def test_variants_run_through_the_same_code_with_finite_gradients(run_layout, tiny_config, name):
    (value, stats), gradient = run_layout(name)
    assert np.isfinite(value)
    assert ("lm_head" in gradient) == (name == "scan")
    assert ("output_res" in gradient["backbone"]) == (name == "scan")
    np.testing.assert_array_equal(np.sum(stats.load, -1), 8 * tiny_config.moe.top_k)
    assert all(np.all(np.isfinite(np.asarray(g))) for g in jax.tree.leaves(gradient))


def test_eight_devices_give_the_logits_of_one(tiny_config, draw, rng):
    cfg = dataclasses.replace(  # widths that eight devices divide
        tiny_config, num_layers=2, mla_layers=(1,), hidden_size=64, dense_width=64,
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
        assert relative_error(np.asarray(out), np.asarray(one)) < OTHER_FORM
