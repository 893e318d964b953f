"""One optimizer update as a pure function.

    g = ∇ Σ w·nll / Σ w over the whole batch (plus mtp_loss_weight times the like mean of the
        multi-token layer, where the model has one)
    params ← clip(tx(g));  bias ← QB(histogram)

The batch may be computed in pieces (`passes.py`). QK-Clip (§3.3) scales the heads whose logits grew
too large in this batch. Quantile Balancing (§2.3.3), or the rule in its place, sets the router bias
once, after the update, from counts of all pieces; the batch itself was routed with the old bias.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.layers.router import RouterStats
from k3jax.models.kimi_k3 import depth
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.loss import Batch
from k3jax.optim import optimizer, quantile_balancing, weight_clip
from k3jax.optim.norms import norms_by_name
from k3jax.optim.optimizer import OptimizerConfig
from k3jax.train import balance
from k3jax.train.passes import run_passes
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
      update_norms: likewise, of the optimizer's update, learning rate and decay included; before
        QK-Clip, and of the update that was made even where it is then skipped.
      mtp_loss: float32 [], nats per token two ahead, unweighted; None without that layer.
      max_logit: float32 [L_mla + mtp_layers], largest attention logit over heads, before the
        update; None without QK-Clip.
      aux_loss: float32 [], what the balancing loss added to the loss; None without one.
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
    max_logit: jax.Array | None = None
    aux_loss: jax.Array | None = None


# One object per configuration: what is compiled with it is found again by later runs.
run_optimizer = functools.lru_cache(maxsize=8)(optimizer.make_optimizer)


@functools.lru_cache(maxsize=8)
def compiled_step(
    cfg: ModelConfig, opt: OptimizerConfig, steps: int, skip_not_finite: bool = False
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """The jitted `train_step` of a run; the old state's buffers are given away to the new one."""
    rate = optimizer.learning_rate(opt, steps)
    step = train_step(cfg, run_optimizer(opt, steps), rate, qk_clip=opt.qk_clip)
    return jax.jit(skipping(step) if skip_not_finite else step, donate_argnums=0)


def train_step(
    cfg: ModelConfig,
    tx,
    rate: Callable[[jax.Array], jax.Array],
    *,
    qk_clip: float | None = None,
    implementation: str | None = None,
) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """Makes the pure step.

    Args:
      cfg: The model.
      tx: A gradient transformation (`init`, `update`).
      rate: Step -> learning rate, for the metrics; `tx` has its own.
      qk_clip: Threshold of QK-Clip, or None.
      implementation: Of the cross-entropy, see `nll_sum`.

    Returns:
      A function of (state, micro-batches), each micro-batch a dict of [B/M, T].
    """

    def step(state: TrainState, pieces: Sequence[Batch]) -> tuple[TrainState, StepMetrics]:
        batch = jax.tree.map(lambda *a: jnp.stack(a), *pieces)
        done = run_passes(
            cfg, state, batch, max_logits=qk_clip is not None, implementation=implementation
        )
        updates, opt_state = tx.update(done.grads, state.opt_state, state.params)
        params = optimizer.apply_updates(state.params, updates)
        if done.max_logits is not None:
            rows = depth.mla_paths(cfg)
            params = weight_clip.clip(params, done.max_logits, qk_clip, rows, cfg.mla.nope_dim)
        router = state.router
        if done.stats is not None:
            bias = balance.next_bias(cfg.moe, router["backbone"]["bias"], done.stats)
            router = {"backbone": {"bias": bias}}
        metrics = StepMetrics(
            loss=done.loss,
            grad_norm=optimizer.global_norm(done.grads),
            learning_rate=rate(state.step),
            tokens=jnp.sum(batch["segment_ids"] > 0, dtype=jnp.int32),
            **_loads(done.stats),
            grad_norms=norms_by_name(done.grads),
            update_norms=norms_by_name(updates),
            mtp_loss=done.mtp_loss,
            max_logit=_largest(done.max_logits),
            aux_loss=done.aux_loss,
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


def _largest(max_logits: jax.Array | None) -> jax.Array | None:
    """[L] over heads; 0 instead of -inf for a batch of padding, which JSON cannot hold."""
    if max_logits is None:
        return None
    top = jnp.max(max_logits, axis=-1)
    return jnp.where(jnp.isneginf(top), 0.0, top)


def _loads(stats: RouterStats | None) -> dict[str, jax.Array | None]:
    """The measures of balance, by their names in `StepMetrics`."""
    if stats is None:
        return dict.fromkeys(("max_violation", "dead_experts", "load"))
    return {
        "max_violation": quantile_balancing.max_violation(stats.load),
        "dead_experts": quantile_balancing.dead_experts(stats.load),
        "load": stats.load,
    }
