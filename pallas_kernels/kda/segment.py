"""What a span of tokens does to a state, as an affine map: the local half of Eq. 17.

Every token maps S to (I - β k k^T) Diag(e^g) S + β k v^T, so a whole span maps S to M S + S̃, with
M independent of the values. Spans of one document held by different devices then compose.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.kda import documents
from pallas_kernels.kda.api import CANDIDATES
from pallas_kernels.kda.checks import (
    check_chunk_size,
    check_gate,
    check_segment_ids,
    check_tokens,
)
from pallas_kernels.kda.inputs import GateWeights, Options, Tokens, compute_dtype
from pallas_kernels.precision import einsum


def kda_segment(
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    a_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: dispatch.Choice = None,
) -> tuple[jax.Array, jax.Array]:
    """Affine map of each row's last document: S_out = M S_in + S̃.

    The last document is that of the last live token; without `segment_ids` it is the whole row.
    A row of padding gives the identity, M = I and S̃ = 0. When the document starts inside the
    row nothing on the left reaches it: the caller then replaces M by zero.

    Bound by arithmetic: about the forward pass of `kda` with K + V in place of V. Its time is not
    measured here.

    Args:
      k: [B, T, H, K].
      v: [B, T, H, V].
      g: [B, T, H, K].
      beta: [B, T, H].
      a_log: [H]; this and the arguments below as in `kda`.
      dt_bias: [H, K].
      lower_bound: in [-5, 0) or None.
      qk_l2norm: normalise k.
      segment_ids: int32 [B, T], 0 = padding, otherwise non-decreasing along a row.
      chunk_size: 16, 32, 64 or None, of "chunked" only.
      implementation: "chunked", "reference", a sequence of them, or None for the best.

    Returns:
      (M [B, H, K, K], S̃ [B, H, K, V]), both float32; S̃ is the state from a zero start.

    Raises:
      ValueError: shapes or dtypes do not fit together, or an argument breaks a rule of `kda`.
      UnsupportedError: the implementation named is unknown, or cannot serve the call.
    """
    tokens = Tokens(k, k, v, g, beta)
    check_tokens(tokens)
    check_gate(tokens, a_log, dt_bias, lower_bound)
    check_segment_ids(tokens, segment_ids)
    check_chunk_size(chunk_size)
    if segment_ids is not None:
        # Everything before the last document becomes padding, which leaves a state alone.
        carried = documents.carried_ids(segment_ids)
        segment_ids = jnp.where(segment_ids == carried[:, -1:], segment_ids, 0)
        segment_ids = jnp.minimum(segment_ids, 1)
    # One recurrence for both: its start is [I, 0], its values are [0, v].
    B, T, H, K = k.shape
    dtype = compute_dtype(tokens)
    zero = jnp.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None, :], dtype)
    identity = jnp.zeros_like(k[:, 0, :, :, None], dtype) + jnp.eye(K, dtype=dtype)
    start = jnp.concatenate([identity, zero], axis=-1)
    values = jnp.concatenate([jnp.zeros_like(k, dtype), v.astype(dtype)], axis=-1)
    options = Options(
        scale=1.0,
        qk_l2norm=qk_l2norm,
        lower_bound=lower_bound,
        num_segments=None if segment_ids is None else 1,
        return_final_state=True,
        chunk_size=chunk_size,
    )
    if segment_ids is not None:
        start = start[:, None]
    _, state = dispatch.call(
        "kda_segment",
        CANDIDATES,
        implementation,
        tokens._replace(v=values),
        GateWeights(a_log, dt_bias),
        segment_ids,
        0,
        start,
        options,
    )
    state = state.reshape(B, H, K, -1)
    return state[..., :K], state[..., K:]


def compose(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The map of two spans of one document, `first` the earlier one: (M₂ M₁, M₂ S̃₁ + S̃₂).

    Bound by arithmetic at K = 128: K / 6 FLOPs per byte moved. Its time is not measured here.

    Args:
      first: (M [..., K, K], S̃ [..., K, V]).
      second: likewise.

    Returns:
      (M, S̃) of the joined span, full float32 products. Associative, not commutative.
    """
    (m_1, s_1), (m_2, s_2) = first, second
    return (
        einsum("...ij,...jk->...ik", m_2, m_1),
        einsum("...ij,...jv->...iv", m_2, s_1) + s_2,
    )
