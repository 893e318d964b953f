"""Depth mixtures: golden numbers, invariants, and the block schedule against a plain loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.attention_residuals import DepthMixture, mix, mixing_scores
from k3jax.layers.norms import rms_norm
from k3jax.models.kimi_k3 import backbone, depth
from k3jax.models.kimi_k3.model import KimiK3
from k3jax.parallel import specs
from pallas_kernels.numerics import det, relative_error

EPS = 1e-5


def golden_sources() -> list[jax.Array]:
    rows = det((3, 4), 0.8, 0.3) * np.array([1.0, 5.0, 0.2])[:, None]
    return [jnp.asarray(row, jnp.float32)[None, None] for row in rows]


def test_scores_and_mixture_equal_the_golden_numbers():
    query = jnp.array([0.5, -0.25, 1.0, 0.1])
    key_norm = jnp.array([1.0, 0.9, 1.1, 1.2])
    scores = mixing_scores(golden_sources(), query, key_norm, EPS)
    expected = [1.485025329, -1.475275598, 1.459899007]
    np.testing.assert_allclose(np.ravel(jnp.stack(scores)), expected, atol=1e-6)
    h = mix(golden_sources(), scores)[0, 0]
    expected = [0.139922922, 0.412853617, 0.435352848, 0.193772883]
    np.testing.assert_allclose(h, expected, atol=1e-6)


def test_zero_pseudo_queries_give_the_plain_mean_of_the_sources(rng):
    sources = [jnp.asarray(rng.normal(size=(2, 3, 8)), jnp.float32) for _ in range(4)]
    scores = mixing_scores(sources, jnp.zeros(8), jnp.ones(8), EPS)
    np.testing.assert_allclose(mix(sources, scores), np.mean(sources, axis=0), atol=1e-6)


def test_scores_ignore_the_scale_of_a_source_but_the_mixture_does_not(rng):
    v = jnp.asarray(rng.normal(size=(1, 5, 16)), jnp.float32)
    query, key_norm = jnp.asarray(rng.normal(size=(2, 16)), jnp.float32)
    one, hundred = mixing_scores([v, 100.0 * v], query, key_norm, EPS)
    # eps = 1e-5 against a mean square of about 1: equal to about 1e-5.
    np.testing.assert_allclose(one, hundred, rtol=1e-4, atol=1e-5)
    assert relative_error(mix([v, 100.0 * v], [one, hundred]), v) > 10


def test_an_empty_prefix_has_no_weight_whatever_it_holds(rng):
    bank = [jnp.asarray(rng.normal(size=(1, 2, 8)), jnp.float32) for _ in range(2)]
    site = DepthMixture(EPS)
    params = {"params": {"query": jnp.ones(8), "key_norm": jnp.ones(8)}}
    alone = mix(bank, mixing_scores(bank, jnp.ones(8), jnp.ones(8), EPS))
    for filler in (0.0, 1e3):
        out = site.apply(params, bank, jnp.full((1, 2, 8), filler), True)
        np.testing.assert_allclose(out, alone, rtol=1e-6)
    gradient = jax.grad(lambda p: jnp.sum(site.apply(params, bank, p, True)))(bank[0])
    assert not np.any(np.asarray(gradient))


def plain_stack(cfg, variables, x):
    """Spec-shaped oracle: one Python loop over layers, a list as bank, `None` as empty prefix."""
    params, reads, seals = variables["params"]["backbone"], 0, 0

    def read(at, sources):
        site = at["query"], at["key_norm"]
        return mix(sources, mixing_scores(sources, *site, cfg.norm_eps))

    bank, prefix, moe = [], x, 0
    context = backbone.Context(None, jnp.ones(x.shape[:2], bool), None)
    for layer, kind, path, copy in depth.layer_paths(cfg):
        node = params
        for key in path:
            node = node[key]
        p = jax.tree.map(lambda a, n=copy: a[n], node)
        a = prefix if not bank else read(p["mixer_res"], [*bank, prefix])
        reads += bool(bank)
        if layer % cfg.attn_res_block == 0:
            bank, prefix, seals = [*bank, prefix], None, seals + 1
        mixer = backbone.KimiDeltaAttention(cfg.kda)
        if kind.mixer == "mla":
            mixer = backbone.LatentAttention(cfg.mla)
        normed = rms_norm(a, p["input_norm"], cfg.norm_eps)
        u = mixer.apply({"params": p["mixer"]}, normed, None)[0]
        prefix = u if prefix is None else prefix + u
        m = read(p["ffn_res"], [*bank, prefix])
        reads += 1
        h = rms_norm(m, p["post_norm"], cfg.norm_eps)
        prefix = prefix + feed_forward(cfg, kind, p["ffn"], variables, moe, h, context)
        moe += kind.ffn == "moe"
    return read(params["output_res"], [*bank, prefix]), reads, seals


def feed_forward(cfg, kind, p, variables, moe, h, context):
    if kind.ffn == "dense":
        ffn = backbone.FeedForward(cfg.dense_width, cfg.activation, cfg.init_std)
        return ffn.apply({"params": p}, h)
    bias = variables["router"]["backbone"]["bias"][moe]
    layer = backbone.StableLatentMoE(cfg.moe, cfg.activation, cfg.init_std)
    return layer.apply({"params": p}, h, bias, context.valid)[0]


@pytest.mark.parametrize(
    "layers,block",
    [(5, 2), *[pytest.param(*p, marks=pytest.mark.slow) for p in [(9, 4), (13, 6), (25, 12)]]],
)
def test_blocks_equal_a_plain_loop_over_layers(tiny_config, draw, layers, block):
    # Two complete blocks and a third one open: errors of the schedule only show from there on.
    cfg = dataclasses.replace(
        tiny_config, num_layers=layers, attn_res_block=block,
        mla_layers=tuple(i for i in range(layers) if i % 4 == 3 or i == layers - 1),
    )  # fmt: skip
    variables = draw(cfg)
    ids = jnp.arange(10, dtype=jnp.int32)[None]
    net = KimiK3(cfg)
    _, sown = jax.jit(lambda v: net.apply(v, ids, mutable=["intermediates"]))(variables)
    x = variables["params"]["embedding"].at[ids].get(out_sharding=specs.ACTIVATION)
    counts = []

    def oracle(variables, x):
        mixed, *seen = plain_stack(cfg, variables, x)
        counts.append(tuple(seen))
        return mixed

    expected = jax.jit(oracle)(variables, x)
    assert counts[0] == (2 * layers - 1, -(-layers // block))
    # Two read sites a layer; layer 0's first one has a single source, so its value is that source.
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"]["backbone"])
    sites = {"mixer_res": 0, "ffn_res": 0, "output_res": 0}
    for path, leaf in leaves:
        if path[-1].key == "query":
            sites[path[-2].key] += len(leaf) if leaf.ndim > 1 else 1  # scanned copies
    assert sites == {"mixer_res": layers, "ffn_res": layers, "output_res": 1}
    assert relative_error(sown["intermediates"]["output_mix"][0], expected) < 1e-5


def test_93_layers_are_8_blocks_of_whole_groups(tiny_config):
    mla = tuple([*range(3, 92, 4), 92])
    cfg = dataclasses.replace(tiny_config, num_layers=93, attn_res_block=12, mla_layers=mla)
    layout = depth.blocks(cfg)
    assert len(layout) == 8
    kinds = [kind for _, kind, _, _ in depth.layer_paths(cfg)]
    assert len(kinds) == 93 and sum(k.mixer == "kda" for k in kinds) == 69
    assert [[(len(g.kinds), g.repeats) for g in block] for block in layout] == [
        [(4, 1), (4, 2)], *[[(4, 3)]] * 6, [(4, 2), (1, 1)],
    ]  # fmt: skip
