"""Next-token loss over packed rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from k3jax.models.kimi_k3 import model, mtp
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.parallel import specs
from k3jax.parallel.tokens import per_device, sum_over_tokens
from pallas_kernels.cross_entropy import cross_entropy

Batch = dict[str, jax.Array]  # tokens, targets, segment_ids int32 and weights float32, all [B, T]
FIELDS = ("tokens", "targets", "segment_ids", "weights")


def place(batch: dict[str, np.ndarray]) -> Batch:
    """Puts the arrays a step reads, [B, T], on the mesh, rows split over its batch axes."""
    sharding = NamedSharding(jax.sharding.get_mesh(), specs.TOKENS)
    return {name: jax.device_put(batch[name], sharding) for name in FIELDS}


def nll_sum(
    hidden: jax.Array, head: jax.Array, batch: Batch, implementation: str | None = None
) -> jax.Array:
    """Sum of -weight · log p(target), float32; no array of [B, T, V] is made.

    Args:
      hidden: [B, T, D], after the final norm.
      head: [D, V], whole on every device.
      batch: `targets` and `weights`; a target of weight 0 (padding, the last token of a
        document) counts for nothing, whatever its id.
      implementation: of `cross_entropy`, see `pallas_kernels.dispatch`.
    """
    run = per_device(_local_sum, implementation, out_specs=specs.REPLICATED)
    return run(hidden, head, batch["targets"], batch["weights"])


def _local_sum(implementation, x, w, targets, weights):
    x = x.reshape(-1, x.shape[-1])
    total = cross_entropy(
        x, w, targets.reshape(-1), weights.reshape(-1), implementation=implementation
    )
    return sum_over_tokens(total)  # one float32 per device


class Sums(NamedTuple):
    """What a forward pass gives to training, each over the whole batch.

    Attributes:
      nll: float32 [], of the next token, see `nll_sum`.
      mtp_nll: float32 [], of the token after it, see `two_ahead`; None without that layer.
      stats: router statistics, None unless training.
      max_logits: largest attention logits [L_mla + mtp_layers, H], None unless asked for.
    """

    nll: jax.Array
    mtp_nll: jax.Array | None
    stats: Any
    max_logits: jax.Array | None


def two_ahead(batch: Batch) -> Batch:
    """The batch whose target at t is token t+2 of the same document.

    It is the main target of token t+1, with that one's weight: what is masked as a target of the
    main loss is masked here, and the last two tokens of a document count for nothing. Leading axes
    before [B, T] are allowed.
    """
    ids = batch["segment_ids"]
    ahead = {n: mtp.next_in_document(batch[n], ids) for n in ("targets", "weights")}
    return {**batch, **ahead}


def forward_sums(
    cfg: ModelConfig,
    params: Any,
    router: Any,
    batch: Batch,
    *,
    train: bool,
    max_logits: bool = False,
    implementation: str | None = None,
) -> Sums:
    """Runs the model on a batch.

    Documents packed in one row do not see each other, so the sums equal those of the documents
    run one by one (to rounding).

    Args:
      cfg: The model.
      params: Its parameters.
      router: Its balancing bias, read and never written.
      batch: See `Batch`.
      train: Whether to run the multi-token layer and to count router statistics; False counts
        nothing.
      max_logits: Whether to find the largest attention logits.
      implementation: As in `nll_sum`; the other operations' are fields of `cfg`.
    """
    variables = {"params": params, "router": router}
    out = model.forward(
        cfg, variables, batch["tokens"], batch["segment_ids"], train=train, max_logits=max_logits
    )
    head = model.head_weight(params, cfg)
    ahead = None
    if out.mtp_hidden is not None:
        ahead = nll_sum(out.mtp_hidden, head, two_ahead(batch), implementation)
    nll = nll_sum(out.hidden, head, batch, implementation)
    return Sums(nll, ahead, out.stats, out.max_logits)


def forward_nll(
    cfg: ModelConfig, params: Any, router: Any, batch: Batch, *, train: bool
) -> tuple[jax.Array, Any]:
    """(Float32 sum of `nll_sum`, router statistics or None) of `forward_sums`."""
    sums = forward_sums(cfg, params, router, batch, train=train)
    return sums.nll, sums.stats


def total_weight(batch: Batch) -> jax.Array:
    """Sum of the weights, at least 1 so that a batch of padding has loss 0 and not NaN."""
    return jnp.maximum(jnp.sum(batch["weights"]), 1.0)
