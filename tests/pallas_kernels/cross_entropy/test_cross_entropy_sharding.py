"""Cross-entropy on eight devices with rows split and the head replicated; one device is the oracle.

Devices add up their own rows first, so results agree to the order of float32 additions.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.parallel.mesh import AXES
from pallas_kernels.cross_entropy import cross_entropy, token_nll

ROWS = P(("data", "expert"))
loss = functools.partial(cross_entropy, chunk_size=4)


def draw(rng):
    """x, w, targets, weights as numpy arrays."""
    x, w = rng.normal(size=(80, 6)), rng.normal(size=(6, 11))
    weights = rng.random(80) * (rng.random(80) < 0.8)
    targets = rng.integers(0, 11, 80).astype(np.int32)
    return x.astype(np.float32), w.astype(np.float32), targets, weights.astype(np.float32)


def put(mesh, x, w, targets, weights):
    """Rows over data and expert, the head on every device."""
    spread = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))  # noqa: E731
    return spread(x, ROWS), spread(w, P()), spread(targets, ROWS), spread(weights, ROWS)


def one_device(operands):
    """Loss and gradients as numpy arrays."""
    with jax.set_mesh(jax.make_mesh((1, 1, 1, 1), AXES, devices=jax.devices()[:1])):
        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        return jax.tree.map(np.asarray, step(*map(jnp.asarray, operands)))


def check(actual, wanted):
    """Equal to the order of additions."""
    chex.assert_trees_all_close(jax.tree.map(np.asarray, actual), wanted, rtol=1e-5, atol=1e-5)


def summed(x, w, targets, weights):
    """The loss over all devices; runs inside `shard_map`."""
    return jax.lax.psum(loss(x, w, targets, weights), ("data", "expert"))


def test_the_head_gets_the_sum_of_all_devices_gradients(rng):
    operands = draw(rng)
    wanted = one_device(operands)
    mesh = jax.make_mesh((1, 4, 2, 1), AXES)
    with jax.set_mesh(mesh):
        step = jax.value_and_grad(jax.shard_map(summed, out_specs=P()), (0, 1))
        split = put(mesh, *operands)
        actual = jax.jit(step)(*split)
        check(actual, wanted)
        assert [jax.typeof(g) for g in actual[1]] == [jax.typeof(a) for a in split[:2]]


def test_gradients_taken_inside_shard_map_are_those_of_the_whole_loss(rng):
    operands = draw(rng)
    wanted = one_device(operands)
    mesh = jax.make_mesh((1, 8, 1, 1), AXES)
    with jax.set_mesh(mesh):
        step = jax.value_and_grad(summed, (0, 1))
        run = jax.shard_map(step, out_specs=(P(), (ROWS, P())))
        check(jax.jit(run)(*put(mesh, *operands)), wanted)


def test_a_mesh_of_ones_takes_arrays_typed_for_the_large_mesh(rng, mesh):
    operands = draw(rng)
    typed = put(mesh, *operands)
    actual = jax.jit(jax.value_and_grad(loss, (0, 1)))(*typed)
    check(actual, one_device(operands))
    assert [jax.typeof(g) for g in actual[1]] == [jax.typeof(a) for a in typed[:2]]


def test_token_nll_stays_with_its_rows_inside_shard_map(rng):
    operands = draw(rng)
    mesh = jax.make_mesh((1, 8, 1, 1), AXES)
    alone = np.asarray(token_nll(*map(jnp.asarray, operands[:3])))
    with jax.set_mesh(mesh):
        run = jax.shard_map(functools.partial(token_nll, chunk_size=4), out_specs=ROWS)
        np.testing.assert_allclose(jax.jit(run)(*put(mesh, *operands)[:3]), alone, rtol=1e-5)


def test_rows_split_outside_shard_map_are_refused_with_the_way_out(rng):
    mesh = jax.make_mesh((1, 8, 1, 1), AXES)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="call it inside jax.shard_map"):
        loss(*put(mesh, *draw(rng)))
