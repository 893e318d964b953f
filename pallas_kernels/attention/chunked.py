"""Attention by online softmax over tiles of scores, and its gradient: XLA only, the CPU path.

One `lax.scan` walks the tiles that hold an allowed pair, so a causal call does half the work and
compiles one tile. With m the running row maximum, l the running sum and a = exp(m - m'):

    S = scale Q_i K_jᵀ      m' = max(m, rowmax S)      P = exp(S - m')
    l' = a l + rowsum P     O' = a O + P V_j           o = O / l,  L = m + log l

The backward pass rebuilds P = exp(S - L) from the saved logsumexp L:

    D = rowsum(dO ∘ o)      dV_jᵀ += dOᵀ P             dS = P ∘ (dO V_jᵀ - D)
    dQ_i += scale dS K_j    dK_jᵀ += scale Q_iᵀ dS

dK and dV are summed transposed because XLA's CPU product is slow when the left operand is read
across its rows (10 to 20 % of the backward pass). Sums are float32 throughout; P and dS are
rounded to the operands' dtype before a product.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import tiles
from pallas_kernels.attention.tiles import MASKED, Plan
from pallas_kernels.precision import einsum


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of operands of b's dtype, accumulated in float32."""
    return einsum(equation, a.astype(b.dtype), b, preferred_element_type=jnp.float32)


def _head_major(x: jax.Array, block: int) -> jax.Array:
    """[B, T, H, C] -> [B, H, T', C], padded with zeros to whole blocks."""
    x = jnp.moveaxis(x, 2, 1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block), (0, 0)))


def _time_major(x: jax.Array, length: int) -> jax.Array:
    """[B, H, T', C] -> [B, T, H, C]."""
    return jnp.moveaxis(x[:, :, :length], 1, 2)


def _pad_ids(ids: jax.Array | None, block: int) -> jax.Array | None:
    return None if ids is None else jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)))


def _slice(x: jax.Array | None, start: jax.Array, size: int, axis: int) -> jax.Array | None:
    return None if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _scores(plan: Plan, start, q_i, k_j, query_ids, key_ids):
    """Scaled scores of one tile, [B, H, query, key] float32, `MASKED` where not allowed."""
    i, j = start
    mask = tiles.allowed(
        plan,
        i,
        j,
        _slice(query_ids, i, plan.query_block, 1),
        _slice(key_ids, j, plan.key_block, 1),
    )
    return jnp.where(mask, _product("bhtk,bhsk->bhts", q_i, k_j) * plan.scale, MASKED)


