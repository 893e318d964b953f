"""Token recurrence, Eq. 1: the definition of the op and the oracle of every other form.

    S_t = (I - β_t k_t k_t^T) Diag(e^{g_t}) S_{t-1} + β_t k_t v_t^T,    o_t = S_t^T q_t

Plain JAX, one token at a time, float32, or float64 when an input is. Never given a custom
derivative: its autodiff is the gradient oracle.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kda import documents
from pallas_kernels.kda.inputs import GateWeights, Options, Tokens, prepare
from pallas_kernels.precision import einsum


def recurrence_step(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """One token of Eq. 1. The decay comes before the read, the read before the write.

    Args:
      state: [B, H, K, V].
      token: prepared `Tokens` with fields [B, H, K], [B, H, V] and [B, H].

    Returns:
      (state [B, H, K, V], o [B, H, V]).
    """
    q, k, v, g, beta = token
    state = jnp.exp(g)[..., None] * state
    write = beta[..., None] * (v - einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., :, None] * write[..., None, :]
    return state, einsum("bhkv,bhk->bhv", state, q)


def run(
    tokens: Tokens,
    gate: GateWeights,
    segment_ids: jax.Array | None,
    segment_base: int | jax.Array,
    initial_state: jax.Array | None,
    options: Options,
) -> tuple[jax.Array, jax.Array | None]:
    """Contract of `kda`, arguments grouped; see `inputs` for the groups."""
    live = None if segment_ids is None else segment_ids > 0
    ready = prepare(tokens, live, gate, options)
    # Made from the inputs, so that it is sharded and varies over mesh axes as they do.
    zero = jnp.zeros_like(einsum("bthk,bthv->bhkv", ready.k, ready.v))
    if segment_ids is None:
        start = zero if initial_state is None else zero + initial_state.astype(zero.dtype)
        state, o = _scan(recurrence_step, start, ready)
    elif options.num_segments is None:
        ids = documents.carried_ids(segment_ids)
        starts = documents.document_starts(ids)
        state, o = _scan(_restarting_step, zero, (starts, ready))
    else:
        ids = documents.carried_ids(segment_ids)
        slots = documents.slot_masks(ids, segment_base, options.num_segments)
        start = jnp.broadcast_to(
            zero[:, None], (zero.shape[0], options.num_segments, *zero.shape[1:])
        )
        if initial_state is not None:
            start = start + initial_state.astype(start.dtype)
        state, o = _scan(_per_segment_step, start, (slots, ready))
    return o.astype(tokens.v.dtype), state if options.return_final_state else None


def unsupported(*operands: Any) -> str | None:
    """Why the recurrence cannot serve a call: it has no chunks whose size could be set."""
    chunk_size = operands[-1].chunk_size
    return None if chunk_size is None else f"has no chunks, got chunk_size {chunk_size}"


def _scan(step, start, by_token):
    state, o = jax.lax.scan(step, start, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), by_token))
    return state, jnp.moveaxis(o, 0, 1)


def _restarting_step(state, scanned):
    starts, token = scanned
    return recurrence_step(jnp.where(starts[:, None, None, None], 0, state), token)


def _per_segment_step(states, scanned):
    """states [B, N, H, K, V]; slots [B, N] choose the one that the token reads and writes."""
    slots, token = scanned
    chosen = slots[:, :, None, None, None]
    state, o = recurrence_step(jnp.sum(jnp.where(chosen, states, 0), axis=1), token)
    return jnp.where(chosen, state[:, None], states), o
