"""Sums and maxima over all tokens of the mesh, and the wrapper that runs a kernel per device."""

import functools
import math
from collections.abc import Callable, Hashable

import jax
from jax import lax

from k3jax.parallel import specs


def per_device(f: Callable, *static: Hashable, out_specs, check_vma: bool = True) -> Callable:
    """Runs `f(*static, ...)` on every device's own part; inputs keep the sharding of their types.

    The same `f` and `static` give the same object on one mesh, which JAX traces and differentiates
    once for all layers of one shape: half the time that the 93 layers take. So `f` must be a
    function of a module, not one made by the caller.
    """
    return _shared(f, static, out_specs, check_vma, jax.sharding.get_abstract_mesh())


@functools.lru_cache(maxsize=256)
def _shared(f, static, out_specs, check_vma, mesh):
    local = functools.partial(f, *static)
    return jax.jit(jax.shard_map(local, mesh=mesh, out_specs=out_specs, check_vma=check_vma))


def whole(x: jax.Array) -> jax.Array:
    """Gathers a parameter before per-device use: its bytes x (n - 1) / n received per device."""
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec(*(None,) * x.ndim))


def sum_over_tokens(x: jax.Array) -> jax.Array:
    """All-reduce of a per-token statistic; call inside `per_device`. Its own size per device."""
    return lax.psum(x, specs.TOKEN_AXES)


def max_over_tokens(x: jax.Array) -> jax.Array:
    """All-reduce maximum of a per-token statistic, without gradient; call inside `per_device`."""
    return lax.pmax(lax.stop_gradient(x), specs.TOKEN_AXES)


def smallest_batch() -> tuple[int, int]:
    """The least [B, T] that the mesh in force can split evenly."""
    lengths = jax.sharding.get_abstract_mesh().shape
    rows = math.prod(lengths.get(axis, 1) for axis in specs.BATCH)
    return rows, lengths.get("context", 1)


def refuse_split_sequence(what: str) -> None:
    """Raises when the mesh splits the sequence and `what` cannot cross the cut."""
    length = jax.sharding.get_abstract_mesh().shape.get("context", 1)
    if length != 1:
        raise ValueError(
            f"context={length}: {what} needs the whole sequence on one device; "
            "set the axis to 1 (train.mesh.context in a run) and use data and expert"
        )
