"""Gives every matrix block to one device before a transformation that needs whole blocks (§5.2.2).

Newton-Schulz multiplies a matrix by its own transpose, so a block that is split over a mesh axis
would be gathered in every iteration. Instead the mesh axes that split a block are moved to an axis
that counts blocks (stacked layers, experts, heads): one all-to-all on the way in, one on the way
out, each of the array's bytes x (n - 1) / n per n devices, and no exchange inside. The inner
transformation keeps its state in the moved layout, so momentum stays as finely split as the
parameters. When no counting axis divides, the array is gathered over that mesh axis instead, and
its momentum is kept whole along it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

BlockAxes = Callable[[Any, jax.Array], tuple[int, ...]]


def owner_path(x: jax.Array, block_axes: tuple[int, ...]) -> list[PartitionSpec]:
    """Specs from that of `x` to one that leaves `block_axes` whole, one exchange a step.

    Mesh axes go together to the first counting axis that they divide together, otherwise one by
    one, the minor one first: the partitioner turns such a step into one all-to-all, and a step
    that spreads two mesh axes over two array axes at once into a gather.

    Args:
      x: array or tracer under an explicit mesh.
      block_axes: nonnegative axes that form a matrix.
    """
    lengths = jax.sharding.get_abstract_mesh().shape
    entries = [_names(entry) for entry in jax.typeof(x).sharding.spec]
    path = [PartitionSpec(*(names or None for names in entries))]

    def target(moving):
        for axis, names in enumerate(entries):
            parts = math.prod(lengths[name] for name in (*names, *moving))
            if axis not in block_axes and x.shape[axis] % parts == 0:
                return axis
        return None

    for axis in block_axes:
        names = entries[axis]
        together = names and target(names) is not None
        for moving in [names] if together else [(name,) for name in reversed(names)]:
            entries[axis] = entries[axis][: -len(moving)]
            if (to := target(moving)) is not None:
                entries[to] += moving
            path.append(PartitionSpec(*(names or None for names in entries)))
    return path


def by_owner(
    inner: optax.GradientTransformation, block_axes: BlockAxes
) -> optax.GradientTransformation:
    """Runs `inner` on whole blocks, each on the device that owns it.

    Equal to `inner` on one device; `inner` must treat blocks independently and is not given the
    parameters. Outside any mesh it is `inner` itself.

    Args:
      inner: transformation of a gradient tree whose state holds arrays like the parameters
        (split like their owners) and replicated scalars.
      block_axes: (key path, leaf) -> the nonnegative axes that must stay whole.
    """

    def to_owners(tree):
        def move(path, x):
            return functools.reduce(jax.sharding.reshard, owner_path(x, block_axes(path, x)), x)

        return jax.tree_util.tree_map_with_path(move, tree)

    def from_owners(updates, grads):
        def move(path, update, grad):
            way_back = reversed(owner_path(grad, block_axes(path, grad)))
            return functools.reduce(jax.sharding.reshard, way_back, update)

        return jax.tree_util.tree_map_with_path(move, updates, grads)

    def init(params):
        return inner.init(params if _no_mesh() else to_owners(params))

    def update(grads, state, params=None):
        del params
        if _no_mesh():
            return inner.update(grads, state)
        owned = to_owners(grads)
        local = jax.shard_map(inner.update, out_specs=(_specs(owned), _specs(state)))
        updates, state = local(owned, state)
        return from_owners(updates, grads), state

    return optax.GradientTransformation(init, update)


def _no_mesh() -> bool:
    return jax.sharding.get_abstract_mesh().empty


def _names(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _specs(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
