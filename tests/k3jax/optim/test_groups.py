"""Stacks of equal blocks: what is joined, and that splitting gives the leaves back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.optim import groups, muon, optimizer
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.parallel.mesh import AXES

CFG = OptimizerConfig(peak_lr=1e-2, schedule="constant")
SHAPES = {
    "w_q": (2, 8, 3, 6),  # six blocks [8, 6]
    "w_down": (2, 6, 8),  # two blocks [6, 8], the transposed shape
    "w_gate_up": (2, 5, 2, 7),  # four blocks [5, 7]
    "w_o": (1, 2, 3, 8),  # one block [2 * 3, 8]
}


def axes_of(path, x):
    return muon.matrix_axes(muon.rule_of(CFG.rules, path, x), x.ndim)


@pytest.fixture
def tree(rng):
    return {n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, s in SHAPES.items()}


def test_equal_blocks_and_their_transposes_share_a_stack(tree):
    stacks = groups.join(tree, axes_of)
    assert {key: x.shape for key, x in stacks.items()} == {"6x8": (9, 6, 8), "5x7": (4, 5, 7)}
    # Leaves in the tree's order: w_down as it is, then w_o, then the heads of w_q transposed.
    np.testing.assert_array_equal(stacks["6x8"][1], tree["w_down"][1])
    np.testing.assert_array_equal(stacks["6x8"][2], tree["w_o"][0].reshape(6, 8))
    np.testing.assert_array_equal(stacks["6x8"][4], tree["w_q"][0, :, 1].T)
    np.testing.assert_array_equal(stacks["5x7"][3], tree["w_gate_up"][1, :, 1])


def test_split_gives_back_every_leaf_bit_for_bit_in_its_own_dtype(tree):
    tree["w_down"] = tree["w_down"].astype(jnp.bfloat16)
    back = groups.split(groups.join(tree, axes_of), tree, axes_of)
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_a_large_leaf_stays_alone_and_gets_the_same_update(tree, monkeypatch):
    zero = jax.tree.map(jnp.zeros_like, tree)

    def update():
        tx = optimizer.make_optimizer(CFG, 10)
        return jax.jit(tx.update)(tree, tx.init(zero), zero)[0]

    together = update()
    monkeypatch.setattr(groups, "MAX_JOINED_SIZE", tree["w_q"].size - 1)
    assert sorted(x.shape for x in groups.join(tree, axes_of).values()) == [
        (3, 6, 8),
        (4, 5, 7),
        (6, 6, 8),
    ]
    for name, u in update().items():
        # Stacks of another length may be tiled differently; the last bits only.
        np.testing.assert_allclose(u, together[name], rtol=1e-5, atol=1e-8, err_msg=name)


def test_leaves_that_vary_over_other_mesh_axes_are_not_joined(tree):
    names = []

    def inside(a, b):
        stacks = groups.join({"w_down": a, "w_latent_up": b}, axes_of)
        names.append(sorted(stacks))
        back = groups.split(stacks, {"w_down": a, "w_latent_up": b}, axes_of)
        return back["w_down"], back["w_latent_up"]

    a = tree["w_down"]
    with jax.set_mesh(jax.make_mesh((1, 2, 1, 1), AXES)):
        operands = jax.device_put(a, P("data")), jax.device_put(a, P())
        back = jax.jit(jax.shard_map(inside, out_specs=(P("data"), P())))(*operands)
    assert names == [["6x8", "6x8 data"]]
    for x in back:
        np.testing.assert_array_equal(x, a)
