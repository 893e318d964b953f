"""Kimi Delta Attention: signature, contract and checks of the op, and the choice of its form."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.kda import chunked, reference
from pallas_kernels.kda.gate import check_lower_bound
from pallas_kernels.kda.inputs import GateWeights, Options, Tokens

CANDIDATES = {
    "chunked": dispatch.Implementation(chunked.run),
    "reference": dispatch.Implementation(reference.run),
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

    Documents: with `segment_ids` the state restarts where the id changes; 0 is padding, allowed
    anywhere. At padding the output and every gradient are exactly zero, the state passes through
    and the inputs may hold anything, NaN included. Other ids must not decrease along a row; that
    is checked where rows are packed, on the host, not here. A document's output does not depend
    on its neighbours, bit for bit, as long as those are finite.

    States: without `segment_ids` there is one per row. With them, segment n of a row has the id
    segment_base + n + 1; the state of an id that the row lacks passes through unchanged. Time
    then grows with num_segments in the chunked form. Without states in or out ids may be any
    positive numbers.

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
        result is the same to rounding. The recurrence has no chunks and ignores it.
      implementation: "chunked", "reference", a sequence of them, or None for the best.

    Returns:
      (o [B, T, H, V], final state or None).

    Raises:
      ValueError: a static argument breaks a rule above; `UnsupportedError` for a bad
        implementation. Shapes that disagree raise AssertionError from chex.
    """
    tokens = Tokens(q, k, v, g, beta)
    check_tokens(tokens)
    check_gate(tokens, a_log, dt_bias, lower_bound)
    keeps_states = initial_state is not None or return_final_state
    _check_segments(tokens, segment_ids, num_segments, initial_state, keeps_states)
    check_chunk_size(chunk_size)
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


def check_tokens(tokens: Tokens) -> None:
    """Shapes and dtypes of one call's tokens, [B, T, H, ·] or [B, H, ·]."""
    q, k, v, g, beta = tokens
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"k has {k.shape[-2]} heads and v has {v.shape[-2]}: they must agree; "
            "repeat q, k and g to the heads of v"
        )
    lead = v.shape[:-1]
    chex.assert_shape([q, k, g], (*lead, k.shape[-1]))
    chex.assert_shape(beta, lead)
    for name, x in zip(tokens._fields, tokens, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}: a float dtype is needed; cast it")


def check_gate(
    tokens: Tokens,
    a_log: jax.Array | None,
    dt_bias: jax.Array | None,
    lower_bound: float | None,
) -> None:
    """Gate arguments that belong together, and their shapes."""
    check_lower_bound(lower_bound)
    H, K = tokens.k.shape[-2:]
    if a_log is None:
        given = {"dt_bias": dt_bias, "lower_bound": lower_bound}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name} is given without a_log: g is then log-decay already, which no gate "
                    f"shapes; pass a_log as well, or leave {name} out"
                )
        return
    chex.assert_shape(a_log, (H,))
    if dt_bias is not None:
        chex.assert_shape(dt_bias, (H, K))


def check_chunk_size(chunk_size: int | None) -> None:
    """Refuses a chunk size that the chunked form would have to replace silently."""
    if chunk_size is not None and chunk_size not in chunked.CHUNK_SIZES:
        raise ValueError(
            f"chunk_size={chunk_size} is not one of {chunked.CHUNK_SIZES}; "
            "choose one, or None for the default"
        )


def check_segment_ids(tokens: Tokens, segment_ids: jax.Array | None) -> None:
    """Shape and dtype of segment ids; their values are checked on the host, where rows are made."""
    if segment_ids is None:
        return
    chex.assert_shape(segment_ids, tokens.v.shape[:2])
    if segment_ids.dtype != jnp.int32:
        raise ValueError(f"segment_ids has dtype {segment_ids.dtype}: int32 is needed; cast it")


def _check_segments(tokens, segment_ids, num_segments, initial_state, keeps_states) -> None:
    check_segment_ids(tokens, segment_ids)
    if segment_ids is None and num_segments is not None:
        raise ValueError(
            f"num_segments={num_segments} is given without segment_ids; a row without ids has one "
            "state: pass segment_ids, or leave num_segments out"
        )
    if num_segments is not None and num_segments < 1:
        raise ValueError(f"num_segments={num_segments} is below 1; leave it out without states")
    if segment_ids is not None and keeps_states and num_segments is None:
        raise ValueError(
            "num_segments=None with segment_ids and states: the number of states per row must be "
            "static; pass num_segments"
        )
    if initial_state is not None:
        B, _, H, V = tokens.v.shape
        K = tokens.k.shape[-1]
        middle = () if segment_ids is None else (num_segments,)
        chex.assert_shape(initial_state, (B, *middle, H, K, V))
