"""Explicit sharding types of an op's global operands: which splits mean nothing, which are refused.

On a mesh of ones every array still carries the names of the axes it would be split over, and a
product of two such arrays is refused for naming an axis twice. A kernel's operands are local, so
the names are dropped on entry; the transpose of that cast puts them back on the gradients.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels.varying import match_varying


def _split_axes(array: jax.Array) -> list[tuple[str, ...]]:
    """For each dimension, the explicit mesh axes longer than one that split it."""
    sharding = jax.typeof(array).sharding
    names = [() if s is None else s if isinstance(s, tuple) else (s,) for s in sharding.spec]
    names += [()] * (array.ndim - len(names))
    return [tuple(n for n in dim if sharding.mesh.shape[n] > 1) for dim in names]


def drop_unit_axes(array: jax.Array | None) -> jax.Array | None:
    """Removes mesh axes of length one from the array's type; the data do not move."""
    if array is None or all(s is None for s in jax.typeof(array).sharding.spec):
        return array
    return jax.sharding.reshard(array, PartitionSpec(*(dim or None for dim in _split_axes(array))))


def check_whole(op: str, name: str, array: jax.Array | None, dims: tuple[int, ...]) -> None:
    """Refuses a global array that an explicit mesh splits along one of `dims`.

    Raises:
      ValueError: it does; the message says how to call the op instead.
    """
    if array is None:
        return
    split = _split_axes(array)
    bad = {d: split[d] for d in dims if split[d]}
    if bad:
        raise ValueError(
            f"{op}: {name} is {jax.typeof(array)}, split along {bad} (dimension: mesh axes), where "
            f"the op needs it whole; call it inside jax.shard_map or reshard {name} first"
        )


def whole_operands(op: str, **operands: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """Operands by name, ready for a custom VJP: none split by an explicit mesh, all varying alike.

    NumPy arrays become JAX arrays, which a custom VJP would not make of them.

    Raises:
      ValueError: one is split; see `check_whole`.
    """
    arrays = {n: None if a is None else jnp.asarray(a) for n, a in operands.items()}
    local = {name: drop_unit_axes(array) for name, array in arrays.items()}
    for name, array in local.items():
        check_whole(op, name, array, () if array is None else tuple(range(array.ndim)))
    return match_varying(*local.values())
