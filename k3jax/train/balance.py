"""Balances the experts' loads by the rule that `moe.balancing` names.

The bias moves once per optimizer step, from what the forward passes of all its pieces counted on
all devices; evaluation counts nothing, so it cannot move it. Every rule keeps the bias of a layer
that saw no token. Rows are layers with experts, whatever part of the model they belong to.
"""

import jax
import jax.numpy as jnp

from k3jax.layers.latent_moe import MoeConfig
from k3jax.layers.router import RouterStats
from k3jax.optim import load_balancing, quantile_balancing
from k3jax.parallel import tokens


def next_bias(cfg: MoeConfig, bias: jax.Array, stats: RouterStats) -> jax.Array:
    """The bias that routes the next step.

    Args:
      cfg: names the rule.
      bias: [L, E] float32, the present one.
      stats: of the whole step; `required` is [L, ..., E].

    Returns:
      [L, E] float32; `bias` itself under "aux_loss" and "none".
    """
    if cfg.balancing == "histogram":
        return quantile_balancing.bias_from_histogram(
            stats.histogram, stats.low, stats.width, bias, cfg.top_k, cfg.balancing_ema
        )
    if cfg.balancing == "quantile":
        # 4·L·E bytes a token of the step arrive on every device.
        required = tokens.whole(stats.required)
        by_expert = required.reshape(required.shape[0], -1, cfg.experts).swapaxes(1, 2)
        return quantile_balancing.bias_from_required(by_expert, bias, cfg.top_k, cfg.balancing_ema)
    if cfg.balancing == "sign":
        return load_balancing.sign_bias(stats.load, bias, cfg.balancing_rate)
    return bias


def aux_loss(
    cfg: MoeConfig, stats: RouterStats | None, batch_load: jax.Array | None
) -> jax.Array | None:
    """What "aux_loss" adds to the training loss, float32 []; None under the other rules.

    Args:
      cfg: names the rule.
      stats: of one piece of the batch, with its gradient.
      batch_load: [L, E] int32 of all pieces; None when this piece is the batch.
    """
    if cfg.balancing != "aux_loss" or stats is None:
        return None
    load = stats.load if batch_load is None else batch_load
    return cfg.aux_loss_weight * load_balancing.switch_loss(stats.score_sum, load, cfg.top_k)


def add(done: RouterStats | None, new: RouterStats | None) -> RouterStats | None:
    """Statistics of two pieces; margins are not added but collected, see `collected`.

    Bins are the same for every piece: they hang on the bias only.
    """
    if new is None:
        return None
    sums = {
        name: getattr(done, name) + getattr(new, name)
        for name in ("load", "histogram", "score_sum")
        if getattr(new, name) is not None
    }
    return new._replace(**sums)


def collected(stats: RouterStats | None, required: jax.Array | None) -> RouterStats | None:
    """Puts the margins of all pieces, [M, L, B, T, E], back as [L, M, B, T, E]."""
    if stats is None or required is None:
        return stats
    return stats._replace(required=jnp.moveaxis(required, 0, 1))
