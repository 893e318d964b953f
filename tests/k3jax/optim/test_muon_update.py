"""Muon's update against a float64 oracle, block by block.

Tolerance: five Newton-Schulz steps in float32 from a Frobenius-normalised block agree with float64
to about 1e-5 (the slope at zero, 3.4445^5 = 485, times the rounding of the smallest directions).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3jax.optim import muon, optimizer
from k3jax.optim.optimizer import OptimizerConfig

LR, DECAY = 1e-2, 0.1
CFG = OptimizerConfig(peak_lr=LR, schedule="constant", weight_decay=DECAY, clip_norm=None)
TOLERANCE = 1e-4


@functools.cache
def update():
    """One compiled update for all tests of this file; optax's own warm-up is one step long."""
    return jax.jit(optimizer.make_optimizer(CFG, 10).update)


def run(params, gradients):
    """Updates of the last of several steps, the parameters held fixed."""
    state = optimizer.make_optimizer(CFG, 10).init(params)
    for grads in gradients:
        updates, state = update()(grads, state, params)
    return updates


def as_blocks(x, rule):
    """Oracle's own view of a leaf: list of (index, block [rows, columns])."""
    shape = x.shape
    reduction, output = muon.matrix_axes(rule, x.ndim)
    counting = [a for a in range(x.ndim) if a not in reduction + output]
    for index in np.ndindex(*(shape[a] for a in counting)):
        at = [slice(None)] * x.ndim
        for axis, i in zip(counting, index, strict=True):
            at[axis] = i
        block = x[tuple(at)]
        rows = int(np.prod([shape[a] for a in reduction]))
        yield tuple(at), block.reshape(rows, -1)


def muon_leaves(tree):
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        rule = muon.rule_of(CFG.rules, path, x)
        if rule.group == "muon":
            yield muon.path_text(path), np.asarray(x), rule


def test_three_steps_equal_the_documented_rule_for_every_block_of_every_leaf(
    draw_params, newton_schulz
):
    params, gradients = draw_params(), [draw_params() for _ in range(3)]
    updates = run(params, gradients)
    streams = zip(*map(muon_leaves, (params, updates, *gradients)), strict=True)
    for (path, w, rule), (_, u, _), *history in streams:
        momentum = 0.0
        for t, (_, g, _) in enumerate(history, start=1):
            momentum = 0.95 * momentum + 0.05 * g.astype(np.float64)
            ahead = 0.95 * momentum / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
        for at, block in as_blocks(ahead, rule):
            size = 0.2 * np.sqrt(max(block.shape))
            expected = -LR * (size * newton_schulz(block) + DECAY * w[at].reshape(block.shape))
            got = u[at].reshape(block.shape)
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert error < TOLERANCE, (path, at, error)


def test_the_momentum_has_the_published_direction_at_step_one_and_in_the_long_run(rng):
    gradients = rng.standard_normal((60, 4, 6))
    # Coefficients of the identity: what comes out is the normalised momentum.
    ours = optax.contrib.scale_by_muon(ns_coeffs=(1.0, 0.0, 0.0))
    state, momentum, update = ours.init(jnp.zeros((4, 6))), np.zeros((4, 6)), jax.jit(ours.update)
    cosines = []
    for g in gradients:
        got, state = update(jnp.asarray(g, jnp.float32), state)
        momentum = 0.95 * momentum + g
        published = g + 0.95 * momentum
        cosines.append(np.sum(np.asarray(got) * published) / np.linalg.norm(published))
    assert cosines[0] == pytest.approx(1, abs=1e-6)
    assert cosines[-1] == pytest.approx(1, abs=1e-5)
    # In between the current gradient weighs more; step 2 is the furthest from the recipe.
    assert min(cosines) > 0.98


def test_each_block_alone_gets_the_same_update_as_inside_its_leaf(draw_params):
    """Scanned layers, experts, heads, gate and up are orthogonalised apart.

    google-deepmind/optax#1271 reshaped leaves of four axes wrongly, AI-Hypercomputer/maxtext#2546
    took the wrong axes of scanned layers and of stacked experts.
    """
    params, grads = draw_params(), draw_params()
    zero = jax.tree.map(jnp.zeros_like, params)
    together = dict((p, u) for p, u, _ in muon_leaves(run(zero, [grads])))
    rng = np.random.default_rng(1)

    def disturb(path, x):
        """Redraws every block but the first at another scale."""
        rule = muon.rule_of(CFG.rules, path, x)
        other = np.array(rng.standard_normal(x.shape), np.float32) * 30
        if rule.group == "muon":
            first, _ = next(as_blocks(other, rule))
            other[first] = np.asarray(x)[first]
        return jnp.asarray(other)

    apart = run(zero, [jax.tree_util.tree_map_with_path(disturb, grads)])
    for path, u, rule in muon_leaves(apart):
        first, block = next(as_blocks(u, rule))
        same = np.abs(u[first] - together[path][first]).max()
        # Batched products of equal blocks may be tiled differently; the last bits only.
        assert same <= 1e-6 * np.abs(block).max(), (path, same)
        if u.size > block.size:
            assert not np.allclose(u, together[path], rtol=1e-2), path


def test_a_scanned_leaf_equals_its_layers_one_by_one(rng):
    def draw():
        shapes = {"w_q": (2, 16, 3, 5), "w_gate_up": (2, 4, 10, 2, 11), "query": (2, 16)}
        return {n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, s in shapes.items()}

    params, grads, tx = draw(), draw(), optimizer.make_optimizer(CFG, 10)
    update = jax.jit(tx.update)
    scanned, _ = update(grads, tx.init(params), params)
    for i in range(2):
        p, g = (jax.tree.map(lambda x, i=i: x[i : i + 1], t) for t in (params, grads))
        alone, _ = update(g, tx.init(p), p)
        for name, u in alone.items():
            np.testing.assert_allclose(scanned[name][i], u[0], rtol=1e-5, atol=1e-7)


def test_the_update_of_every_block_has_rms_near_a_fifth_of_the_learning_rate(rng):
    """Random blocks, unequal head scales; singular values 0.69 to 1.09 give 0.172 to 0.2."""
    shapes = {"w_q": (2, 64, 4, 16), "w_o": (2, 4, 16, 96), "w_gate_up": (2, 3, 48, 2, 32)}
    scales = {"w_q": np.array([0.03, 1, 8, 31])[:, None], "w_o": 1.0, "w_gate_up": 100.0}
    grads = {
        n: jnp.asarray(rng.standard_normal(s) * scales[n], jnp.float32) for n, s in shapes.items()
    }
    zero = jax.tree.map(jnp.zeros_like, grads)
    tx = optimizer.make_optimizer(CFG, 10)
    updates, _ = jax.jit(tx.update)(grads, tx.init(zero), zero)
    for _, u, rule in muon_leaves(updates):
        for _, block in as_blocks(u, rule):
            assert 0.15 * LR < np.sqrt(np.mean(block**2)) < 0.22 * LR
