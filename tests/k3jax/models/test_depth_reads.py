"""How often the traced program reads over depth, from how many sources, and freezes a row."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jaxprs import runs

from k3jax.models.kimi_k3 import depth, model


def depth_reads(jaxpr) -> collections.Counter:
    """Sources -> reads of that many: the maxima of softmaxes inside read sites, scans unrolled."""
    counts = collections.Counter()
    for equation, times in runs(jaxpr):
        inside = any(site in str(equation.source_info.name_stack) for site in SITES)
        if inside and equation.primitive.name == "reduce_max":
            counts[equation.invars[0].aval.shape[0]] += times
    return counts


SITES = ("mixer_res", "ffn_res", "output_res")


@pytest.mark.parametrize("every", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layers, block", [(9, 4), (13, 6), (25, 12), (93, 12)])
def test_each_sublayer_reads_the_frozen_rows_and_the_open_one(tiny_config, layers, block, every):
    # Every fourth layer of latent attention is the released pattern, every layer the quick one.
    cfg = dataclasses.replace(
        tiny_config, num_layers=layers, attn_res_block=block,
        mla_layers=tuple(i for i in range(layers) if (i + 1) % every == 0 or i == layers - 1),
    )  # fmt: skip
    ids = jnp.zeros((1, 4), jnp.int32)
    variables = model.abstract(cfg)
    traced = jax.jit(lambda v: model.forward(cfg, v, ids).hidden).trace(variables)
    # Layer l stands in block l // block, so l // block + 1 rows are frozen; the open sum is one
    # more source (shut in a block's first read). The last read has the same as its layer.
    expected = collections.Counter()
    for layer in range(layers):
        expected[layer // block + 2] += 2
    expected[(layers - 1) // block + 2] += 1
    reads = depth_reads(traced.jaxpr)
    assert reads == expected
    # 93 layers: 186 reads of sublayers and the model's own, from 8 frozen rows at the end.
    assert sum(reads.values()) == 2 * layers + 1
    assert max(reads) - 1 == len(depth.blocks(cfg)) == -(-layers // block)
