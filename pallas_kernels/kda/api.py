"""Kimi Delta Attention: signature and contract of the op, and the choice of its form."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.kda import chunked, documents, reference
from pallas_kernels.kda.checks import check_chunk_size, check_gate, check_states, check_tokens
from pallas_kernels.kda.inputs import GateWeights, Options, Tokens

CANDIDATES = {
    "chunked": dispatch.Implementation(chunked.run),
    "reference": dispatch.Implementation(reference.run, reference.unsupported),
}


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    a_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    segment_base: int | jax.Array = 0,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    chunk_size: int | None = None,
    implementation: dispatch.Choice = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Delta rule with a decay per key channel (Eq. 1), causal along each row.

        S_t = (I - β_t k_t k_t^T) Diag(e^{g_t}) S_{t-1} + β_t k_t v_t^T,    o_t = scale · S_t^T q_t

    Mathematics in float32 whatever the input dtype (float64 if an input is float64); o has v's
    dtype, states are float32. Finite and accurate to rounding for every g ≤ 0, g = -1e4 and -inf
    included. Outputs before token t do not depend on token t, bit for bit.

    Documents: with `segment_ids` the state restarts where the id changes; 0 is padding. At padding
    the output and every gradient are exactly zero, the state passes through and the inputs may hold
    anything, NaN included. Here it may stand anywhere, inside a document too; `short_conv`, and so
    a model, takes documents in one piece only. Other ids must not decrease along a row; both rules
    are checked on the host, where rows are packed or received (`pallas_kernels/segment_ids.py`). A
    document's output does not depend on its neighbours, bit for bit, as long as those are finite.

    States: without `segment_ids` there is one per row. With them, segment n of a row has the id
    segment_base + n + 1; the state of an id that the row lacks passes through unchanged, and
    tokens of an id that has no state are padding. Time then grows with num_segments in the chunked
    form. Without states in or out ids may be any positive numbers.

    Differentiable by JAX, any number of times. The gradient of "chunked" is that of a scan over
    chunks, each computed again in the backward pass: kept are the inputs, in their dtypes, and one
    float32 state per chunk, [B, H, K, V] or all N of them. "reference" keeps its steps, a state
    per token among them.

    Bound by arithmetic: forward about 6 K V + 2 C (K + 2 V) FLOPs per token and head, C the chunk
    size, against 3 K + 2 V numbers read and written. The backward pass runs the forward one again.
    Its time is not measured here.

    Inside `shard_map` every operand is the local one and no collective is made; a replicated a_log
    or dt_bias gets the sum of its gradient over the devices from the transpose of the caller's
    shard_map. Outside, under an explicit mesh, the batch may be split.

    Args:
      q: [B, T, H, K].
      k: [B, T, H, K].
      v: [B, T, H, V].
      g: [B, T, H, K], log-decay ≤ 0; raw gate logits when `a_log` is given.
      beta: [B, T, H], write strength in (0, 1).
      a_log: [H]; turns g into log-decay, see `gate.log_decay`.
      dt_bias: [H, K], added to the logits; needs `a_log`.
      lower_bound: in [-5, 0), chooses the bounded gate, also the faster one; None chooses the
        softplus gate. Needs `a_log`.
      scale: factor on q, K^-0.5 by default.
      qk_l2norm: normalise q and k here, x · rsqrt(Σ x² + 1e-6), zero rows with zero gradient.
      segment_ids: int32 [B, T], see above.
      num_segments: N, static; needed with `segment_ids` when states go in or out.
      segment_base: scalar, or [B], see above.
      initial_state: [B, H, K, V], or [B, N, H, K, V] with `segment_ids`; zero by default.
      return_final_state: also return the state after the last token, laid out like the initial.
      chunk_size: 16, 32 or 64 tokens for the chunked form; None takes the faster for K. The
        result is the same to rounding. The recurrence has no chunks and refuses one.
      implementation: "chunked", "reference", a sequence of them, or None for the best.

    Returns:
      (o [B, T, H, V], final state or None).

    Raises:
      ValueError: shapes or dtypes do not fit together, or an argument breaks a rule above; the
        message states the value, the rule and the way out.
      UnsupportedError: the implementation named is unknown, or cannot serve the call.
    """
    tokens = Tokens(q, k, v, g, beta)
    check_tokens(tokens)
    check_gate(tokens, a_log, dt_bias, lower_bound)
    keeps_states = initial_state is not None or return_final_state
    check_states(tokens, segment_ids, num_segments, initial_state, keeps_states)
    check_chunk_size(chunk_size)
    if segment_ids is not None and keeps_states:
        segment_ids = documents.with_states(segment_ids, segment_base, num_segments)
    options = Options(
        scale=k.shape[-1] ** -0.5 if scale is None else scale,
        qk_l2norm=qk_l2norm,
        lower_bound=lower_bound,
        num_segments=num_segments if segment_ids is not None and keeps_states else None,
        return_final_state=return_final_state,
        chunk_size=chunk_size,
    )
    return dispatch.call(
        "kda",
        CANDIDATES,
        implementation,
        tokens,
        GateWeights(a_log, dt_bias),
        segment_ids,
        segment_base,
        initial_state,
        options,
    )
