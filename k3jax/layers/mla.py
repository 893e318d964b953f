"""Gated multi-head latent attention without positions (§2.1.2, Eq. 7)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from k3jax.layers import initializers
from k3jax.layers.norms import rms_norm
from k3jax.parallel import specs, tokens
from pallas_kernels.attention import attention
from pallas_kernels.precision import einsum


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Shape of the mixer.

    Attributes:
      heads: H.
      q_lora_rank: width of the query latent; None projects queries directly (Kimi-Linear).
      kv_lora_rank: width of the key-value latent, the part of the cache that is normalised.
      nope_dim: per-head key channels expanded from the latent.
      shared_dim: key channels shared by all heads. Published as the "rope" width, never rotated:
        shifting every position changes nothing.
      value_dim: V.
      output_gate: multiply the output by σ(w_g x) per channel.
      latent_norm_eps: of both latent norms; 1e-6 in the released code, unlike the other norms.
      implementation: see `pallas_kernels.dispatch`.
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    shared_dim: int
    value_dim: int
    output_gate: bool = True
    latent_norm_eps: float = 1e-6
    implementation: str | None = None

    def __post_init__(self):
        for name in ("heads", "kv_lora_rank", "nope_dim", "shared_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"mla.{name}={getattr(self, name)}: must be at least 1; raise it")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError(f"mla.q_lora_rank={self.q_lora_rank}: at least 1, or none for direct")

    @property
    def query_dim(self) -> int:
        """Width of one head's query and expanded key."""
        return self.nope_dim + self.shared_dim


class MlaCache(NamedTuple):
    """One row per token: the normalised latent followed by the shared key.

    Attributes:
      latents: [B, S, kv_lora_rank + shared_dim]; rows at and past a sequence's length are unread.
    """

    latents: jax.Array


