"""Muon's update against a float64 oracle, block by block.

Tolerance: five Newton-Schulz steps in float32 from a Frobenius-normalised block agree with float64
to about 1e-5 (the slope at zero, 3.4445^5 = 485, times the rounding of the smallest directions).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.optim import muon, optimizer
from k3jax.optim.optimizer import OptimizerConfig

LR, DECAY = 1e-2, 0.1
CFG = OptimizerConfig(peak_lr=LR, schedule="constant", weight_decay=DECAY, clip_norm=None)
TOLERANCE = 1e-4


@functools.cache
def update(cfg=CFG):
    """One compiled update a configuration; its warm-up is one step long."""
    return jax.jit(optimizer.make_optimizer(cfg, 10).update)


def run(params, gradients, cfg=CFG):
    """Updates of the last of several steps, the parameters held fixed."""
    state = optimizer.make_optimizer(cfg, 10).init(params)
    for grads in gradients:
        updates, state = update(cfg)(grads, state, params)
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


def published(gradients, mu, nesterov):
    """M <- mu M + G, then N = G + mu M or M: the released recipe, in float64."""
    momentum = 0.0
    for g in gradients:
        momentum = mu * momentum + g.astype(np.float64)
    return gradients[-1] + mu * momentum if nesterov else momentum


def ema(gradients, mu, nesterov):
    """Average with optax's two bias corrections, in float64."""
    momentum, t = 0.0, len(gradients)
    for g in gradients:
        momentum = mu * momentum + (1 - mu) * g.astype(np.float64)
    if not nesterov:
        return momentum / (1 - mu**t)
    return mu * momentum / (1 - mu ** (t + 1)) + (1 - mu) * gradients[-1] / (1 - mu**t)


@pytest.mark.parametrize(
    "oracle, nesterov",
    [(published, True), (ema, True), pytest.param(published, False, marks=pytest.mark.slow)],
)
def test_five_steps_equal_the_stated_rule_for_every_block_of_every_leaf(
    draw_params, newton_schulz, oracle, nesterov
):
    cfg = dataclasses.replace(CFG, muon_momentum_rule=oracle.__name__, nesterov=nesterov)
    params, gradients = draw_params(), [draw_params() for _ in range(5)]
    updates = run(params, gradients, cfg)
    streams = zip(*map(muon_leaves, (params, updates, *gradients)), strict=True)
    for (path, w, rule), (_, u, _), *history in streams:
        ahead = oracle([g for _, g, _ in history], 0.95, nesterov)
        for at, block in as_blocks(ahead, rule):
            size = 0.2 * np.sqrt(max(block.shape))
            expected = -LR * (size * newton_schulz(block) + DECAY * w[at].reshape(block.shape))
            got = u[at].reshape(block.shape)
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert error < TOLERANCE, (path, at, error)


def test_the_published_rule_is_the_default_and_differs_from_the_average_until_it_is_old(rng):
    assert CFG.muon_momentum_rule == "published"
    gradients = list(rng.standard_normal((60, 4, 6)))

    def distance(t):
        a, b = (f(gradients[:t], 0.95, True) for f in (published, ema))
        return np.linalg.norm(a / np.linalg.norm(a) - b / np.linalg.norm(b))

    assert distance(1) < 1e-12
    # So the two oracles above cannot both pass by being one.
    assert min(distance(t) for t in (2, 3, 4, 5)) > 0.02
    assert distance(60) < 2e-3


def test_a_momentum_rule_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="muon_momentum_rule='lerp': choose from published, ema"):
        dataclasses.replace(CFG, muon_momentum_rule="lerp")


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


def head_rms(update, heads_axis=-2):
    """Root mean square of each head's part of an update."""
    others = tuple(a for a in range(update.ndim) if a != update.ndim + heads_axis)
    return np.sqrt(np.mean(np.square(update), axis=others))


def test_heads_of_any_scale_get_updates_of_one_size_only_when_each_is_its_own_block(rng):
    """§2.5: as one matrix, the large heads take the update and the small ones starve."""
    scales = np.geomspace(0.03, 31, 8)[:, None]
    grads = {
        name: jnp.asarray(rng.standard_normal((1, 64, 8, 16)) * scales, jnp.float32)
        for name in ("w_q", "w_k", "w_v", "w_q_b", "w_k_b", "w_v_b")
    }
    zero = jax.tree.map(jnp.zeros_like, grads)
    full = dataclasses.replace(CFG, per_head=False)
    for cfg, holds in ((CFG, lambda s: s < 1.2), (full, lambda s: s > 5)):
        for name, u in run(zero, [grads], cfg).items():
            rms = head_rms(np.asarray(u))
            assert holds(rms.max() / rms.min()), (name, rms)


def test_full_matrix_muon_changes_the_blocks_of_q_k_and_v_and_nothing_else(abstract_params):
    full = dataclasses.replace(CFG, per_head=False)
    before, after = (optimizer.describe(abstract_params, c) for c in (CFG, full))
    moved = [(b, a) for b, a in zip(before, after, strict=True) if b != a]
    names = {b.path.rsplit("/", 1)[-1] for b, _ in moved}
    assert names == {"w_q", "w_k", "w_v", "w_q_b", "w_k_b", "w_v_b"}
    for b, a in moved:
        (heads, rows, columns), (copies, m, n) = b.blocks, a.blocks
        assert (copies, m, n) == (b.shape[0], rows, columns * heads // b.shape[0])
        assert a.group == b.group and a.decay == b.decay
