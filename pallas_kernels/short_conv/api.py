"""`short_conv`: the contract, its checks and the choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.operands import whole_operands
from pallas_kernels.short_conv.history import carry, prepend
from pallas_kernels.short_conv.reference import reference_short_conv
from pallas_kernels.short_conv.taps import convolve


def _shifted(x, w, segment_ids, initial_state, return_final_state, activation):
    T, H = x.shape[1], w.shape[1] - 1
    final = carry(x, H, initial_state, segment_ids) if return_final_state else None
    if initial_state is None or H == 0:
        return convolve(x, w, segment_ids, activation), final
    longer, ids = prepend(x, initial_state, segment_ids)
    y = convolve(longer, w, ids, activation)[:, -T:]
    if segment_ids is not None:
        # Padding that lent its place to the history has an output there; it is not a token's.
        y = jnp.where((segment_ids != 0)[..., None], y, 0)
    return y, final


_CANDIDATES = {
    "shifted": dispatch.Implementation(_shifted),
    "reference": dispatch.Implementation(reference_short_conv),
}


def short_conv(
    x: jax.Array,
    w: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
    activation: str | None = "silu",
    implementation: dispatch.Choice = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Causal depthwise convolution (§2.1.1): y_t = activation(Σ_{j<W} w[:, W-1-j] ⊙ x_{t-j}).

    The history restarts at every document. Computed in float32. Padding (id 0) gives exactly 0 and
    whatever it holds, NaN included, reaches no output, state or gradient. Differentiable once in
    x, w and initial_state; kept for the backward: x, w and the ids.

    A document may be cut anywhere, into single tokens too: pieces that receive the state of the
    piece before give the outputs and the state of the whole. A piece whose first document is a new
    one needs a zero state; only the caller knows that.

    Bound by memory: forward reads x and writes y once. Processor time on CPU (AMD EPYC, jax
    0.11.2, float32) for B=8, T=1024, C=576 with ids: 5 ms forward, 23 ms with gradients, of which
    half is the taps' (32 ms by autodiff, which keeps ten arrays of x's size).

    Inside `shard_map` every operand is the local one and no collective is made; under an explicit
    mesh outside of it, operands must be unsharded.

    Args:
      x: [B, T, C].
      w: [C, W]; w[:, W-1] multiplies the current token.
      segment_ids: [B, T] int32, not negative, 0 = padding between documents and at either end; the
        tokens of a document are contiguous and carry one id that no other document of the row has.
        Padding inside a document has no meaning: a window either counts it or skips it, and
        implementations differ; `pallas_kernels/segment_ids.py` refuses it on the host. None: each
        row is one document.
      initial_state: [B, W-1, C], the inputs before the row's first document, oldest first. None
        is zeros.
      return_final_state: also return the last W-1 inputs of each row's last document, continuing
        initial_state while the row is still in its first document; zeros where the document is
        shorter; initial_state itself for a row without tokens.
      activation: "silu" or None.
      implementation: "shifted" or "reference", as in `dispatch`.

    Returns:
      y: [B, T, C] in x's dtype.
      state: [B, W-1, C] in initial_state's dtype (x's without one), or None.

    Raises:
      ValueError: shapes, dtypes, shardings or the activation are not as above.
      UnsupportedError: the implementation named is unknown.
    """
    _check(x, w, segment_ids, initial_state, activation)
    operands = whole_operands(
        "short_conv", x=x, w=w, segment_ids=segment_ids, initial_state=initial_state
    )
    return dispatch.call(
        "short_conv", _CANDIDATES, implementation, *operands, return_final_state, activation
    )


def _check(x, w, segment_ids, initial_state, activation):
    if x.ndim != 3 or w.ndim != 2 or w.shape[0] != x.shape[2] or w.shape[1] < 1 or x.shape[1] < 1:
        raise ValueError(
            f"short_conv takes x [B, T, C] with T >= 1 and w [C, W] with W >= 1, got {x.shape} "
            f"and {w.shape}; put channels last in x and first in w, skip the call without tokens"
        )
    B, T, C = x.shape
    if segment_ids is not None and (segment_ids.shape != (B, T) or segment_ids.dtype != jnp.int32):
        raise ValueError(
            f"segment_ids is {segment_ids.dtype}{segment_ids.shape}, must be int32{(B, T)}; "
            f"pass one int32 id per token, 0 at padding"
        )
    if initial_state is not None and initial_state.shape != (B, w.shape[1] - 1, C):
        raise ValueError(
            f"initial_state {initial_state.shape} must hold the last W - 1 inputs, oldest first: "
            f"{(B, w.shape[1] - 1, C)}; pass a final state of this op, or None for zeros"
        )
    if activation not in ("silu", None):
        raise ValueError(f"activation {activation!r} is unknown; choose 'silu' or None")
