"""`grouped_matmul`: the contract, its checks and the choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import ragged, reference
from pallas_kernels.grouped_matmul.blocked import blocked_matmul
from pallas_kernels.operands import whole_operands

_CANDIDATES = {
    "blocked": dispatch.Implementation(blocked_matmul),
    "ragged_dot": dispatch.Implementation(ragged.ragged_matmul, ragged.unsupported),
    "reference": dispatch.Implementation(reference.reference_matmul, reference.unsupported),
}
# Best first; ragged_dot wherever it is a grouped kernel.
_FIRST = {"cpu": "blocked"}


def preferred(candidates: dict[str, dispatch.Implementation]) -> dict[str, dispatch.Implementation]:
    """The candidates in this platform's order of preference."""
    first = _FIRST.get(jax.default_backend(), "ragged_dot")
    return {name: candidates[name] for name in dict.fromkeys((first, *candidates))}


def check_block_size(block_size: int | None) -> None:
    """Refuses block sizes that are not positive.

    Raises:
      ValueError: `block_size` is neither None nor at least 1.
    """
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size {block_size} must be at least 1; pass None for the default")


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    implementation: dispatch.Choice = None,
    block_size: int | None = None,
) -> jax.Array:
    """Multiplies rows, sorted by group, by their group's matrix: out_m = lhs_m rhs_{e(m)}.

    Dropless: any distribution of the rows over the groups is computed in full, all rows in one
    group included. Rows past sum(group_sizes) give exactly 0, and whatever they or their
    cotangents hold, NaN included, reaches no other value. A group without rows gets exactly zero
    weight gradient. Differentiable once in `lhs` and `rhs`, saving only the three operands.

    Bound by arithmetic, 2 M K N FLOPs forward and twice that backward; by reading the matrices
    where a group has fewer than about 16 rows. The measured time is in `blocked.py`.

    Inside `shard_map` every operand is the local one and no collective is made; under an explicit
    mesh outside of it, operands must be unsharded.

    Args:
      lhs: [M, K]; group e owns the next group_sizes[e] rows.
      rhs: [E, K, N], of lhs's dtype.
      group_sizes: [E] int32, not negative.
      implementation: "blocked" (default on CPU: blocks of rows, at most 1.25 times the useful
        work from 64 rows per group on), "ragged_dot" (default on GPU: `jax.lax.ragged_dot`),
        "reference" (masked dense float32 oracle); None or a sequence as in `dispatch`.
      block_size: rows per block of "blocked", which alone has blocks; None chooses by M / E.

    Returns:
      [M, N] in lhs's dtype, accumulated in float32.

    Raises:
      ValueError: shapes, dtypes or shardings do not fit together.
      UnsupportedError: the implementation named cannot serve the call.
    """
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            f"grouped_matmul takes lhs [M, K] and rhs [E, K, N], got {lhs.shape} and {rhs.shape}; "
            f"the last axis of lhs must equal the middle axis of rhs"
        )
    if group_sizes.shape != rhs.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"group_sizes is {group_sizes.dtype}{group_sizes.shape}, must be int32 with one entry "
            f"for each of the {rhs.shape[0]} groups of rhs; cast it, and give empty groups a 0"
        )
    if lhs.dtype != rhs.dtype:
        raise ValueError(f"lhs is {lhs.dtype} and rhs {rhs.dtype}; cast one to the other's dtype")
    check_block_size(block_size)
    lhs, rhs, group_sizes = whole_operands(
        "grouped_matmul", lhs=lhs, rhs=rhs, group_sizes=group_sizes
    )
    if lhs.shape[0] == 0:
        return jnp.zeros_like(lhs, shape=(0, rhs.shape[2]))
    return dispatch.call(
        "grouped_matmul", preferred(_CANDIDATES), implementation, lhs, rhs, group_sizes,
        block_size=block_size,
    )  # fmt: skip
