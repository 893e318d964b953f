"""The same update under every mesh, and two all-to-alls instead of gathers.

NVIDIA/Megatron-LM#5961 orthogonalised the part of a matrix that each device held, which is another
update; marin-community/marin#6493 gathered every matrix anew in each step, which is slow.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.optim import optimizer
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.optim.owners import owner_path
from k3jax.parallel.mesh import AXES

CFG = OptimizerConfig(peak_lr=1e-2, schedule="constant")
WIDTH = ("data", "expert")
SPECS = {
    "w_q": P(None, WIDTH, None, None),  # [G, D, H, K]
    "w_o": P(None, None, None, WIDTH),  # [G, H, V, D]
    "w_down": P(None, "expert", None, "data"),  # [G, E, F, L]
    "w_gate_up": P(None, "expert", "data", None, None),  # [G, E, L, 2, F]
    "w_f_a": P(None, WIDTH, None),  # [G, D, R]
    "embedding": P(None, WIDTH),
    "final_norm": P(None),
}
SHAPES = {
    "w_q": (2, 16, 4, 3),
    "w_o": (4, 3, 5, 8),
    "w_down": (2, 4, 6, 8),
    "w_gate_up": (2, 4, 8, 2, 6),
    "w_f_a": (1, 8, 3),
    "embedding": (7, 8),
    "final_norm": (8,),
}


def eight(data, expert):
    return jax.make_mesh((1, data, expert, 8 // (data * expert)), AXES)


def two_steps(params, gradients):
    """Updates of two jitted steps."""
    tx = optimizer.make_optimizer(CFG, 10)
    state, update = tx.init(params), jax.jit(tx.update)
    for grads in gradients:
        updates, state = update(grads, state, params)
    return updates, state


def trees(rng):
    def one():
        return {n: np.asarray(rng.standard_normal(s), np.float32) for n, s in SHAPES.items()}

    return one(), [one(), one()]


def put(tree, specs):
    return {n: jax.device_put(x, specs[n]) for n, x in tree.items()}


@pytest.fixture(scope="module")
def single():
    """Parameters, gradients and updates without any mesh at all."""
    params, gradients = trees(np.random.default_rng(3))
    empty = jax.sharding.AbstractMesh((), (), axis_types=())
    with jax.sharding.use_abstract_mesh(empty):
        updates, _ = two_steps(jax.tree.map(jnp.asarray, params), gradients)
    return params, gradients, jax.tree.map(np.asarray, updates)


@pytest.mark.parametrize("data, expert, specs", [(1, 1, {}), (4, 2, SPECS), (2, 4, SPECS)])
def test_the_update_is_that_of_one_device_under_every_mesh(single, data, expert, specs):
    params, gradients, expected = single
    specs = dict.fromkeys(SPECS, P()) | specs
    with jax.set_mesh(eight(data, expert)):
        placed = put(params, specs)
        updates, _ = two_steps(placed, [put(g, specs) for g in gradients])
        for name, u in updates.items():
            assert u.sharding.is_equivalent_to(placed[name].sharding, u.ndim), name
            # float32 sums of the clipping norm and of products differ in order only
            np.testing.assert_allclose(u, expected[name], rtol=1e-4, atol=2e-7, err_msg=name)


def test_the_momentum_is_split_as_finely_as_its_parameter(single):
    params, gradients, _ = single
    with jax.set_mesh(eight(2, 2)):
        placed = put({"w_q": params["w_q"]}, SPECS)
        _, state = two_steps(placed, [put({"w_q": g["w_q"]}, SPECS) for g in gradients])
        [momentum] = [x for x in jax.tree.leaves(state) if x.shape == SHAPES["w_q"]]
        assert jax.typeof(momentum).sharding.spec == P(None, None, WIDTH, None)
        assert momentum.addressable_shards[0].data.size * 4 == momentum.size


def test_a_split_leaf_costs_two_all_to_alls_and_no_all_gather():
    with jax.set_mesh(jax.make_mesh((1, 8, 1, 1), AXES)):
        params = {"w_q": jax.device_put(jnp.ones((8, 16, 2, 4)), P(None, "data", None, None))}
        tx = optimizer.make_optimizer(CFG, 10)
        state = tx.init(params)
        text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
    assert len(re.findall(r" all-to-all\(", text)) == 2
    assert not re.findall(r" all-gather\(", text)


@pytest.mark.parametrize(
    "shape, spec, block, expected",
    [
        ((8, 16, 4, 8), P(None, "data"), (1, 3), [P("data")]),
        ((1, 16, 4, 8), P(None, "data"), (1, 3), [P(None, None, "data")]),
        ((1, 16, 3, 8), P(None, "data"), (1, 3), [P()]),
        ((8, 16, 4, 8), P(None, ("data", "expert")), (1, 3), [P(("data", "expert"))]),
        (
            (2, 16, 4, 8),
            P(None, ("data", "expert")),
            (1, 3),
            [P("expert", "data"), P("expert", None, "data")],
        ),
        ((8, 4, 6, 8), P(None, "expert", None, "data"), (2, 3), [P("data", "expert")]),
        ((16, 8), P("data", "expert"), (0, 1), [P(None, "expert"), P()]),
        ((16, 8), P(), (0, 1), []),
    ],
)
def test_mesh_axes_move_to_the_first_counting_axis_that_they_divide(shape, spec, block, expected):
    with jax.set_mesh(eight(4, 2)):
        steps = owner_path(jax.device_put(jnp.zeros(shape), spec), block)[1:]
    assert steps == [P(*step, *(None,) * (len(shape) - len(step))) for step in expected]
