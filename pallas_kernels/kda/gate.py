"""Log-decay of the two published gates, Eq. 5: bounded (K3) and softplus (Kimi-Linear).

They are different functions of the same logits, not one with a clamp: at A_log = ln 2 and logit 1
the bounded gate gives -5·σ(2) = -4.404, the softplus gate -2.627.
"""

import math

import jax
import jax.numpy as jnp

# exp(A_log) must stay finite in float32, or a saturated gate differentiates to 0·inf. Above this
# rate both gates are step functions of every logit that float32 tells apart from zero.
_MAX_A_LOG = 88.0


def check_lower_bound(lower_bound: float | None) -> None:
    """Refuses a bound for which sixteen tokens leave the float32 range of exp.

    Raises:
      ValueError: `lower_bound` is neither None nor in [-5, 0).
    """
    if lower_bound is not None and not (math.isfinite(lower_bound) and -5 <= lower_bound < 0):
        raise ValueError(
            f"lower_bound={lower_bound} is outside [-5, 0): exp(16·|bound|) must fit float32; "
            "pass a bound in that range, or None for the softplus gate"
        )


def log_decay(
    logits: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array | None,
    lower_bound: float | None,
) -> jax.Array:
    """Per-channel log-decay g ≤ 0 from raw gate logits.

    g = lower_bound · σ(exp(a_log)·(logits + dt_bias)) with a lower bound, and
    g = -exp(a_log) · softplus(logits + dt_bias) without one.

    Args:
      logits: [..., H, K], in the dtype to compute in.
      a_log: [H], one rate per head.
      dt_bias: [H, K], or None for zero.
      lower_bound: in [-5, 0), or None for the softplus gate; see `check_lower_bound`.

    Returns:
      g, [..., H, K]. Gradients are finite for any finite input; a saturated channel gives zero.
    """
    rate = jnp.exp(jnp.minimum(a_log.astype(logits.dtype), _MAX_A_LOG))[:, None]
    shifted = logits if dt_bias is None else logits + dt_bias.astype(logits.dtype)
    if lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)
