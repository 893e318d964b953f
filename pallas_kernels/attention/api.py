"""`attention`: the contract, its checks and the choice of implementation."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.attention import reference
from pallas_kernels.attention.vjp import chunked_attention
from pallas_kernels.operands import check_whole, drop_unit_axes
from pallas_kernels.varying import match_varying

_CANDIDATES = {
    "chunked": dispatch.Implementation(chunked_attention),
    "reference": dispatch.Implementation(reference.reference_attention, reference.unsupported),
}


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    return_max_logits: bool = False,
    implementation: dispatch.Choice = None,
    block_size: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """o_i = sum_j softmax_j(scale q_i·k_j) v_j over the keys that query i may see (§2.1.2).

    Query i sees key j if both have the same segment id, not 0, and, when causal, j <= i + S - T:
    queries are the last T positions of the S keys. There is no position encoding, so the order of
    the keys that a query sees does not matter.

    Padding has id 0. Its rows of q, k, v and of the cotangent may hold anything, NaN included:
    padded queries give exactly 0, padded keys are never seen, and all their gradients are exactly
    0. A query that sees no key gives exactly 0 as well. Packed documents equal separate ones up to
    the order of float32 additions.

    Scores, softmax and sums are float32 for any input. "chunked" never holds more than a tile of
    scores and keeps q, k, v, o and a logsumexp for its gradient. Processor time of forward and
    backward on CPU (AMD EPYC, 2 cores, jax 0.11.2), B=8, H=4, float32: 64 ms against 138 ms for
    "reference" at T=512, K=48, V=32, and 0.42 s against 0.70 s at T=1024, K=96, V=64. Bound by
    arithmetic: 2 (K + V) FLOPs per pair of query and key forward, 6 K + 4 V backward.

    Inside `shard_map` operands are the local ones and no collective is made in the forward pass;
    max_logits is then local, so take `pmax` of it. An operand replicated over an axis that another
    varies over gets the sum of its gradient over that axis. Outside, under an explicit mesh, only
    batch and heads may be split.

    Args:
      q: [B, T, H, K].
      k: [B, S, H, K], of q's dtype.
      v: [B, S, H, V], of q's dtype; V may differ from K.
      segment_ids: [B, T] int32 document of each query, 0 = padding; None: one document.
      kv_segment_ids: [B, S] int32 of each key; None takes `segment_ids`, which then needs S = T.
      causal: whether a query is kept from later keys.
      scale: factor on q·k; None is K^-1/2.
      out_dtype: dtype of o; None is v's. float32 is what the report trains with.
      return_max_logits: also return each head's largest allowed scaled score, for QK-Clip.
      implementation: "chunked", "reference", None or a sequence as in `dispatch`.
      block_size: length of a tile of "chunked"; None fits a tile to the cache.

    Returns:
      o [B, T, H, V], and max_logits [H] float32 without gradient, -inf for a head in which nothing
      is allowed, or None.

    Raises:
      ValueError: shapes, dtypes or shardings do not fit together.
      UnsupportedError: the implementation named cannot serve the call.
    """
    query_ids, key_ids = _check(q, k, v, segment_ids, kv_segment_ids, block_size)
    operands = [drop_unit_axes(a) for a in (q, k, v, query_ids, key_ids)]
    for name, array in zip(("q", "k", "v", "segment_ids", "kv_segment_ids"), operands, strict=True):
        check_whole("attention", name, array, (1, 3) if name in "qkv" else (1,))
    q, k, v, query_ids, key_ids = match_varying(*operands)
    if query_ids is not None:
        # A masked weight of 0 does not silence NaN: 0 · NaN is NaN, in the gradient too.
        q, k, v = _zero_padding(q, query_ids), _zero_padding(k, key_ids), _zero_padding(v, key_ids)
    o, max_logits = dispatch.call(
        "attention", _CANDIDATES, implementation, q, k, v, query_ids, key_ids,
        causal=causal, scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        out_dtype=np.dtype(v.dtype if out_dtype is None else out_dtype), block_size=block_size,
    )  # fmt: skip
    if query_ids is not None:
        o = _zero_padding(o, query_ids)  # stops a padded row's cotangent
    return o, max_logits if return_max_logits else None


def _zero_padding(x: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.where((ids != 0)[:, :, None, None], x, jnp.zeros((), x.dtype))


def _check(q, k, v, segment_ids, kv_segment_ids, block_size):
    """Refuses operands that do not fit together; returns the ids of queries and of keys."""
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not (
        q.ndim == k.ndim == v.ndim == 4
        and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
        and k.shape[:3] == v.shape[:3]
    ):
        raise ValueError(
            f"attention takes q [B, T, H, K], k [B, S, H, K], v [B, S, H, V], got {shapes}; "
            f"repeat shared key heads before the call"
        )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(
            f"attention needs at least one query and one key, got {shapes}; "
            f"skip the call when there is none"
        )
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; all must be one floating dtype, cast them"
        )
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size {block_size} must be at least 1; pass None for the default")
    (B, T), S = q.shape[:2], k.shape[1]
    if kv_segment_ids is None:
        kv_segment_ids = segment_ids
        if segment_ids is not None and S != T:
            raise ValueError(
                f"{S} keys for {T} queries: segment_ids cannot serve both; pass kv_segment_ids"
            )
    elif segment_ids is None:
        raise ValueError("kv_segment_ids without segment_ids: pass both, or neither")
    named = (
        ("segment_ids", segment_ids, T, "query"),
        ("kv_segment_ids", kv_segment_ids, S, "key"),
    )
    for name, ids, length, token in named:
        if ids is not None and (ids.shape != (B, length) or ids.dtype != jnp.int32):
            raise ValueError(
                f"{name} is {ids.dtype}{ids.shape}, must be int32[{B}, {length}]; "
                f"pass one int32 id per {token}, 0 at padding"
            )
    return segment_ids, kv_segment_ids
