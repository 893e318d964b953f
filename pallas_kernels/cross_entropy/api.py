"""`cross_entropy`, `token_nll`, `token_scores`: contracts, checks, choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.cross_entropy import chunked, reference
from pallas_kernels.cross_entropy.vjp import chunked_cross_entropy, undifferentiable_scores
from pallas_kernels.operands import whole_operands

_CANDIDATES = {
    "chunked": dispatch.Implementation(chunked_cross_entropy),
    "reference": dispatch.Implementation(reference.reference_cross_entropy, reference.unsupported),
}


def cross_entropy(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    chunk_size: int | None = None,
    implementation: dispatch.Choice = None,
) -> jax.Array:
    """sum_i weights_i · -log softmax(x_i w)_{targets_i}, with one chunk of rows' logits alive.

    Logits are accumulated and kept in float32 for any input. When x or w is differentiated the
    forward pass already makes both gradients, chunk by chunk, and the backward pass scales them;
    when neither is, none is made. First derivatives only.

    A row of weight 0 adds exactly 0 to the loss and to every gradient, whatever x holds there (NaN
    too) and whatever its target. Other targets must lie in [0, V); they are not checked. Weights
    may have any sign; they are not differentiated, their gradient is 0.

    Inside `shard_map` with rows split over mesh axes and w replicated, the loss is the local sum:
    the caller sums it with `psum`. The gradient of w then comes out summed over those axes, once,
    with `check_vma=True`; with it off the caller sums that too. Outside of `shard_map`, under an
    explicit mesh, no operand may be split.

    Bound by arithmetic: 2 N D V FLOPs for the value alone, 6 N D V with the gradients. "chunked"
    keeps only the two gradients for the backward pass. Its time as a whole is not measured here;
    `chunked.py` says which of its choices were.

    Args:
      x: [N, D] hidden states.
      w: [D, V] head, of x's dtype.
      targets: [N] int32.
      weights: [N] float32.
      chunk_size: rows at a time of "chunked"; None fits a chunk of logits to the cache on CPU.
      implementation: "chunked", "reference", None or a sequence as in `dispatch`.

    Returns:
      The loss, a float32 scalar; not divided by anything.

    Raises:
      ValueError: shapes, dtypes or shardings do not fit together.
      UnsupportedError: the implementation named cannot serve the call.
    """
    _check(x, w, targets, chunk_size)
    if weights.shape != targets.shape or weights.dtype != jnp.float32:
        raise ValueError(
            f"weights are {weights.dtype}{weights.shape}, must be float32, one for each of the "
            f"{x.shape[0]} rows of x; cast them, and flatten them as x"
        )
    operands = whole_operands("cross_entropy", x=x, w=w, targets=targets, weights=weights)
    return dispatch.call("cross_entropy", _CANDIDATES, implementation, *operands, chunk_size)


def token_nll(
    x: jax.Array, w: jax.Array, targets: jax.Array, *, chunk_size: int | None = None
) -> jax.Array:
    """-log softmax(x_i w)_{targets_i} of every row, for evaluation; one chunk of logits alive.

    Bound by arithmetic, 2 N D V FLOPs; its time is not measured here.

    Args:
      x: [N, D] hidden states; NaN stays in its own row.
      w: [D, V] head, of x's dtype.
      targets: [N] int32 in [0, V).
      chunk_size: as in `cross_entropy`.

    Returns:
      [N] float32, without gradient: differentiating it is refused.

    Raises:
      ValueError: shapes, dtypes or shardings do not fit together, or it is differentiated.
    """
    return token_scores(x, w, targets, chunk_size=chunk_size)[0]


def token_scores(
    x: jax.Array, w: jax.Array, targets: jax.Array, *, chunk_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """`token_nll`, and whether a greedy choice would have taken the target.

    Args:
      x: as in `token_nll`.
      w: likewise.
      targets: likewise.
      chunk_size: likewise.

    Returns:
      [N] float32 -log p(targets_i), and [N] int32 the most probable id, the lowest of equals;
      where a row is not finite its id means nothing. Neither has a gradient.

    Raises:
      ValueError: as `token_nll`.
    """
    _check(x, w, targets, chunk_size)
    x, w, targets = whole_operands("token_scores", x=x, w=w, targets=targets)
    chunk = chunk_size or chunked.default_chunk(w.shape[1])
    return undifferentiable_scores(chunk, x, w, targets)


def _check(x, w, targets, chunk_size):
    """Refuses operands that do not fit together."""
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0] or 0 in (*x.shape, *w.shape):
        raise ValueError(
            f"cross_entropy takes x [N, D] and w [D, V], none empty, got {x.shape} and {w.shape}; "
            f"flatten batch and sequence into N"
        )
    if x.dtype != w.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"x is {x.dtype} and w {w.dtype}; both must be one floating dtype, cast them"
        )
    if targets.shape != x.shape[:1] or targets.dtype != jnp.int32:
        raise ValueError(
            f"targets are {targets.dtype}{targets.shape}, must be int32, one for each of the "
            f"{x.shape[0]} rows of x; cast them, and flatten them as x"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size} must be at least 1; pass None for the default")
