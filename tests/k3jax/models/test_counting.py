"""Parameter counts against the traced model and the released one; FLOPs against traced products."""

import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jaxprs import runs

from configs import kimi_k3, tiny
from k3jax.layers.kda import KdaConfig
from k3jax.models.kimi_k3 import counting, model
from k3jax.models.kimi_k3.config import ModelConfig
from pallas_kernels.kda import kda

TIED = dataclasses.replace(
    tiny.MODEL,
    tie_embeddings=True,
    attn_res_block=None,
    dense_layers=0,
    kda=dataclasses.replace(tiny.MODEL.kda, output_gate_rank=8),
    mla=dataclasses.replace(tiny.MODEL.mla, q_lora_rank=None, output_gate=False),
    moe=dataclasses.replace(tiny.MODEL.moe, latent_dim=None, latent_norm=False),
)
FULL = dataclasses.replace(tiny.MODEL, attn_res_block="full")
TWO_AHEAD = dataclasses.replace(tiny.MODEL, mtp_layers=1)
ALL_KDA = dataclasses.replace(tiny.MODEL, mla_layers=(), dense_layers=5)


def test_the_released_model_counts_as_its_files_do():
    found, pad = counting.parts(kimi_k3.MODEL), counting.released_padding(kimi_k3.MODEL)
    assert {name: (part.size, part.copies) for name, part in found.items()} == {
        "embedding": (1_174_405_120, 1),
        "KDA mixer": (443_740_384, 69),
        "MLA mixer": (232_196_096, 24),
        "dense feed-forward": (726_663_168, 1),
        "MoE, not routed": (189_927_808, 92),
        "routed expert": (33_030_144, 92 * 896),
        "norms, reads over depth": (4_021_248, 1),
        "head": (1_174_405_120, 1),
    }
    assert found["routed expert"].total == 2_722_740_830_208
    assert counting.total(kimi_k3.MODEL) == 2_779_484_476_000
    assert pad == 2_208 and counting.total(kimi_k3.MODEL) + pad == 2_779_484_478_208
    assert counting.active(kimi_k3.MODEL) + pad == 104_189_614_848
    assert counting.active(kimi_k3.MODEL, with_embedding=True) + pad == 105_364_019_968


def part_of(path: str) -> str:
    """The part that a leaf of the variables belongs to, by its path alone."""
    name = path.rsplit("/", 1)[-1]
    if path.startswith("params/mtp/"):
        return "multi-token layer"
    if name in ("embedding", "lm_head"):
        return "embedding" if name == "embedding" else "head"
    if "/experts/" in path:
        return "routed expert"
    if "/ffn/" in path or path.startswith("router/"):
        return "feed-forward"
    return "mixer" if "/mixer/" in path else "norms, reads over depth"


@pytest.mark.parametrize(
    "cfg", [tiny.MODEL, TIED, ALL_KDA, FULL], ids=["tiny", "tied", "all KDA", "full"]
)
def test_every_part_has_as_many_parameters_as_its_leaves(cfg):
    shapes = jax.eval_shape(lambda: model.init(cfg, jax.random.key(0)))
    leaves = collections.Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        leaves[part_of(jax.tree_util.keystr(path, simple=True, separator="/"))] += leaf.size
    counted = collections.Counter()
    merged = {"KDA mixer": "mixer", "MLA mixer": "mixer"}
    merged |= {"dense feed-forward": "feed-forward", "MoE, not routed": "feed-forward"}
    for name, part in counting.parts(cfg).items():
        counted[merged.get(name, name)] += part.total
    if cfg.tie_embeddings:
        leaves["head"] = leaves.pop("embedding")
    leaves = collections.Counter({k: v for k, v in leaves.items() if v})
    assert counted == leaves
    assert counting.total(cfg) == sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_the_multi_token_layer_has_its_own_leaves_and_a_row_of_the_balancing_bias():
    shapes = jax.eval_shape(lambda: model.init(TWO_AHEAD, jax.random.key(0)))
    part = counting.parts(TWO_AHEAD)["multi-token layer"]
    leaves = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]["mtp"]))
    assert part.total == leaves + TWO_AHEAD.moe.experts
    assert counting.total(TWO_AHEAD) == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert counting.active(TWO_AHEAD) == counting.active(tiny.MODEL)


def test_a_tied_table_is_active_once_and_an_untied_one_as_the_head_only():
    table = tiny.MODEL.vocab_size * tiny.MODEL.hidden_size
    assert counting.active(TIED) == counting.active(TIED, with_embedding=True)
    both = counting.active(tiny.MODEL, with_embedding=True)
    assert both - counting.active(tiny.MODEL) == table


def product_flops(f, *arguments) -> float:
    """2 m n k of every product in the trace of f."""
    total = 0
    for equation, times in runs(jax.make_jaxpr(f)(*arguments).jaxpr):
        if equation.primitive.name == "dot_general":
            left, out = equation.invars[0].aval, equation.outvars[0].aval
            contracted = equation.params["dimension_numbers"][0][0]
            total += 2 * times * out.size * math.prod(left.shape[axis] for axis in contracted)
    return total


