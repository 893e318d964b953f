"""Decoding state: KDA states, convolution windows and MLA latents (§2.1, §5.4).

Attention Residuals need none: they mix over depth, per token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.layers.kda import KdaCache
from k3jax.layers.mla import MlaCache
from k3jax.models.kimi_k3.checks import check_prompts, check_room
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.models.kimi_k3.model import KimiK3, project
from k3jax.parallel import specs


class Cache(NamedTuple):
    """State of B sequences.

    Attributes:
      kda: float32 states, convolution windows in the compute dtype; leading axis over KDA layers,
        size constant in length.
      mla: latents in the compute dtype, leading axis over MLA layers; one row per token.
      lengths: [B] int32, tokens so far.
    """

    kda: KdaCache
    mla: MlaCache
    lengths: jax.Array


def init_cache(cfg: ModelConfig, batch: int, max_length: int) -> Cache:
    """An empty cache: zeros, placed on the mesh in force.

    Args:
      cfg: model.
      batch: B, a multiple of the mesh's data x expert.
      max_length: S, rows for tokens of one sequence, the prompt's and the generated ones.

    Returns:
      States [L_kda, B, H, K, V], windows [L_kda, B, W - 1, H·(2K + V)], latents
      [L_mla, B, S, kv_lora_rank + shared_dim] and lengths [B], all 0.

    Raises:
      ValueError: `batch` cannot be split over the mesh.
    """
    k, m = cfg.kda, cfg.mla
    n_mla = len(cfg.mla_layers)
    n_kda = cfg.num_layers - n_mla
    channels = k.heads * (2 * k.key_dim + k.value_dim)
    dtype = cfg.compute_type
    row = m.kv_lora_rank + m.shared_dim
    states = (n_kda, batch, k.heads, k.key_dim, k.value_dim)
    windows = (n_kda, batch, k.conv_width - 1, channels)
    stacked = dict(dtype=dtype, out_sharding=specs.STACKED_CACHE)
    return Cache(
        KdaCache(
            state=jnp.zeros(states, jnp.float32, out_sharding=specs.STACKED_STATE),
            conv=jnp.zeros(windows, **stacked),
        ),
        MlaCache(jnp.zeros((n_mla, batch, max_length, row), **stacked)),
        jnp.zeros((batch,), jnp.int32, out_sharding=specs.PER_SEQUENCE),
    )


def _rows(cache: Cache) -> int:
    """Tokens that the cache can hold per sequence; states alone hold any number."""
    layers, _, rows, _ = cache.mla.latents.shape
    return rows if layers else jnp.iinfo(jnp.int32).max


def prefill(
    cfg: ModelConfig,
    variables: dict,
    token_ids: jax.Array,
    segment_ids: jax.Array | None,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Reads prompts into an empty cache.

    Args:
      cfg: model.
      variables: parameters and router bias.
      token_ids: [B, T], one prompt per row, padded on either side.
      segment_ids: [B, T], 1 at tokens and 0 at padding, which stands before or behind them, never
        inside; None when every token counts.
      cache: from `init_cache`, with a row for each token.

    Returns:
      Logits [B, V] float32 after each row's last token, and the filled cache.

    Raises:
      ValueError: padding inside a prompt, a cache in use, or one with too few rows; inside a
        compiled function, where neither has values, its caller answers for them.
    """
    check_prompts(token_ids, segment_ids, cache.lengths, _rows(cache))
    ids = jnp.ones_like(token_ids) if segment_ids is None else segment_ids
    out = KimiK3(cfg).apply(variables, token_ids, ids, cache[:2], cache.lengths)
    valid = ids > 0
    place = jnp.arange(ids.shape[1])
    last = jnp.max(jnp.where(valid, place, 0), axis=1, keepdims=True)
    hidden = jnp.sum(jnp.where((place == last)[..., None], out.hidden, 0.0), axis=1)
    lengths = cache.lengths + jnp.sum(valid, axis=1, dtype=jnp.int32)
    return project(variables["params"], cfg, hidden), Cache(out.kda, out.mla, lengths)


def decode_step(
    cfg: ModelConfig, variables: dict, token_ids: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Feeds one token per sequence.

    Args:
      cfg: model.
      variables: parameters and router bias.
      token_ids: [B] int32.
      cache: holds at least one free row per sequence.

    Returns:
      Logits [B, V] float32 for the next token, and the cache one token longer.

    Raises:
      ValueError: a sequence's rows are full; inside a compiled function the caller answers for
        that, a full cache drops rows.
    """
    check_room(cache.lengths, _rows(cache))
    out = KimiK3(cfg).apply(variables, token_ids[:, None], None, cache[:2], cache.lengths)
    logits = project(variables["params"], cfg, out.hidden[:, 0])
    return logits, Cache(out.kda, out.mla, cache.lengths + 1)
