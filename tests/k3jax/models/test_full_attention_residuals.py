"""The full form of Attention Residuals: every sublayer's output is a source of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import override
from k3jax.layers.attention_residuals import mix, mixing_scores
from k3jax.layers.norms import rms_norm
from k3jax.models.kimi_k3 import backbone, cache, depth, model
from k3jax.parallel import specs
from pallas_kernels.numerics import relative_error, tree_relative_error

# Sums in another order through three layers, their gradients, and decoding steps against chunks.
REORDERED, GRADIENT, OTHER_FORM = 1e-5, 1e-3, 1e-4
SHAPE = (2, 6)


@pytest.fixture(scope="module")
def full(tiny_config):
    """Three layers: six sublayers, so that sources in the middle of a layer matter."""
    return dataclasses.replace(
        tiny_config, num_layers=3, mla_layers=(1, 2), attn_res_block="full", remat=True
    )


def plain_list(cfg, params, bias, ids):
    """The last mixture with one list of sources and one Python loop, nothing shared or scanned."""
    context = backbone.Context(None, jnp.ones(ids.shape, bool), None)
    sources = [params["embedding"].at[ids].get(out_sharding=specs.ACTIVATION)]
    reads = []

    def read(site):
        reads.append(len(sources))
        scores = mixing_scores(sources, site["query"], site["key_norm"], cfg.norm_eps)
        return mix(sources, scores)

    moe = 0
    for _, kind, path, copy in depth.layer_paths(cfg):
        node = params["backbone"]
        for key in path:
            node = node[key]
        p = jax.tree.map(lambda a, n=copy: a[n], node)
        x = rms_norm(read(p["mixer_res"]), p["input_norm"], cfg.norm_eps)
        mixer = backbone.KimiDeltaAttention(cfg.kda)
        if kind.mixer == "mla":
            mixer = backbone.LatentAttention(cfg.mla)
        sources.append(mixer.apply({"params": p["mixer"]}, x, None)[0])
        x = rms_norm(read(p["ffn_res"]), p["post_norm"], cfg.norm_eps)
        if kind.ffn == "dense":
            ffn = backbone.FeedForward(cfg.dense_width, cfg.activation)
            f = ffn.apply({"params": p["ffn"]}, x)
        else:
            ffn = backbone.StableLatentMoE(cfg.moe, cfg.activation)
            f, moe = ffn.apply({"params": p["ffn"]}, x, bias[moe], context.valid)[0], moe + 1
        sources.append(f)
    assert reads == list(range(1, 2 * cfg.num_layers + 1))
    return read(params["backbone"]["output_res"])


def test_two_layers_equal_a_plain_list_of_all_sublayers(full, draw, rng):
    cfg = dataclasses.replace(full, num_layers=2, mla_layers=(1,), remat=False)
    variables = draw(cfg)
    ids = jnp.asarray(rng.integers(0, cfg.vocab_size, SHAPE), jnp.int32)
    bias = variables["router"]["backbone"]["bias"]
    mixed, hidden = jax.jit(
        lambda v: (plain_list(cfg, v["params"], bias, ids), model.forward(cfg, v, ids).hidden)
    )(variables)
    expected = rms_norm(mixed, variables["params"]["final_norm"], cfg.norm_eps)
    assert relative_error(hidden, expected) < REORDERED


@pytest.mark.slow
def test_values_and_gradients_equal_a_plain_list_of_all_sublayers(full, draw, rng):
    variables = draw(full)
    ids = jnp.asarray(rng.integers(0, full.vocab_size, SHAPE), jnp.int32)
    bias = variables["router"]["backbone"]["bias"]

    def ours(params):
        hidden = model.forward(full, {**variables, "params": params}, ids).hidden
        return jnp.sum(jnp.sin(model.project(params, full, hidden))), hidden

    def oracle(params):
        mixed = plain_list(full, params, bias, ids)
        hidden = rms_norm(mixed, params["final_norm"], full.norm_eps)
        return jnp.sum(jnp.sin(model.project(params, full, hidden))), hidden

    (_, hidden), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(variables["params"])
    (_, expected), wanted = jax.jit(jax.value_and_grad(oracle, has_aux=True))(variables["params"])
    assert relative_error(hidden, expected) < REORDERED
    assert max(tree_relative_error(gradient, wanted).values()) < GRADIENT
    sites = [
        name
        for name, leaf in tree_leaves(gradient)
        if name.endswith("query") and np.any(np.asarray(leaf))
    ]
    # All but the first read, which has a single source.
    assert len(sites) == 2 * full.num_layers


def tree_leaves(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


@pytest.mark.slow
def test_prefill_and_decoding_in_the_full_form_equal_the_whole_sequence(full, draw, rng):
    variables = draw(full)
    ids = jnp.asarray(rng.integers(0, full.vocab_size, SHAPE), jnp.int32)
    expected = jax.jit(lambda ids: model.logits(full, variables, ids))(ids)
    step = jax.jit(lambda ids, c: cache.decode_step(full, variables, ids, c))
    state = cache.init_cache(full, 2, 8)
    logits, state = jax.jit(lambda ids, c: cache.prefill(full, variables, ids, None, c))(
        ids[:, :4], state
    )
    for t in (4, 5):
        assert relative_error(logits, expected[:, t - 1]) < OTHER_FORM
        logits, state = step(ids[:, t], state)
    assert relative_error(logits, expected[:, -1]) < OTHER_FORM


def test_the_full_form_has_the_parameters_of_blocks_of_one_layer_and_is_set_by_name(full):
    blocks = dataclasses.replace(full, attn_res_block=1)
    shapes = [jax.tree.map(lambda a: a.shape, model.abstract(c)) for c in (full, blocks)]
    assert shapes[0] == shapes[1]
    assert override(blocks, ["attn_res_block=full"]) == full
    assert override(full, ["attn_res_block=none"]).attn_res_block is None
    for wrong in ("half", 0):
        with pytest.raises(ValueError, match=f"attn_res_block={wrong!r}: .*full for every"):
            dataclasses.replace(full, attn_res_block=wrong)
    paths = [path for _, _, path, _ in depth.layer_paths(full)]
    assert paths == [(f"block_{i}", "group_0", "layer_0") for i in range(3)]
