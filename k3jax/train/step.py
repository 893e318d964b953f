"""One optimizer update as a pure function.

    g = ∇ Σ w·nll / Σ w over the whole batch (plus mtp_loss_weight times the like mean of the
        multi-token layer, where the model has one);  params ← tx(g);  bias ← QB(histogram)

The batch may be computed in pieces: both sums run over all of them, so the pieces change the
result by rounding only. Quantile Balancing (§2.3.3) sets the router bias once, after the update,
from integer counts of all pieces; the batch itself was routed with the old bias.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.loss import Batch, forward_sums, total_weight, two_ahead
from k3jax.optim import optimizer, quantile_balancing
from k3jax.optim.norms import norms_by_name
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.train.state import TrainState


class StepMetrics(NamedTuple):
    """What one update reports; arrays on the device, nothing waits for them.

    Attributes:
      loss: float32 [], nats per weighted token, before the update; the main loss alone.
      grad_norm: float32 [], before clipping.
      learning_rate: float32 [], of this update.
      tokens: int32 [], tokens that are not padding.
      max_violation: float32 [L_moe + mtp_layers], max load / mean load - 1; None without experts.
      dead_experts: int32 [L_moe + mtp_layers], experts without a token; None without experts.
      load: int32 [L_moe + mtp_layers, E], tokens of each expert; None without experts.
      grad_norms: leaf name -> float32 [], of the gradients before clipping.
      update_norms: likewise, of the parameters' changes; learning rate and decay are in them.
      mtp_loss: float32 [], nats per token two ahead, unweighted; None without that layer.
    """

    loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    tokens: jax.Array
    max_violation: jax.Array | None
    dead_experts: jax.Array | None
    load: jax.Array | None
    grad_norms: dict[str, jax.Array]
    update_norms: dict[str, jax.Array]
    mtp_loss: jax.Array | None = None


# One object per configuration: what is compiled with it is found again by later runs.
run_optimizer = functools.lru_cache(maxsize=8)(optimizer.make_optimizer)


@functools.lru_cache(maxsize=8)
def compiled_step(
    cfg: ModelConfig, opt: OptimizerConfig, steps: int, skip_not_finite: bool = False
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """The jitted `train_step` of a run; the old state's buffers are given away to the new one."""
    rate = optimizer.learning_rate(opt, steps)
    step = train_step(cfg, run_optimizer(opt, steps), rate)
    return jax.jit(skipping(step) if skip_not_finite else step, donate_argnums=0)


def train_step(
    cfg: ModelConfig,
    tx,
    rate: Callable[[jax.Array], jax.Array],
    implementation: str | None = None,
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """Makes the pure step.

    Args:
      cfg: The model.
      tx: A gradient transformation (`init`, `update`).
      rate: Step -> learning rate, for the metrics; `tx` has its own.
      implementation: Of the cross-entropy, see `forward_nll`.

    Returns:
      A function of (state, micro-batches), each micro-batch a dict of [B/M, T].
    """

    def step(state: TrainState, pieces: Sequence[Batch]) -> tuple[TrainState, StepMetrics]:
        batch = jax.tree.map(lambda *a: jnp.stack(a), *pieces)
        (loss, mtp_loss), grads, stats = _gradients(cfg, state, batch, implementation)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optimizer.apply_updates(state.params, updates)
        router, max_violation, dead = state.router, None, None
        if stats is not None:
            router = _balance(cfg, state.router, stats)
            max_violation = quantile_balancing.max_violation(stats.load)
            dead = quantile_balancing.dead_experts(stats.load)
        metrics = StepMetrics(
            loss=loss,
            grad_norm=optimizer.global_norm(grads),
            learning_rate=rate(state.step),
            tokens=jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32),
            max_violation=max_violation,
            dead_experts=dead,
            load=None if stats is None else stats.load,
            grad_norms=norms_by_name(grads),
            update_norms=norms_by_name(updates),
            mtp_loss=mtp_loss,
        )
        return TrainState(state.step + 1, params, router, opt_state, state.key), metrics

    return step


def skipping(step: Callable) -> Callable:
    """A step that leaves the state as it was where loss or gradient is not finite.

    The step number goes on, and with it the optimizer's own counts: the schedule stays that of the
    steps. Both norms are of the whole batch, so every device decides alike.
    """

    def guarded(state: TrainState, pieces: Sequence[Batch]) -> tuple[TrainState, StepMetrics]:
        new, metrics = step(state, pieces)
        good = jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.grad_norm)

        def keep(after: jax.Array, before: jax.Array) -> jax.Array:
            return (
                after
                if jnp.issubdtype(after.dtype, jnp.integer)
                else jnp.where(good, after, before)
            )

        return jax.tree.map(keep, new, state), metrics

    return guarded


def _balance(cfg: ModelConfig, router, stats):
    """The router collection with the bias that balances what this batch asked for."""
    bias = router["backbone"]["bias"]
    new = quantile_balancing.bias_from_histogram(
        stats.histogram, stats.low, stats.width, bias, cfg.moe.top_k
    )
    return {"backbone": {"bias": new}}


def _gradients(cfg: ModelConfig, state: TrainState, batch: Batch, implementation: str | None):
    """(Loss, loss two ahead or None), float32 gradients, router statistics of the whole batch."""
    total = total_weight(batch)
    total_ahead = total_weight(two_ahead(batch)) if cfg.mtp_layers else None

    def loss_of(params, rows):
        sums = forward_sums(
            cfg, params, state.router, rows, train=True, implementation=implementation
        )
        loss = sums.nll / total
        if sums.mtp_nll is None:
            return loss, ((loss, None), sums.stats)
        ahead = sums.mtp_nll / total_ahead
        return loss + cfg.mtp_loss_weight * ahead, ((loss, ahead), sums.stats)

    def piece(rows):
        (_, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, rows)
        losses, stats = aux
        return losses, jax.tree.map(lambda g: g.astype(jnp.float32), grads), stats

    first = jax.tree.map(lambda a: a[0], batch)
    if batch["tokens"].shape[0] == 1:
        return piece(first)

    def add(done, rows):
        losses, grads, stats = piece(rows)
        losses, grads = jax.tree.map(jnp.add, (done[0], done[1]), (losses, grads))
        return (losses, grads, _add_counts(done[2], stats)), None

    # Zeros of the right type rather than a first piece outside the loop: one traced copy.
    zero = jax.tree.map(_zeros, jax.eval_shape(piece, first))
    return jax.lax.scan(add, zero, batch)[0]


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype, out_sharding=like.sharding)


def _add_counts(done, new):
    """Adds integer counts; the bins are the same for every piece, they hang on the bias only."""
    if new is None:
        return None
    return new._replace(histogram=done.histogram + new.histogram, load=done.load + new.load)
