"""The router bias has one sign everywhere: training, evaluation, prefill and decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import MODEL

from k3jax.models.kimi_k3 import cache as decoding
from k3jax.models.kimi_k3 import model
from k3jax.optim import quantile_balancing
from k3jax.train.metrics import dead_warning

# One expert per token: with +10 on expert 0 nothing but expert 0 may matter.
ONE = dataclasses.replace(MODEL, moe=dataclasses.replace(MODEL.moe, top_k=1))


draw = jax.jit(lambda: model.init(ONE, jax.random.key(0)))


@jax.jit
def outputs(variables, tokens):
    """Hidden or logits of the four ways to run the model."""
    trained = model.forward(ONE, variables, tokens, train=True)
    evaluated = model.forward(ONE, variables, tokens)
    cache = decoding.init_cache(ONE, 2, 16)
    first, cache = decoding.prefill(ONE, variables, tokens[:, :-1], None, cache)
    second, _ = decoding.decode_step(ONE, variables, tokens[:, -1], cache)
    return (trained.hidden, evaluated.hidden, first, second), trained.stats.load


def without_expert_weights(variables, kept):
    """The same model with zeros in every expert but `kept`."""

    def mask(path, leaf):
        if not any(getattr(k, "key", None) == "experts" for k in path):
            return leaf
        only = (jnp.arange(ONE.moe.experts) == kept).reshape(1, -1, *(1,) * (leaf.ndim - 2))
        return jnp.where(only, leaf, 0.0)

    return {**variables, "params": jax.tree_util.tree_map_with_path(mask, variables["params"])}


@pytest.mark.parametrize("bias, chosen", [(10.0, True), (-10.0, False)])
def test_a_bias_of_ten_decides_alike_in_training_evaluation_and_generation(bias, chosen):
    variables = draw()
    shape = variables["router"]["backbone"]["bias"].shape
    variables["router"] = {"backbone": {"bias": jnp.zeros(shape).at[:, 0].set(bias)}}
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    with_all, load = outputs(variables, tokens)
    assert np.all(load[:, 0] == (24 if chosen else 0))
    with_first, _ = outputs(without_expert_weights(variables, kept=0), tokens)
    for a, b in zip(with_all, with_first, strict=True):
        # Chosen everywhere: the other experts do not exist. Nowhere: expert 0 alone is nothing.
        assert np.allclose(a, b, atol=1e-6) == chosen


def test_a_router_of_zeros_sends_every_token_to_expert_0_and_the_log_says_so():
    # Ties go to the lower id: a zero gate is no balanced gate, and no bias can make it one.
    variables = draw()
    zero = jax.tree_util.tree_map_with_path(
        lambda path, leaf: 0 * leaf if path[-1].key == "w_router" else leaf, variables["params"]
    )
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 256)
    _, load = outputs({**variables, "params": zero}, tokens)
    assert load[0].tolist() == [24, 0, 0, 0, 0, 0, 0, 0]
    text = dead_warning(
        quantile_balancing.dead_experts(load).tolist(),
        quantile_balancing.max_violation(load).tolist(),
        ONE.moe.experts,
    )
    assert text == "MoE layer 0: 87.5% of 8 experts got no token, max/mean load 8.0"