def forward(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_ids: jax.Array | None,
    key_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output, logsumexp and row maxima.

    Args:
      plan: the call.
      q: [B, T, H, K]; padded rows hold finite numbers, as in k and v.
      k: [B, S, H, K].
      v: [B, S, H, V].
      query_ids: [B, T] or None.
      key_ids: [B, S] or None.

    Returns:
      o [B, T, H, V] in plan.out_dtype, 0 where a row sees nothing; logsumexp [B, H, T, 1] float32,
      +inf there; row maxima of the scores [B, H, T, 1] float32, `MASKED` there.
    """
    rows, columns = plan.query_block, plan.key_block
    q, k, v = _head_major(q, rows), _head_major(k, columns), _head_major(v, columns)
    query_ids, key_ids = _pad_ids(query_ids, rows), _pad_ids(key_ids, columns)

    def step(carry, start):
        o, m, total = carry
        i, j = start
        q_i, k_j = _slice(q, i, rows, 2), _slice(k, j, columns, 2)
        s = _scores(plan, start, q_i, k_j, query_ids, key_ids)
        old = _slice(m, i, rows, 2)
        new = jnp.maximum(old, jnp.max(s, axis=-1, keepdims=True))
        p, shrink = jnp.exp(s - new), jnp.exp(old - new)
        row_sum = _slice(total, i, rows, 2) * shrink + jnp.sum(p, axis=-1, keepdims=True)
        mixed = _slice(o, i, rows, 2) * shrink
        mixed += _product("bhts,bhsv->bhtv", p, _slice(v, j, columns, 2))
        update = jax.lax.dynamic_update_slice_in_dim
        return (update(o, mixed, i, 2), update(m, new, i, 2), update(total, row_sum, i, 2)), None

    # Carries take sharding and varying axes from an expression of the operands.
    zero = jnp.zeros_like(q[..., :1] * v[:, :, :1], dtype=jnp.float32)
    column = jnp.zeros_like(zero[..., :1])
    carry = (zero, column + MASKED, column)
    (o, m, total), _ = jax.lax.scan(step, carry, jnp.asarray(tiles.tile_starts(plan)))
    seen = m > MASKED
    safe = jnp.where(seen, total, 1.0)
    o = _time_major(jnp.where(seen, o / safe, 0.0).astype(plan.out_dtype), plan.queries)
    logsumexp = jnp.where(seen, m + jnp.log(safe), jnp.inf)
    return o, logsumexp[:, :, : plan.queries], m[:, :, : plan.queries]


def backward(
    plan: Plan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query_ids: jax.Array | None,
    key_ids: jax.Array | None,
    o: jax.Array,
    logsumexp: jax.Array,
    do: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, each in its own shape and dtype.

    Args:
      plan: the call.
      q: [B, T, H, K], and k, v, query_ids, key_ids, as in `forward`.
      k: [B, S, H, K].
      v: [B, S, H, V].
      query_ids: [B, T] or None.
      key_ids: [B, S] or None.
      o: [B, T, H, V], from `forward`.
      logsumexp: [B, H, T, 1], from `forward`.
      do: [B, T, H, V], the cotangent of o.
    """
    rows, columns, dtype = plan.query_block, plan.key_block, q.dtype
    # D takes the same rounded dO as dO Vᵀ does: a row of dS must sum to 0, or the error grows
    # with T. That is also why the report keeps o in float32.
    do = do.astype(v.dtype)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1, keepdims=True)
    do, delta = _head_major(do, rows), _head_major(delta, rows)
    q, k, v = _head_major(q, rows), _head_major(k, columns), _head_major(v, columns)
    query_ids, key_ids = _pad_ids(query_ids, rows), _pad_ids(key_ids, columns)
    padding = ((0, 0), (0, 0), (0, -plan.queries % rows), (0, 0))
    logsumexp = jnp.pad(logsumexp, padding, constant_values=jnp.inf)

    def step(carry, start):
        dq, dk, dv = carry
        i, j = start
        q_i, k_j, v_j = _slice(q, i, rows, 2), _slice(k, j, columns, 2), _slice(v, j, columns, 2)
        do_i = _slice(do, i, rows, 2)
        s = _scores(plan, start, q_i, k_j, query_ids, key_ids)
        p = jnp.exp(s - _slice(logsumexp, i, rows, 2))  # 0 where a row sees nothing
        ds = p * (_product("bhtv,bhsv->bhts", do_i, v_j) - _slice(delta, i, rows, 2))
        return (
            _add(dq, _product("bhts,bhsk->bhtk", ds, k_j), i, 2),
            _add(dk, _product("bhtk,bhts->bhks", q_i, ds.astype(dtype)), j, 3),
            _add(dv, _product("bhtv,bhts->bhvs", do_i, p.astype(dtype)), j, 3),
        ), None

    transposed = (jnp.swapaxes(k, 2, 3), jnp.swapaxes(v, 2, 3))
    carry = tuple(jnp.zeros_like(a, dtype=jnp.float32) for a in (q, *transposed))
    (dq, dk, dv), _ = jax.lax.scan(step, carry, jnp.asarray(tiles.tile_starts(plan)))
    return (
        _time_major(dq * plan.scale, plan.queries).astype(dtype),
        _time_major(jnp.swapaxes(dk, 2, 3) * plan.scale, plan.keys).astype(dtype),
        _time_major(jnp.swapaxes(dv, 2, 3), plan.keys).astype(dtype),
    )


def _add(total: jax.Array, part: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """Adds a block to `total` from `start` on along `axis`."""
    part = part + _slice(total, start, part.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, part, start, axis)
