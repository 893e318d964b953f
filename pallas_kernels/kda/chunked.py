"""Chunked form, Eqs. 3-4: matrix products inside a chunk, one fp32 state between chunks.

With G the running log-decay of a chunk and S its incoming state,

    T = (I + L)^-1 Diag(β),  L_ij = β_i Σ_d k_i e^{G_i - G_j} k_j  (i > j)
    U = T (V - (e^G ⊙ K) S)
    O = (e^G ⊙ Q) S + A U,   A_ij = Σ_d q_i e^{G_i - G_j} k_j  (i ≥ j)
    S' = Diag(e^{G_C}) S + (e^{G_C - G} ⊙ K)^T U

Everything about a chunk happens inside the body of one scan, rematerialised in the backward pass:
a chunk's arrays then stay in cache, and only the inputs and one state per chunk are kept.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kda import documents
from pallas_kernels.kda.decayed_products import Products, chunk_products, document_index
from pallas_kernels.kda.inputs import GateWeights, Options, Tokens, compute_dtype, prepare
from pallas_kernels.kda.triangular import unit_lower_inverse
from pallas_kernels.precision import einsum

CHUNK_SIZES = (16, 32, 64)


def default_chunk_size(key_width: int) -> int:
    """The faster size on two CPU cores, forward and backward together: 16 below K = 64, else 32."""
    return 16 if key_width < 64 else 32


class _Chunk(NamedTuple):
    """Scanned arrays; the leading chunk axis is gone inside the scan.

    Attributes:
      tokens: fields [B, C, ...].
      live: bool [B, C], or [1, C], or None when every token is live.
      starts: bool [B, C], where documents begin, or None for one document per row.
      slots: bool [B, C, N] when states are kept per segment, else None.
    """

    tokens: Tokens
    live: jax.Array | None
    starts: jax.Array | None
    slots: jax.Array | None


def run(
    tokens: Tokens,
    gate: GateWeights,
    segment_ids: jax.Array | None,
    segment_base: int | jax.Array,
    initial_state: jax.Array | None,
    options: Options,
) -> tuple[jax.Array, jax.Array | None]:
    """Contract of `kda`, arguments grouped; see `inputs` for the groups."""
    T = tokens.v.shape[1]
    size = options.chunk_size or default_chunk_size(tokens.k.shape[-1])
    chunks = _split(tokens, segment_ids, segment_base, options.num_segments, size)
    state = _first_state(chunks, initial_state, options.num_segments)

    def body(state, chunk):
        return _one_chunk(state, chunk, gate, options)

    state, o = jax.lax.scan(jax.checkpoint(body), state, chunks)
    NC, B, C, H, V = o.shape
    o = jnp.moveaxis(o, 0, 1).reshape(B, NC * C, H, V)[:, :T]
    if not options.return_final_state:
        return o, None
    if options.num_segments is not None:
        state = jnp.moveaxis(state.reshape(B, H, options.num_segments, -1, V), 2, 1)
    return o, state


def _split(tokens, segment_ids, segment_base, num_segments, size) -> _Chunk:
    """Pads T to whole chunks and moves the chunk axis to the front."""
    T = tokens.v.shape[1]
    count = max(1, -(-T // size))

    def pad(x):
        return jnp.pad(x, [(0, 0), (0, count * size - T)] + [(0, 0)] * (x.ndim - 2))

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    live = starts = slots = None
    if segment_ids is not None:
        live = split(pad(segment_ids > 0))
        ids = documents.carried_ids(pad(segment_ids))
        starts = split(documents.document_starts(ids))
        if num_segments is not None:
            slots = split(documents.slot_masks(ids, segment_base, num_segments))
    elif count * size != T:
        live = split(pad(jnp.ones((1, T), bool)))
    return _Chunk(Tokens(*(split(pad(x)) for x in tokens)), live, starts, slots)


def _first_state(chunks: _Chunk, initial_state: jax.Array | None, num_segments: int | None):
    """[B, H, N·K, V]; made from the inputs, so that it is sharded and varies as they do."""
    k, v = chunks.tokens.k[0, :, 0], chunks.tokens.v[0, :, 0]
    dtype = compute_dtype(chunks.tokens)
    zero = jnp.zeros_like(k[..., :, None].astype(dtype) * v[..., None, :].astype(dtype))
    if num_segments is None:
        return zero if initial_state is None else zero + initial_state.astype(dtype)
    B, H, K, V = zero.shape
    states = jnp.broadcast_to(zero[:, :, None], (B, H, num_segments, K, V))
    if initial_state is not None:
        states = states + jnp.moveaxis(initial_state, 1, 2).astype(dtype)
    return states.reshape(B, H, num_segments * K, V)


def _one_chunk(state, chunk: _Chunk, gate: GateWeights, options: Options):
    """One step of the scan: (state [B, H, N·K, V], chunk) -> (state, o [B, C, H, V])."""
    ready = prepare(chunk.tokens, chunk.live, gate, options)
    q, k, v, g = (jnp.swapaxes(x, 1, 2) for x in ready[:4])
    beta = jnp.swapaxes(ready.beta, 1, 2)[..., None]
    bounded = gate.a_log is not None and options.lower_bound is not None
    parts = chunk_products(q, k, g, chunk.starts, bounded)
    if chunk.slots is not None:
        parts = _per_segment(parts, q, k, g, chunk)
    solve = unit_lower_inverse(beta * parts.kk) * jnp.swapaxes(beta, -1, -2)
    u = einsum("bhij,bhjv->bhiv", solve, v - einsum("bhik,bhkv->bhiv", parts.k_head, state))
    # jaxlib 0.10 and 0.11 fuse these products on CPU into one library call, which for some widths
    # of v (B=8, T=8, H=2, K=16, V=20) reads memory that was never written. The barrier parts them
    # for 0.11; 0.10 needs the flag of k3jax/parallel/host.py, which our programs set.
    u = jax.lax.optimization_barrier(u)
    o = einsum("bhik,bhkv->bhiv", parts.q_head, state) + einsum("bhij,bhjv->bhiv", parts.qk, u)
    state = parts.whole[..., None] * state + einsum("bhik,bhiv->bhkv", parts.k_tail, u)
    return state, jnp.swapaxes(o, 1, 2).astype(chunk.tokens.v.dtype)


def _per_segment(parts: Products, q, k, g, chunk: _Chunk) -> Products:
    """Gives every segment its own rows of the state: the key axis becomes N·K.

    Sums of log-decay run over the segment's own tokens of the chunk. They are sums of terms of one
    sign over a mask, not differences of running sums, and so lose nothing.
    """
    size = g.shape[2]
    nth = document_index(chunk.starts)
    same = nth[:, :, None] == nth[:, None, :]
    # Below the smallest float, twice: e^g is an exact zero, and 0·g stays one for g = -inf.
    g = jnp.maximum(g, 2 * np.log(jnp.finfo(g.dtype).tiny))

    def summed(mask):
        return jnp.exp(einsum("bij,bhjk->bhik", (same & mask).astype(g.dtype), g))

    upper = np.triu(np.ones((size, size), bool), 1)
    head, tail = summed(~upper), summed(upper)
    slots = chunk.slots.astype(g.dtype)

    def spread(x):
        wide = x[:, :, :, None, :] * slots[:, None, :, :, None]
        return wide.reshape(*x.shape[:3], -1)

    whole = jnp.exp(einsum("bjn,bhjk->bhnk", slots, g))
    return parts._replace(
        k_head=spread(k * head),
        q_head=spread(q * head),
        k_tail=spread(k * tail),
        whole=whole.reshape(*whole.shape[:2], -1),
    )
