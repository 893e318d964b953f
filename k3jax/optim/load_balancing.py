"""The two rules that Quantile Balancing is compared with (§2.3.3): loss-free sign, Switch loss.

Of m tokens with k of n experts each, load_j counts those of expert j and the balanced load is
q = m k / n.
"""

import jax
import jax.numpy as jnp


def sign_bias(load: jax.Array, bias: jax.Array, rate: float) -> jax.Array:
    """Loss-free balancing: b_j <- b_j + rate sign(q - load_j), then the mean over experts off.

    It is a SignSGD step on the dual problem whose coordinates Quantile Balancing solves, so it
    takes about (range of the bias) / rate steps to equilibrium.

    Args:
      load: [..., n] int32, over the whole batch of the step.
      bias: [..., n] float32; kept where no token was counted.
      rate: gamma, 1e-3 in the published rule.

    Returns:
      [..., n] float32. Without the mean's removal a bias of unequal numbers of experts above and
      below q would drift, which changes no choice but loses digits.
    """
    total = jnp.sum(load, axis=-1, keepdims=True)
    # An exact comparison of load_j n with the total would overflow int32; the mean is near enough.
    mean = total.astype(jnp.float32) / load.shape[-1]
    new = bias + rate * jnp.sign(mean - load.astype(jnp.float32))
    return jnp.where(total > 0, new - jnp.mean(new, axis=-1, keepdims=True), bias)


def switch_loss(score_sum: jax.Array, load: jax.Array, k: int) -> jax.Array:
    """Sum over layers of n Σ_j f_j P_j, the load-balancing loss of Switch Transformers.

    f_j = load_j / (m k) is the share of routes, without gradient, and P_j the mean over tokens of
    the normalised score s_j / Σ s. Uniform scores and loads give 1 a layer. It is linear in P_j:
    with the loads of a whole batch, the losses of its pieces add up to that of the batch.

    Args:
      score_sum: [..., n] float32, Σ over tokens of s_j / Σ s, of a batch or a piece of it.
      load: [..., n] int32, of the whole batch.
      k: experts per token.

    Returns:
      float32 [], 0 where no token was counted.
    """
    routes = jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1).astype(jnp.float32)
    share = jax.lax.stop_gradient(load.astype(jnp.float32) / routes)
    return load.shape[-1] * jnp.sum(share * score_sum * (k / routes))
