"""The forward and backward passes of one step: all pieces of the batch, added up.

The sums of losses and weights run over all pieces, so the pieces change a result by rounding only.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.layers.router import RouterStats
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.loss import Batch, forward_sums, total_weight, two_ahead
from k3jax.train import balance
from k3jax.train.state import TrainState


class Passes(NamedTuple):
    """What the forward and backward passes over the pieces of a batch give together.

    Attributes:
      loss: float32 [], nats per weighted token.
      mtp_loss: float32 [], nats per token two ahead, or None without that layer.
      aux_loss: float32 [], what the balancing loss adds to the loss, or None.
      grads: of loss + weight · mtp_loss + aux_loss, float32.
      stats: router statistics, or None without experts.
      max_logits: [L_mla, H] float32, or None.
    """

    loss: jax.Array
    mtp_loss: jax.Array | None
    aux_loss: jax.Array | None
    grads: Any
    stats: RouterStats | None
    max_logits: jax.Array | None


def run_passes(
    cfg: ModelConfig,
    state: TrainState,
    batch: Batch,
    *,
    max_logits: bool = False,
    implementation: str | None = None,
) -> Passes:
    """Runs all pieces: losses, counts and gradients added, the largest of the largest logits.

    Args:
      cfg: The model.
      state: Its parameters and router bias are read.
      batch: Pieces, each array [M, B/M, T].
      max_logits: Whether to find the largest attention logits.
      implementation: Of the cross-entropy, see `nll_sum`.
    """
    total, several = total_weight(batch), batch["tokens"].shape[0] > 1
    total_ahead = total_weight(two_ahead(batch)) if cfg.mtp_layers else None
    load = _loads(cfg, state, batch) if several and cfg.moe.balancing == "aux_loss" else None

    def loss_of(params, rows):
        sums = forward_sums(
            cfg, params, state.router, rows, train=True, max_logits=max_logits,
            implementation=implementation,
        )  # fmt: skip
        loss = minimised = sums.nll / total
        ahead = None
        if sums.mtp_nll is not None:
            ahead = sums.mtp_nll / total_ahead
            minimised = minimised + cfg.mtp_loss_weight * ahead
        aux = balance.aux_loss(cfg.moe, sums.stats, load)
        if aux is not None:
            minimised = minimised + aux
        return minimised, (loss, ahead, aux, sums.stats, sums.max_logits)

    def piece(rows):
        (_, given), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, rows)
        loss, ahead, aux, stats, top = given
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return Passes(loss, ahead, aux, grads, stats, top)

    first = jax.tree.map(lambda a: a[0], batch)
    if not several:
        return piece(first)

    def add(done, rows):
        new, required = _without_margins(piece(rows))
        loss, ahead, aux, grads = jax.tree.map(jnp.add, done[:4], new[:4])
        top = jax.tree.map(jnp.maximum, done.max_logits, new.max_logits)
        stats = balance.add(done.stats, new.stats)
        return Passes(loss, ahead, aux, grads, stats, top), required

    # Zeros of the right type rather than a first piece outside the loop: one traced copy.
    like = jax.eval_shape(lambda rows: _without_margins(piece(rows))[0], first)
    zero = jax.tree.map(_zeros, like)
    zero = zero._replace(max_logits=jax.tree.map(lambda a: a - jnp.inf, zero.max_logits))
    done, required = jax.lax.scan(add, zero, batch)
    return done._replace(stats=balance.collected(done.stats, required))


def _loads(cfg: ModelConfig, state: TrainState, batch: Batch) -> jax.Array | None:
    """[L_moe, E] loads of all pieces from forward passes alone, None without experts."""

    def load(rows):
        stats = forward_sums(cfg, state.params, state.router, rows, train=True).stats
        return None if stats is None else stats.load

    by_piece = jax.lax.map(load, batch)
    return None if by_piece is None else jnp.sum(by_piece, axis=0)


def _without_margins(passes: Passes) -> tuple[Passes, jax.Array | None]:
    """Takes out the one statistic that is collected over pieces instead of added."""
    if passes.stats is None:
        return passes, None
    stats = passes.stats._replace(required=None)
    return passes._replace(stats=stats), passes.stats.required


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype, out_sharding=like.sharding)
