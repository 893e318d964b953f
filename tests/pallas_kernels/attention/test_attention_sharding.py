"""Attention on eight devices: inside `shard_map`, and on global arrays of an explicit mesh.

One device is the oracle. Every device computes its own rows with the same tiles, so results agree
to the order of float32 additions.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3jax.parallel.mesh import AXES
from pallas_kernels.attention import attention

ROWS = P(("data", "expert"), "context")
attend = functools.partial(attention, block_size=8, return_max_logits=True)


@pytest.fixture
def eight():
    """A mesh of data 4 x expert 2, set over the mesh of ones."""
    mesh = jax.make_mesh((1, 4, 2, 1), AXES)
    with jax.set_mesh(mesh):
        yield mesh


def draw(rng):
    """q, k, v, ids of eight packed rows, as numpy arrays."""
    q, k, v = (rng.normal(size=(8, 20, 2, width)).astype(np.float32) for width in (6, 6, 4))
    ids = np.sort(rng.integers(0, 4, (8, 20)), axis=1).astype(np.int32)
    return q, k, v, ids


def put(mesh, spec, *arrays):
    """Lays arrays out over a mesh."""
    return [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a in arrays]


def loss(q, k, v, ids):
    """A loss of the output, with the output and the maxima."""
    o, top = attend(q, k, v, segment_ids=ids)
    return jnp.sum(jnp.sin(o)), (o, top)


def expected(operands):
    """Loss, output, maxima and gradients on one device, as numpy arrays."""
    with jax.set_mesh(jax.make_mesh((1, 1, 1, 1), AXES, devices=jax.devices()[:1])):
        step = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        return jax.tree.map(np.asarray, step(*map(jnp.asarray, operands)))


def check(actual, wanted):
    """Equal to the order of additions."""
    chex.assert_trees_all_close(jax.tree.map(np.asarray, actual), wanted, rtol=1e-5, atol=1e-5)


def test_global_arrays_split_by_row_equal_one_device_and_keep_their_types(rng, eight):
    operands = draw(rng)
    wanted = expected(operands)
    split = put(eight, ROWS, *operands)
    actual = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*split)
    check(actual, wanted)
    for gradient, operand in zip(actual[1], split, strict=False):
        assert jax.typeof(gradient) == jax.typeof(operand)


def test_a_mesh_of_ones_takes_arrays_typed_for_the_large_mesh(rng, mesh):
    operands = draw(rng)
    typed = put(mesh, ROWS, *operands)
    actual = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*typed)
    check(actual, expected(operands))
    assert jax.typeof(actual[1][0]) == jax.typeof(typed[0])


def test_inside_shard_map_rows_need_no_collective_and_equal_one_device(rng, eight):
    operands = draw(rng)
    wanted = expected(operands)

    def local(q, k, v, ids):
        o, top = attend(q, k, v, segment_ids=ids)
        return o, top[None]

    run = jax.shard_map(local, out_specs=(ROWS, P(("data", "expert", "context"))))

    def split_loss(q, k, v, ids):
        o, top = run(q, k, v, ids)
        return jnp.sum(jnp.sin(o)), (o, jnp.max(top, axis=0))

    split = put(eight, ROWS, *operands)
    step = jax.value_and_grad(split_loss, (0, 1, 2), has_aux=True)
    check(jax.jit(step)(*split), wanted)
    inside = str(jax.make_jaxpr(step)(*split))
    assert not any(name in inside for name in ("psum", "all_gather", "ppermute", "all_to_all"))


def test_keys_shared_by_devices_get_the_sum_of_their_gradients(rng, eight):
    # Queries split over devices, keys and values whole on each: the transpose must add up.
    q, k, v = (rng.normal(size=(1, 16, 2, width)).astype(np.float32) for width in (6, 6, 4))

    def plain(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v, causal=False, block_size=8)[0]))

    with jax.set_mesh(jax.make_mesh((1, 1, 1, 1), AXES, devices=jax.devices()[:1])):
        wanted = jax.jit(jax.grad(plain, (0, 1, 2)))(*map(jnp.asarray, (q, k, v)))
        wanted = jax.tree.map(np.asarray, wanted)

    def local(q, k, v):
        return jax.lax.psum(plain(q, k, v), ("data", "expert"))

    split = put(eight, P(None, ("data", "expert")), q) + put(eight, P(), k, v)
    actual = jax.jit(jax.grad(jax.shard_map(local, out_specs=P()), (0, 1, 2)))(*split)
    check(actual, wanted)


def test_a_split_sequence_is_refused_with_the_way_out(rng):
    with jax.set_mesh(jax.make_mesh((1, 1, 1, 4), AXES, devices=jax.devices()[:4])):
        q, k, v, _ = (jnp.asarray(a) for a in draw(rng))
        q = jax.sharding.reshard(q, P(None, "context"))
        with pytest.raises(ValueError, match="call it inside jax.shard_map or reshard q"):
            attention(q, k, v)
