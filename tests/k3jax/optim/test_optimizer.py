"""AdamW's leaves, weight decay, clipping, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as config_lib
from k3jax.optim import optimizer
from k3jax.optim.optimizer import OptimizerConfig

CFG = OptimizerConfig(peak_lr=1e-2, schedule="constant")


def small(rng, scale=1.0):
    """One leaf of each kind."""
    shapes = {"w_down": (2, 6, 4), "embedding": (5, 4), "conv_q": (2, 3, 4, 4), "query": (2, 4)}
    shapes |= {"input_norm": (2, 4), "a_log": (2, 3), "dt_bias": (2, 3, 4), "w_q": (2, 6, 2, 3)}
    return {n: jnp.asarray(scale * rng.standard_normal(s), jnp.float32) for n, s in shapes.items()}


def step(cfg, params, *gradients):
    tx = optimizer.make_optimizer(cfg, 10)
    state, update = tx.init(params), jax.jit(tx.update)
    for grads in gradients:
        updates, state = update(grads, state, params)
    return updates


def test_the_other_leaves_follow_adamw_without_look_ahead(rng):
    params, gradients = small(rng), [small(rng) for _ in range(3)]
    cfg = dataclasses.replace(CFG, clip_norm=None, adamw_lr_multiplier=0.5)
    updates = step(cfg, params, *gradients)
    for name in ("embedding", "conv_q", "query", "input_norm", "a_log", "dt_bias"):
        m = v = 0.0
        for t, grads in enumerate(gradients, start=1):
            g = np.asarray(grads[name], np.float64)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            adam = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        decay = 0.1 if name in ("embedding", "conv_q", "query") else 0.0
        expected = -0.5e-2 * (adam + decay * np.asarray(params[name]))
        np.testing.assert_allclose(updates[name], expected, rtol=1e-4, atol=1e-7)


def test_weight_decay_reaches_exactly_the_leaves_that_are_not_masked(rng):
    params = small(rng)
    updates = step(CFG, params, jax.tree.map(jnp.zeros_like, params))
    for name, u in updates.items():
        decayed = name not in ("input_norm", "a_log", "dt_bias")
        expected = -1e-2 * 0.1 * params[name] if decayed else jnp.zeros_like(u)
        np.testing.assert_allclose(u, expected, rtol=1e-6, atol=0, err_msg=name)


def test_the_norm_is_clipped_over_both_groups_together(rng):
    names = ("w_down", "query")  # one leaf of each group
    params, first, second = (
        {n: tree[n] for n in names} for tree in (small(rng), small(rng), small(rng, scale=10.0))
    )
    norm = optimizer.global_norm(second)
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(second)])
    assert float(norm) == pytest.approx(np.linalg.norm(flat), rel=1e-6)
    first = jax.tree.map(lambda x: x / optimizer.global_norm(first), first)
    clipped = jax.tree.map(lambda x: x / norm, second)
    # Only the second step can tell: the first update of both groups forgets the scale.
    got = step(CFG, params, first, second)
    expected = step(dataclasses.replace(CFG, clip_norm=None), params, first, clipped)
    unclipped = step(dataclasses.replace(CFG, clip_norm=None), params, first, second)
    for name, u in got.items():
        np.testing.assert_allclose(u, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
        assert not np.allclose(u, unclipped[name], rtol=1e-2, atol=1e-5), name


def test_updates_are_applied_in_the_parameters_dtype(rng):
    params = {"query": jnp.ones((2, 4), jnp.bfloat16)}
    new = optimizer.apply_updates(params, {"query": jnp.full((2, 4), 0.5, jnp.float32)})
    assert new["query"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(new["query"], np.float32), 1.5)


def test_an_expert_without_gradient_is_only_decayed(rng):
    params = {"w_down": jnp.ones((1, 2, 6, 4))}
    grads = {"w_down": jnp.asarray(rng.standard_normal((1, 2, 6, 4))).at[0, 1].set(0.0)}
    updates = step(CFG, params, grads)
    np.testing.assert_allclose(updates["w_down"][0, 1], -1e-3, rtol=1e-6)


@pytest.mark.parametrize(
    "assignment, message",
    [
        ("peak_lr=0", "peak_lr=0.0: must be above 0; 0.0002 is usual"),
        ("muon_ns_steps=0", "muon_ns_steps=0: must be above 0; 5 is usual"),
        ("muon_momentum=1", r"muon_momentum=1.0: a decay rate lies in \[0, 1\); 0.95 is usual"),
        ("warmup_fraction=1.5", r"warmup_fraction=1.5: a share lies in \[0, 1\]; 0.01 is usual"),
        ("weight_decay=-0.1", "weight_decay=-0.1: must not be negative; 0 for no decay"),
        ("clip_norm=0", "clip_norm=0.0: must be above 0; none for no clipping"),
        ("schedule=line", "expected one of cosine, wsd, constant"),
        ("muon_momentum_rule=lerp", "expected one of published, ema"),
    ],
)
def test_a_value_out_of_range_is_refused(assignment, message):
    with pytest.raises(ValueError, match=message):
        config_lib.override(CFG, [assignment])
