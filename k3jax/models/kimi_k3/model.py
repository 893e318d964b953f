"""Tokens in, hidden states or logits out."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from k3jax.layers import initializers
from k3jax.layers.kda import KdaCache
from k3jax.layers.mla import MlaCache
from k3jax.layers.norms import rms_norm
from k3jax.layers.router import RouterStats
from k3jax.models.kimi_k3 import mtp
from k3jax.models.kimi_k3.backbone import Backbone, Context, Modes, concatenate
from k3jax.models.kimi_k3.checks import check_ids
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.parallel import specs, tokens
from pallas_kernels.precision import einsum


class ModelOutput(NamedTuple):
    """What a forward pass gives.

    Attributes:
      hidden: [B, T, D], after the final norm; the head multiplies it.
      stats: `RouterStats` over [L_moe + mtp_layers] layers when training, else None.
      max_logits: largest attention logits when asked for, else None: [L_mla, H], when training
        [L_mla + mtp_layers, H].
      kda: updated caches, leading axis L_kda, or None.
      mla: updated caches, leading axis L_mla, or None.
      mtp_hidden: [B, T, D], what the head multiplies to guess the token after the next one; None
        without that layer, and unless training.
    """

    hidden: jax.Array
    stats: RouterStats | None
    max_logits: jax.Array | None
    kda: KdaCache | None
    mla: MlaCache | None
    mtp_hidden: jax.Array | None = None


class KimiK3(nn.Module):
    """The text model. Collections: `params`, and `router` which no optimizer sees."""

    cfg: ModelConfig
    modes: Modes = Modes()

    @nn.compact
    def __call__(
        self,
        token_ids: jax.Array,
        segment_ids: jax.Array | None = None,
        caches: tuple[KdaCache | None, MlaCache | None] = (None, None),
        lengths: jax.Array | None = None,
    ) -> ModelOutput:
        """Runs the model; `forward`, `cache.prefill` and `cache.decode_step` call it.

        Args:
          token_ids: [B, T] int32.
          segment_ids: as in `forward`. With caches: 1 at tokens and 0 at padding; None is a
            decoding step of T = 1.
          caches: (KdaCache, MlaCache) with leading axes L_kda and L_mla, or Nones without decoding.
          lengths: [B] int32, valid rows of the MLA cache before this call; None without caches.

        Returns:
          `ModelOutput`; its caches hold the tokens of this call.

        Raises:
          ValueError: caches, no segment ids and more than one token, or a mesh that splits the
            sequence.
        """
        c = self.cfg
        draw = initializers.normal(c.embedding_std, specs.EMBEDDING, c.hidden_size)
        table = self.param("embedding", draw, (c.vocab_size, c.hidden_size), c.param_type)
        if not c.tie_embeddings:
            head = initializers.normal(c.init_std, specs.HEAD, c.hidden_size)
            self.param("lm_head", head, (c.hidden_size, c.vocab_size), c.param_type)
        # The table is gathered whole, V·D numbers in the compute dtype: an index into a split axis
        # would need an exchange per token.
        rows = tokens.whole(table.astype(c.compute_type))
        x = rows.at[token_ids].get(out_sharding=specs.ACTIVATION)
        if segment_ids is None:
            valid = jnp.ones(token_ids.shape, bool, out_sharding=specs.TOKENS)
        else:
            valid = segment_ids > 0
        context = Context(segment_ids, valid, lengths)
        mixed, out, behind = Backbone(c, self.modes, name="backbone")(x, context, caches)
        self.sow("intermediates", "output_mix", mixed)
        ones = initializers.constant(1.0, specs.VECTOR)
        final_norm = self.param("final_norm", ones, (c.hidden_size,), c.param_type)
        hidden, ahead = rms_norm(mixed, final_norm, c.norm_eps), None
        if c.mtp_layers and self.modes.train:
            ids = valid.astype(jnp.int32) if segment_ids is None else segment_ids
            known = mtp.has_next(ids)
            after = rows.at[mtp.next_in_document(token_ids, ids)].get(out_sharding=specs.ACTIVATION)
            after = jnp.where(known[..., None], after, 0)
            layer = mtp.MultiTokenPrediction(c, self.modes, name="mtp")
            ahead, more = layer(mixed, after, context._replace(valid=known), behind)
            out = concatenate([out, more])
        return ModelOutput(hidden, out.stats, out.max_logits, out.kda, out.mla, ahead)


def init(cfg: ModelConfig, key: jax.Array) -> dict:
    """Draws all variables: {"params": ..., "router": ...}. The same key gives the same bits."""
    dummy = jnp.zeros(tokens.smallest_batch(), jnp.int32, out_sharding=specs.TOKENS)
    # The layer of multi-token prediction runs, and so gets its parameters, in training only.
    variables = KimiK3(cfg, Modes(train=cfg.mtp_layers > 0)).init(key, dummy)
    return {"params": variables["params"], "router": variables["router"]}


def abstract(cfg: ModelConfig) -> dict:
    """Shapes, dtypes and shardings of `init`'s variables on the mesh in force, without memory."""
    return jax.eval_shape(lambda key: init(cfg, key), jax.random.key(0))


def forward(
    cfg: ModelConfig,
    variables: dict,
    token_ids: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    train: bool = False,
    max_logits: bool = False,
) -> ModelOutput:
    """The whole sequence at once.

    Args:
      cfg: model.
      variables: from `init` or a checkpoint.
      token_ids: [B, T] int32.
      segment_ids: [B, T] int32; 0 is padding, otherwise non-decreasing, one id per document,
        whose tokens stand together. Convolutions, KDA states and the attention mask restart with
        every document. None is one document per row.
      train: return router statistics and run the layer of multi-token prediction. Evaluation and
        generation leave it off, so they can never move the balancing bias.
      max_logits: return the largest attention logits.

    Raises:
      ValueError: segment ids break the rule above. Inside a compiled function they have no values
        and are not checked: check them where they are made.
    """
    check_ids(segment_ids)
    return KimiK3(cfg, Modes(train, max_logits)).apply(variables, token_ids, segment_ids)


def head_weight(params: dict, cfg: ModelConfig) -> jax.Array:
    """[D, V] output matrix in the compute dtype, gathered whole on every device."""
    weight = params["embedding"].T if cfg.tie_embeddings else params["lm_head"]
    return tokens.whole(weight.astype(cfg.compute_type))


def project(params: dict, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits of hidden states, [..., D] -> [..., V] float32; products accumulate in float32."""
    weight = head_weight(params, cfg)
    return einsum("...d,dv->...v", hidden, weight, preferred_element_type=jnp.float32)


def logits(
    cfg: ModelConfig, variables: dict, token_ids: jax.Array, segment_ids: jax.Array | None = None
) -> jax.Array:
    """[B, T, V] float32; zero at padding. For short inputs: training never forms this array."""
    out = forward(cfg, variables, token_ids, segment_ids)
    full = project(variables["params"], cfg, out.hidden)
    return full if segment_ids is None else jnp.where(segment_ids[..., None] > 0, full, 0.0)