def expanded(
    cfg: MlaConfig,
    max_logits: bool,
    q: jax.Array,
    latents: jax.Array,
    w_k_b: jax.Array,
    w_v_b: jax.Array,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention over keys and values expanded per head: training and prefill.

    Args:
      cfg: shape.
      max_logits: also find the largest logit of each head over all tokens of the mesh.
      q: [B, T, H, nope + shared].
      latents: [B, T, kv_lora_rank + shared].
      w_k_b: [kv_lora_rank, H, nope].
      w_v_b: [kv_lora_rank, H, V].
      segment_ids: [B, T] or None.

    Returns:
      Output [B, T, H, V] in float32, as the report keeps it in training, and the largest logits
      [H] float32, None without `max_logits`.
    """
    c, k_shared = latents[..., : cfg.kv_lora_rank], latents[..., cfg.kv_lora_rank :]
    k_nope = einsum("btr,rhk->bthk", c, w_k_b)
    v = einsum("btr,rhv->bthv", c, w_v_b)
    shared = jnp.broadcast_to(k_shared[:, :, None], (*k_nope.shape[:3], cfg.shared_dim))
    o, top = attention(
        q, jnp.concatenate([k_nope, shared], axis=-1), v,
        segment_ids=segment_ids, scale=cfg.query_dim**-0.5, out_dtype=jnp.float32,
        return_max_logits=max_logits, implementation=cfg.implementation,
    )  # fmt: skip
    return o, tokens.max_over_tokens(top) if max_logits else None


def absorbed(
    cfg: MlaConfig,
    q: jax.Array,
    cache: jax.Array,
    lengths: jax.Array,
    w_k_b: jax.Array,
    w_v_b: jax.Array,
) -> jax.Array:
    """Decoding form: scores and sums live in latent space, keys and values never expand.

    Args:
      cfg: shape.
      q: [B, T, H, nope + shared], the newest T tokens, already in the cache.
      cache: [B, S, kv_lora_rank + shared].
      lengths: [B] valid rows including the newest T.
      w_k_b: [kv_lora_rank, H, nope].
      w_v_b: [kv_lora_rank, H, V].

    Returns:
      [B, T, H, V], float32; equal to `expanded` up to rounding.
    """
    T, S = q.shape[1], cache.shape[1]
    wide = cache.astype(jnp.float32)
    q = q.astype(jnp.float32)
    q_latent = einsum("bthk,rhk->bthr", q[..., : cfg.nope_dim], w_k_b.astype(jnp.float32))
    query = jnp.concatenate([q_latent, q[..., cfg.nope_dim :]], axis=-1)
    logits = einsum("bthr,bsr->bhts", query, wide) * cfg.query_dim**-0.5
    newest = lengths[:, None] - T + jnp.arange(T)
    seen = jnp.arange(S)[None, None] <= newest[..., None]
    # Rows past the length may hold anything, NaN included: mask before and after the softmax.
    p = jax.nn.softmax(jnp.where(seen[:, None], logits, -jnp.inf), axis=-1)
    latent = jnp.where((jnp.arange(S) < lengths[:, None])[..., None], wide, 0.0)
    mixed = einsum("bhts,bsr->bthr", p, latent[..., : cfg.kv_lora_rank])
    return einsum("bthr,rhv->bthv", mixed, w_v_b.astype(jnp.float32))


def append(cache: jax.Array, latents: jax.Array, start: jax.Array, valid: jax.Array) -> jax.Array:
    """Writes each row's valid tokens behind its `start` rows, dropping padding.

    Args:
      cache: [B, S, C].
      latents: [B, T, C].
      start: [B], rows already valid.
      valid: [B, T] bool.
    """
    place = start[:, None] + jnp.cumsum(valid, axis=1) - 1
    rows = jnp.where(valid, place, cache.shape[1])  # out of range: dropped
    return jax.vmap(lambda c, r, x: c.at[r].set(x.astype(c.dtype), mode="drop"))(
        cache, rows, latents
    )


def extend(cfg: MlaConfig, q, latents, cache: jax.Array, lengths, w_k_b, w_v_b):
    """Appends the newest tokens to the cache and attends to all of it in latent space.

    Args:
      cfg: shape.
      q: [B, T, H, nope + shared], of the newest T tokens.
      latents: [B, T, kv_lora_rank + shared], theirs.
      cache: [B, S, kv_lora_rank + shared].
      lengths: [B], rows already valid.
      w_k_b: [kv_lora_rank, H, nope].
      w_v_b: [kv_lora_rank, H, V].

    Returns:
      [B, T, H, V] float32, and the cache with T more rows.
    """
    rows = append(cache, latents, lengths, jnp.ones(latents.shape[:2], bool))
    return absorbed(cfg, q, rows, lengths + q.shape[1], w_k_b, w_v_b), rows


class LatentAttention(nn.Module):
    """The mixer. `x` and the result are [B, T, D]."""

    cfg: MlaConfig
    init_std: float | None = 0.02
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None,
        cache: MlaCache | None = None,
        lengths: jax.Array | None = None,
        max_logits: bool = False,
    ) -> tuple[jax.Array, MlaCache | None, jax.Array | None]:
        """Attends causally within documents.

        Args:
          x: [B, T, D].
          segment_ids: [B, T]; 0 is padding. With a cache: 1 marks the tokens that count.
          cache: None trains. With ids: an empty cache is filled. Without ids: the tokens are
            appended after `lengths` rows and read the cache in absorbed form.
          lengths: [B], valid cache rows before this call.
          max_logits: also return each head's largest logit (never with absorbed decoding).

        Returns:
          [B, T, D] in x's dtype, the updated cache or None, and largest logits [H] float32 or
          None.

        Raises:
          ValueError: the mesh splits the sequence.
        """
        tokens.refuse_split_sequence("latent attention")
        c = self.cfg
        q, latents = self._queries(x), self._latents(x)
        # Small: R·H·(nope + value) numbers arrive on every device.
        w_k_b = tokens.whole(self._linear("w_k_b", (c.kv_lora_rank, c.heads, c.nope_dim)))
        w_v_b = tokens.whole(self._linear("w_v_b", (c.kv_lora_rank, c.heads, c.value_dim)))
        up = (w_k_b.astype(x.dtype), w_v_b.astype(x.dtype))
        top = None
        if cache is not None and segment_ids is None:
            o, cache = self._decode(q, latents, cache, lengths, up)
        else:
            ids = () if segment_ids is None else (segment_ids,)
            out_specs = (specs.HEADS, specs.VECTOR)
            run = tokens.per_device(expanded, c, max_logits, out_specs=out_specs)
            o, top = run(q, latents, *up, *ids)
            if cache is not None:
                fill = tokens.per_device(append, out_specs=specs.SEQUENCE_CACHE, check_vma=False)
                cache = MlaCache(fill(cache.latents, latents, lengths, segment_ids > 0))
        return self._output(x, o), cache, top

    def _decode(self, q, latents, cache, lengths, up):
        # No gradient, and `context` has length one: see the twin remark in `kda.py`.
        out_specs = (specs.HEADS, specs.SEQUENCE_CACHE)
        run = tokens.per_device(extend, self.cfg, out_specs=out_specs, check_vma=False)
        o, rows = run(q, latents, cache.latents, lengths, *up)
        return o, MlaCache(rows)

    def _linear(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        spec = specs.IN_MATRIX if len(shape) == 2 else specs.IN_HEADS
        init = initializers.normal(self.init_std, spec, shape[0])
        return self.param(name, init, shape, self.param_dtype)

    def _queries(self, x: jax.Array) -> jax.Array:
        c, d = self.cfg, x.shape[-1]
        if c.q_lora_rank is None:
            w_q = self._linear("w_q", (d, c.heads, c.query_dim))
            return einsum("btd,dhk->bthk", x, w_q.astype(x.dtype))
        w_q_a = self._linear("w_q_a", (d, c.q_lora_rank))
        w_q_b = self._linear("w_q_b", (c.q_lora_rank, c.heads, c.query_dim))
        ones = initializers.constant(1.0, specs.VECTOR)
        q_norm = self.param("q_norm", ones, (c.q_lora_rank,), self.param_dtype)
        low = einsum("btd,dr->btr", x, w_q_a.astype(x.dtype))
        low = rms_norm(low, q_norm, c.latent_norm_eps)
        return einsum("btr,rhk->bthk", low, w_q_b.astype(x.dtype))

    def _latents(self, x: jax.Array) -> jax.Array:
        c = self.cfg
        w_kv_a = self._linear("w_kv_a", (x.shape[-1], c.kv_lora_rank + c.shared_dim))
        ones = initializers.constant(1.0, specs.VECTOR)
        kv_norm = self.param("kv_norm", ones, (c.kv_lora_rank,), self.param_dtype)
        both = einsum("btd,dr->btr", x, w_kv_a.astype(x.dtype))
        latent = rms_norm(both[..., : c.kv_lora_rank], kv_norm, c.latent_norm_eps)
        return jnp.concatenate([latent, both[..., c.kv_lora_rank :]], axis=-1)

    def _output(self, x: jax.Array, o: jax.Array) -> jax.Array:
        c, d = self.cfg, x.shape[-1]
        if c.output_gate:
            w_g = self._linear("w_g", (d, c.heads, c.value_dim))
            gate = einsum("btd,dhv->bthv", x, w_g.astype(x.dtype))
            o = o * jax.nn.sigmoid(gate.astype(jnp.float32))
        into = initializers.normal(self.init_std, specs.OUT_HEADS, c.heads * c.value_dim)
        w_o = self.param("w_o", into, (c.heads, c.value_dim, d), self.param_dtype)
        return einsum(
            "bthv,hvd->btd", o.astype(x.dtype), w_o.astype(x.dtype), out_sharding=specs.ACTIVATION
        )
