"""Grouped products through `jax.lax.ragged_dot`: one kernel over sorted rows on GPU and TPU.

XLA's CPU lowering multiplies every row by every group's matrix and masks, so it is refused there
unless a test calls these functions directly.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.precision import full_precision

_CONTRACT_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def unsupported(*_: Any, block_size: int | None = None, **__: Any) -> str | None:
    """Refuses block sizes, global arrays, and platforms on which this is not a grouped kernel."""
    if block_size is not None:
        return f"has no blocks to choose, got block_size {block_size}"
    if jax.default_backend() == "cpu":
        return "lowers to a masked dense product of E times the work on CPU"
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return "has no sharding rule under an explicit mesh; call it inside shard_map"
    return None


def ragged_multiply(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Multiplies sorted rows [M, K] by their group's matrix of `weights` [E, K, C] -> [M, C].

    With `transpose`, rows are [M, C] and the result is [M, K]. Accumulates in float32. Rows past
    sum(group_sizes) must be finite and give unspecified values.
    """
    w = jnp.swapaxes(weights, 1, 2) if transpose else weights
    y = jax.lax.ragged_dot(
        rows,
        w,
        group_sizes,
        precision=full_precision(rows, w),
        preferred_element_type=jnp.float32,
    )
    return y.astype(out_dtype or rows.dtype)


def ragged_outer(left: jax.Array, right: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Sums leftᵀ right over each group's rows: [M, K], [M, C] -> [E, K, C] float32."""
    return jax.lax.ragged_dot_general(
        left,
        right,
        group_sizes,
        _CONTRACT_ROWS,
        precision=full_precision(left, right),
        preferred_element_type=jnp.float32,
    )


def ragged_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, block_size: int | None = None
) -> jax.Array:
    """`grouped_matmul` through ragged_dot and its own transposes, whose blocks XLA chooses."""
    del block_size
    owned = (jnp.arange(lhs.shape[0]) < jnp.sum(group_sizes))[:, None]
    # Selecting before and after keeps unowned rows out of both gradients, NaN or not.
    y = ragged_multiply(jnp.where(owned, lhs, 0), rhs, group_sizes)
    return jnp.where(owned, y, 0)
