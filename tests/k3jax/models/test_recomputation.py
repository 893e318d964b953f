"""Recomputing layers saves memory and changes no bit of the loss (`model.remat`)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import MODEL

from k3jax.models.kimi_k3 import model
from k3jax.models.kimi_k3.loss import forward_sums

ROWS, LENGTH = 2, 128


def compiled(cfg):
    """The compiled gradient of the loss: (params, router, batch) -> (loss, gradient)."""

    def run(params, router, batch):
        return jax.value_and_grad(lambda p: forward_sums(cfg, p, router, batch, train=True).nll)(
            params
        )

    variables = model.abstract(cfg)
    shape = (ROWS, LENGTH)
    batch = {
        n: jax.ShapeDtypeStruct(shape, jnp.int32) for n in ("tokens", "targets", "segment_ids")
    }
    batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.jit(run).lower(variables["params"], variables["router"], batch).compile()


def both(cfg):
    """(without, with) recomputation, compiled."""
    return [compiled(dataclasses.replace(cfg, remat=remat)) for remat in (False, True)]


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


def check_same_loss(cfg, programs):
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, cfg.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    ones = np.ones_like(tokens)
    batch = dict(tokens=tokens, targets=np.roll(tokens, -1), segment_ids=ones)
    batch["weights"] = ones.astype(np.float32)
    variables = jax.jit(lambda: model.init(cfg, jax.random.key(0)))()
    losses = [p(variables["params"], variables["router"], batch)[0] for p in programs]
    assert np.isfinite(losses[0]) and losses[0] == losses[1]


def test_two_layers_without_a_loop_need_less_memory_and_give_the_same_loss():
    cfg = dataclasses.replace(
        MODEL, num_layers=2, mla_layers=(0, 1), attn_res_block=None, unroll_layers=True
    )
    programs = both(cfg)
    assert temporary(programs[1]) < 0.8 * temporary(programs[0])
    check_same_loss(cfg, programs)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, True], ids=["scanned", "laid out"])
def test_twelve_layers_need_at_least_thirty_percent_less(unroll):
    cfg = dataclasses.replace(
        MODEL, num_layers=12, mla_layers=(3, 7, 11), attn_res_block=12, unroll_layers=unroll
    )
    programs = both(cfg)
    assert temporary(programs[1]) <= 0.7 * temporary(programs[0])
    check_same_loss(cfg, programs)
