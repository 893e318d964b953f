"""Multi-token prediction: one more layer that guesses the token after the next one (§2, Table 1).

The report has one such layer and says no more of it; its form here is the one that vLLM serves:

    x_t = W [RMS(embed(token t+1)) ; RMS(h_t)],   y = RMS(Layer(x)),   logits = head(y)

where h is the backbone's last mixture over depth, before the final norm, Layer a latent-attention
layer with experts and ordinary residuals, and head the model's own. y_t predicts token t+2.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from k3jax.layers import initializers
from k3jax.layers.norms import rms_norm
from k3jax.models.kimi_k3 import depth
from k3jax.models.kimi_k3.backbone import Block, Context, Modes, Outputs
from k3jax.models.kimi_k3.config import ModelConfig
from k3jax.parallel import specs
from pallas_kernels.precision import einsum


def _next(x: jax.Array) -> jax.Array:
    """x[..., t + 1], 0 in the last place."""
    return jnp.pad(x[..., 1:], [(0, 0)] * (x.ndim - 1) + [(0, 1)])


def has_next(segment_ids: jax.Array) -> jax.Array:
    """Whether the next place of a row holds a token of the same document, bool [..., T]."""
    return (segment_ids > 0) & (_next(segment_ids) == segment_ids)


def next_in_document(x: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """x[..., t + 1] where that is a token of t's document, else 0.

    Args:
      x: [..., T], a value per token.
      segment_ids: [..., T] int32, 0 is padding.
    """
    return jnp.where(has_next(segment_ids), _next(x), 0)


class MultiTokenPrediction(nn.Module):
    """The layer with its two input norms, projection and final norm."""

    cfg: ModelConfig
    modes: Modes

    @nn.compact
    def __call__(
        self, mixed: jax.Array, next_embedding: jax.Array, context: Context, bias: jax.Array
    ) -> tuple[jax.Array, Outputs]:
        """Runs the layer.

        Args:
          mixed: [B, T, D], the backbone's last mixture, before the final norm.
          next_embedding: [B, T, D], of token t+1; zeros where the document has none.
          context: as in the backbone; `valid` leaves out tokens without a next one, which then
            reach no expert and are not counted.
          bias: [1, E], the layer's row of the router bias.

        Returns:
          [B, T, D] for the head, and `Outputs` with leading axes of one layer.
        """
        # The layer is one more block of one layer, so its leaves have the leading axis of all
        # others; without Attention Residuals its prefix is the ordinary residual stream.
        c = dataclasses.replace(self.cfg, attn_res_block=None)
        d = c.hidden_size
        ones = initializers.constant(1.0, specs.VECTOR)
        norms = {
            name: self.param(name, ones, (d,), c.param_type)
            for name in ("embed_norm", "hidden_norm", "final_norm")
        }
        both = jnp.concatenate(
            [
                rms_norm(next_embedding, norms["embed_norm"], c.norm_eps),
                rms_norm(mixed, norms["hidden_norm"], c.norm_eps),
            ],
            axis=-1,
        )
        draw = initializers.normal(c.init_std, specs.IN_MATRIX, 2 * d)
        w_eh = self.param("w_eh", draw, (2 * d, d), c.param_type)
        x = einsum("bte,ed->btd", both, w_eh.astype(both.dtype), out_sharding=specs.ACTIVATION)
        block = Block(c, (depth.mtp_group(c),), self.modes, name="block")
        used = {"kda": 0, "mla": 0, "moe": 0}
        x, (out,) = block(x, (), context, bias, (None, None), used)
        return rms_norm(x, norms["final_norm"], c.norm_eps), out
