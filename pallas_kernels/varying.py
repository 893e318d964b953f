"""Makes operands vary over the same mesh axes before they enter a custom VJP.

Inside `shard_map(check_vma=True)` a cotangent must vary over exactly the axes its primal varies
over. Ordinary JAX products cast replicated operands on their own; a custom VJP has to be handed
operands that already agree, and the transpose of the cast is then the sum that the caller's
replicated weights need.
"""

import jax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Manual mesh axes that `x` varies over; none outside `shard_map`."""
    return jax.typeof(x).mat.varying


def match_varying(*arrays: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """Casts all arrays to vary over the union of their manual axes; outside `shard_map` a no-op."""
    axes = [frozenset() if a is None else varying_axes(a) for a in arrays]
    union = frozenset().union(*axes)
    return tuple(
        a if a is None else jax.lax.pcast(a, tuple(sorted(union - own)), to="varying")
        for a, own in zip(arrays, axes, strict=True)
    )
