"""`expert_ffn`: the routed experts of a mixture, Eq. 11's Σ_i p_i e_i(x), dropless."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import ragged, reference
from pallas_kernels.grouped_matmul.api import check_block_size, preferred
from pallas_kernels.grouped_matmul.expert_vjp import BLOCKED, RAGGED, Activation, routed_ffn
from pallas_kernels.operands import whole_operands


def _run(engine, x, indices, p, w_gate_up, w_down, *, activation, block_size):
    return routed_ffn(engine, activation, block_size, x, indices, p, w_gate_up, w_down)


_CANDIDATES = {
    "blocked": dispatch.Implementation(functools.partial(_run, BLOCKED)),
    "ragged_dot": dispatch.Implementation(functools.partial(_run, RAGGED), ragged.unsupported),
    "reference": dispatch.Implementation(reference.reference_expert_ffn, reference.unsupported),
}


def expert_ffn(
    x: jax.Array,
    topk_indices: jax.Array,
    topk_weights: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    *,
    activation: Activation,
    token_mask: jax.Array | None = None,
    implementation: dispatch.Choice = None,
    block_size: int | None = None,
) -> jax.Array:
    """Routed experts: u_s = Σ_i p_si e_i(x_s), e(x) = activation(x W_gate, x W_up) W_down.

    Tokens are brought to their experts once, computed there through both products, and brought
    back once; nothing is dropped. The k terms of a token are summed in float32 in the order of its
    indices, so the result does not depend on how experts are numbered or placed. Differentiable
    once in x, topk_weights and the weights; the backward keeps x, the pre-activations and integer
    tables, not the experts' outputs (§5.2.2).

    Bound as `grouped_matmul` is, with 6 S k L F FLOPs forward and twice that backward.
    Forward and backward of "blocked" on two cores (AMD EPYC, jax 0.11.2, float32, SiTU, S=8192,
    k=4), beside the dense layer of the same useful FLOPs: 47 ms to 28 ms for E=32, L=96, F=64 and
    121 ms to 89 ms for E=16, L=192, F=128.

    Inside `shard_map` every operand is the local one and no collective is made (holding experts
    0..E-1 of a larger set, subtract the first one's number from the indices: routes to other
    experts are left out); under an explicit mesh outside of it, operands must be unsharded.

    Args:
      x: [S, L].
      topk_indices: [S, k] int32. A route whose index is outside 0..E-1 takes no row, adds nothing
        and has zero gradient.
      topk_weights: [S, k] float32, p.
      w_gate_up: [E, L, 2, F] of x's dtype, gate first.
      w_down: [E, F, L] of x's dtype.
      activation: (gate, up) -> the like, elementwise, finite with finite slopes at (0, 0). Must be
        the same object from call to call, or jit compiles again.
      token_mask: [S] bool; a token marked False takes no row and gives 0, whatever it holds.
      implementation: "blocked", "ragged_dot" or "reference", as in `grouped_matmul`.
      block_size: rows per block of "blocked", which alone has blocks; None chooses by S k / E.

    Returns:
      [S, L] float32.

    Raises:
      ValueError: shapes, dtypes or shardings do not fit together.
      UnsupportedError: the implementation named cannot serve the call.
    """
    _check(x, topk_indices, topk_weights, w_gate_up, w_down, token_mask)
    check_block_size(block_size)
    x, topk_indices, topk_weights, w_gate_up, w_down, token_mask = whole_operands(
        "expert_ffn", x=x, topk_indices=topk_indices, topk_weights=topk_weights,
        w_gate_up=w_gate_up, w_down=w_down, token_mask=token_mask,
    )  # fmt: skip
    if topk_indices.size == 0:
        return jnp.zeros_like(x, dtype=jnp.float32)
    taken = (topk_indices >= 0) & (topk_indices < w_gate_up.shape[0])
    taken = taken if token_mask is None else taken & token_mask[:, None]
    # A weight of a route that is not taken may be NaN and must not meet the zero it would scale.
    return dispatch.call(
        "expert_ffn",
        preferred(_CANDIDATES),
        implementation,
        x,
        jnp.where(taken, topk_indices, -1),
        jnp.where(taken, topk_weights, 0.0),
        w_gate_up,
        w_down,
        activation=activation,
        block_size=block_size,
    )


def _check(x, topk_indices, topk_weights, w_gate_up, w_down, token_mask):
    if w_gate_up.ndim != 4 or w_gate_up.shape[2] != 2:
        raise ValueError(
            f"w_gate_up {w_gate_up.shape} must be [E, L, 2, F], gate before up; "
            f"stack the two matrices on axis 2"
        )
    E, L, _, F = w_gate_up.shape
    if x.ndim != 2 or x.shape[1] != L or w_down.shape != (E, F, L):
        raise ValueError(
            f"w_gate_up {w_gate_up.shape} asks for x [S, {L}] and w_down {(E, F, L)}, "
            f"got {x.shape} and {w_down.shape}; flatten leading axes of x"
        )
    if topk_indices.shape != topk_weights.shape or topk_indices.shape[:-1] != x.shape[:1]:
        raise ValueError(
            f"topk_indices {topk_indices.shape} and topk_weights {topk_weights.shape} must both be "
            f"[{x.shape[0]}, k], one row for each row of x; flatten their leading axes as x's"
        )
    if topk_indices.dtype != jnp.int32 or topk_weights.dtype != jnp.float32:
        raise ValueError(
            f"topk_indices is {topk_indices.dtype} and topk_weights {topk_weights.dtype}; "
            f"cast them to int32 and float32"
        )
    if not x.dtype == w_gate_up.dtype == w_down.dtype:
        raise ValueError(
            f"x is {x.dtype}, w_gate_up {w_gate_up.dtype}, w_down {w_down.dtype}; cast to one dtype"
        )
    if token_mask is not None and (token_mask.shape != x.shape[:1] or token_mask.dtype != bool):
        raise ValueError(
            f"token_mask is {token_mask.dtype}{token_mask.shape}, must be bool[{x.shape[0]}]; "
            f"cast it, and flatten it as x"
        )
