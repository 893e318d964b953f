"""QK-Clip: bounds the attention logits of each head by scaling its weights (§3.3, from K2).

With S the largest logit of a head in the step, over all its queries, keys, micro-batches and
devices, gamma = min(1, tau / S). A logit is a sum of two products, q_nope · k_nope and
q_shared · k_shared. The key's shared part serves all heads and must stay, so

  W_q_nope <- sqrt(gamma) W_q_nope,   W_k_nope <- sqrt(gamma) W_k_nope,
  W_q_shared <- gamma W_q_shared

make both products, and so every logit of the head, gamma times what it was. It follows the
optimizer's update, so the next step's logits exceed tau by what one update adds. KDA normalises
queries and keys and needs none.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Row = tuple[tuple[str, ...], int]


def check_threshold(threshold: float | None) -> None:
    """Refuses a threshold that would turn every head off.

    Raises:
      ValueError: it is not above 0.
    """
    if threshold is not None and not threshold > 0:
        raise ValueError(
            f"qk_clip={threshold}: the largest logit must be above 0; 100 is usual, none for no "
            "clipping"
        )


def head_factors(max_logits: jax.Array, threshold: float) -> jax.Array:
    """gamma of each head, [..., H] float32 -> [..., H]; 1 for a head at or below the threshold.

    1 too for a head that saw no token (-inf) or whose logits are no numbers: there the loss tells.
    """
    over = (max_logits > threshold) & jnp.isfinite(max_logits)
    return jnp.where(over, threshold / jnp.where(over, max_logits, 1.0), 1.0)


def clip_queries(w: jax.Array, gamma: jax.Array, nope_dim: int) -> jax.Array:
    """Scales a query projection.

    Args:
      w: [..., R, H, nope + shared], content channels first.
      gamma: [..., H] float32.
      nope_dim: number of content channels.
    """
    channel = jnp.arange(w.shape[-1]) < nope_dim
    factor = jnp.where(channel, jnp.sqrt(gamma)[..., None], gamma[..., None])
    return _scaled(w, factor)


def clip_keys(w: jax.Array, gamma: jax.Array) -> jax.Array:
    """Scales the content part of a key projection, [..., R, H, nope], by sqrt(gamma) [..., H]."""
    return _scaled(w, jnp.sqrt(gamma)[..., None])


def clip(
    params: Any, max_logits: jax.Array, threshold: float, rows: Sequence[Row], nope_dim: int
) -> Any:
    """Parameters after QK-Clip; bit for bit the same ones where no head exceeds the threshold.

    Args:
      params: nested dict of the model.
      max_logits: [L, H] float32, one row per latent-attention layer.
      threshold: tau.
      rows: for each row of `max_logits` the path of its layer's leaves `w_k_b` and `w_q_b` (or
        `w_q` without a query latent), and its index on their leading axis; the rows of one path
        are all that axis has.
      nope_dim: content channels of a head.

    Returns:
      The tree with those leaves replaced, in their own dtype and sharding.

    Raises:
      ValueError: there are not as many rows as `max_logits` has.
    """
    if len(rows) != max_logits.shape[0]:
        raise ValueError(
            f"max_logits has {max_logits.shape[0]} rows and {len(rows)} layers were named; name "
            "every latent-attention layer once"
        )
    gamma = head_factors(max_logits, threshold)
    copies: dict[tuple[str, ...], dict[int, int]] = {}
    for row, (path, copy) in enumerate(rows):
        copies.setdefault(path, {})[copy] = row
    for path, row_of in copies.items():
        own = jnp.stack([gamma[row_of[copy]] for copy in range(len(row_of))])
        params = _at(params, path, lambda layer, own=own: _clip_layer(layer, own, nope_dim))
    return params


def _clip_layer(layer: dict, gamma: jax.Array, nope_dim: int) -> dict:
    """One module's leaves with a leading axis of copies; gamma is [copies, H]."""
    query = "w_q_b" if "w_q_b" in layer else "w_q"
    return {
        **layer,
        query: clip_queries(layer[query], gamma, nope_dim),
        "w_k_b": clip_keys(layer["w_k_b"], gamma),
    }


def _at(tree: dict, path: tuple[str, ...], change) -> dict:
    """A copy of a nested dict with one subtree changed."""
    if not path:
        return change(tree)
    return {**tree, path[0]: _at(tree[path[0]], path[1:], change)}


def _scaled(w: jax.Array, factor: jax.Array) -> jax.Array:
    """Product in float32; `factor` [..., H, K] has no axis for R."""
    return (w.astype(jnp.float32) * jnp.expand_dims(factor, -3)).astype(w.dtype)