def delta_rule_products(cfg: KdaConfig, T: int) -> float:
    """Of one layer, on one row of T tokens."""
    like = lambda *shape: jax.ShapeDtypeStruct((1, T, cfg.heads, *shape), jnp.float32)  # noqa: E731
    arguments = (like(cfg.key_dim), like(cfg.key_dim), like(cfg.value_dim), like(cfg.key_dim))
    gate = jnp.zeros(cfg.heads), jnp.zeros((cfg.heads, cfg.key_dim))

    def run(q, k, v, g, beta):
        options = dict(a_log=gate[0], dt_bias=gate[1], lower_bound=cfg.gate_lower_bound)
        return kda(q, k, v, g, beta, chunk_size=cfg.chunk_size, **options)[0]

    return product_flops(run, *arguments, like())


@pytest.mark.parametrize("cfg", [tiny.MODEL, TIED, FULL], ids=["tiny", "tied", "full"])
def test_forward_flops_are_those_of_every_product_in_the_trace(cfg):
    T = 96
    mla = dataclasses.replace(cfg.mla, implementation="reference")  # all pairs in one product
    moe = dataclasses.replace(cfg.moe, implementation="reference")  # every expert, every token
    cfg = dataclasses.replace(cfg, mla=mla, moe=moe, remat=False)

    def run(variables, ids):
        return model.logits(cfg, variables, ids)

    variables = jax.eval_shape(lambda: model.init(cfg, jax.random.key(0)))
    traced = product_flops(run, variables, jax.ShapeDtypeStruct((1, T), jnp.int32))
    flops = counting.forward_flops(cfg, T)
    flops["attention"] *= 2 * T / (T + 1)
    flops["routed expert"] *= cfg.moe.experts / cfg.moe.top_k
    if "mixtures over depth" in flops:
        flops["mixtures over depth"] /= 2  # scores are products, the mixture is a sum
    del flops["delta rule"]
    layers = counting.parts(cfg)["KDA mixer"].copies
    assert traced - layers * delta_rule_products(cfg.kda, T) == T * sum(flops.values())


def test_two_ahead_costs_the_products_that_its_layer_and_the_second_head_add():
    T, moe = 96, dataclasses.replace(tiny.MODEL.moe, implementation="reference")
    mla = dataclasses.replace(tiny.MODEL.mla, implementation="reference")
    both = [
        dataclasses.replace(tiny.MODEL, mla=mla, moe=moe, mtp_layers=n, remat=False) for n in (0, 1)
    ]

    def traced(cfg):
        def run(variables, ids):
            out = model.forward(cfg, variables, ids, train=True)
            hidden = [h for h in (out.hidden, out.mtp_hidden) if h is not None]
            return [model.project(variables["params"], cfg, h) for h in hidden]

        variables = jax.eval_shape(lambda: model.init(cfg, jax.random.key(0)))
        return product_flops(run, variables, jax.ShapeDtypeStruct((1, T), jnp.int32))

    plain, ahead = map(traced, both)
    cfg = both[1]
    pairs, each = 2 * T / (T + 1), 3 * cfg.moe.latent_dim * cfg.moe.expert_width
    attention = cfg.mla.heads * 2 * (cfg.mla.query_dim + cfg.mla.value_dim) * (T + 1) / 2
    expected = counting.multi_token_flops(cfg, T) + (pairs - 1) * attention
    expected += 2 * (cfg.moe.experts - cfg.moe.top_k) * each
    assert ahead - plain == T * expected
    assert counting.flops_per_token(cfg, T) > counting.flops_per_token(both[0], T)


def test_the_chunked_delta_rule_does_the_counted_products_and_at_most_a_quarter_more():
    T = 4 * counting.KDA_CHUNK
    cfg = dataclasses.replace(kimi_k3.MODEL.kda, heads=1, chunk_size=counting.KDA_CHUNK)
    one = dataclasses.replace(kimi_k3.MODEL, kda=cfg)
    counted = counting.forward_flops(one, T)["delta rule"] / 69
    counted -= 2 * cfg.conv_width * 3 * 128  # taps are no products
    assert 1 <= delta_rule_products(cfg, T) / (T * counted) <= 1.25


def test_attention_alone_grows_with_the_row_and_training_is_three_forward_passes():
    short, long = (counting.forward_flops(kimi_k3.MODEL, T) for T in (1023, 8191))
    assert long.pop("attention") == 8 * short.pop("attention")
    assert long == short
    total = sum(counting.forward_flops(kimi_k3.MODEL, 8191).values())
    assert counting.flops_per_token(kimi_k3.MODEL, 8191) == 3 * total


def reads_by_placing_rows(cfg: ModelConfig) -> int:
    """Counts sources along the backbone's own loop over blocks and layers."""
    reads, rows = 0, 0
    for layer in range(cfg.num_layers):
        rows += layer % cfg.attn_res_block == 0
        reads += 2 * (rows + 1)
    return reads + rows + 1


@pytest.mark.parametrize("cfg", [tiny.MODEL, kimi_k3.MODEL], ids=["tiny", "K3"])
def test_depth_reads_follow_the_bank_of_frozen_rows(cfg):
    assert counting.depth_reads(cfg) == reads_by_placing_rows(cfg)
