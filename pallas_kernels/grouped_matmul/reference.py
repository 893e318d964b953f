"""Oracles: every row meets every group's matrix in float32 and a mask picks. E times the work.

Plain JAX without a custom VJP, so that autodiff of these functions is the gradient oracle.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.precision import dot, einsum


def reference_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, block_size: int | None = None
) -> jax.Array:
    """`grouped_matmul` as out_m = sum_e [m in group e] lhs_m rhs_e."""
    del block_size
    ends = jnp.cumsum(group_sizes)[:, None]
    row = jnp.arange(lhs.shape[0])
    member = (row >= ends - group_sizes[:, None]) & (row < ends)  # [E, M]
    masked = jnp.where(member[:, :, None], lhs.astype(jnp.float32), 0.0)
    out = einsum("emk,ekn->mn", masked, rhs.astype(jnp.float32))
    # Selecting once more keeps the cotangents of unowned rows out.
    return jnp.where(member.any(axis=0)[:, None], out, 0.0).astype(lhs.dtype)


def reference_expert_ffn(
    x: jax.Array,
    topk_indices: jax.Array,
    topk_weights: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    block_size: int | None = None,
) -> jax.Array:
    """`expert_ffn` as a loop over experts, every expert seeing every token it is routed to."""
    del block_size
    f32 = jnp.float32
    out = jnp.zeros_like(x, dtype=f32)
    for e in range(w_gate_up.shape[0]):
        chosen = topk_indices == e
        taken = chosen.any(axis=1, keepdims=True)
        p = jnp.sum(jnp.where(chosen, topk_weights, 0.0), axis=1, keepdims=True)
        rows = jnp.where(taken, x, 0).astype(f32)
        g, u = (dot(rows, w_gate_up[e, :, half].astype(f32)) for half in (0, 1))
        out += jnp.where(taken, p * dot(activation(g, u), w_down[e].astype(f32)), 0.0)
    return out


def unsupported(*_: Any, block_size: int | None = None, **__: Any) -> str | None:
    """Why the references cannot serve a call: they have no blocks whose size could be set."""
    return None if block_size is None else f"has no blocks, got block_size {block_size}"
